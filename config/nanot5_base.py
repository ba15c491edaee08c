# config/nanot5_base.py: the nanoT5 paper's default run exactly (arXiv 2309.02373), its initialisation too
# run    python train.py config/nanot5_base.py
# needs  data/c4 (python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4); one A100 of 80 GB in the paper
# gives  not run yet; the paper reports a held-out loss of 1.953
d_model = 768
d_ff = 2048
n_head = 12
n_layer = 12
init = "nanot5"
dropout = 0.0

max_steps = 65_536
batch_size = 128
optimizer = "adamwscale"
learning_rate = 2e-2
schedule = "cosine"
warmup_steps = 10_000
warmup_start = 0.5
final_lr = 1e-5
weight_decay = 0.0
grad_clip = 1.0
