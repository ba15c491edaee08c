# config/t5_small.py: T5 v1.1 small (77 million parameters) on C4, nanoT5's recipe
# run    python train.py config/t5_small.py --micro_batch_size=32
# needs  data/c4 (python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4) and a GPU; a CPU for trials
# gives  not run to its end yet
d_model = 512
d_ff = 1024
n_head = 6
n_layer = 8
