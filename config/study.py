# config/study.py: the small model of the recipe study (results/, LOG.md 2026-12-02): nanoT5's exact recipe, scaled down
# run    python sweep.py config/study.py --seed=0,1,2 --results=results/mine.jsonl
# needs  data/study: python prepare.py --source=my/texts --vocab_size=1024 --out_dir=data/study
# gives  see README: what each setting is worth
data_dir = "data/study"
input_length = 64

d_model = 128
d_kv = 32
d_ff = 320
n_head = 4
n_layer = 1
init = "nanot5"

optimizer = "adamwscale"
schedule = "cosine"
warmup_start = 0.5

batch_size = 32
max_steps = 2_000
warmup_steps = 300          # the paper's share: 10,000 of 65,536
eval_every = 250
eval_batches = 8
save_every = 500
