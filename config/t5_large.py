# config/t5_large.py: T5 v1.1 large (783 million parameters) on C4, nanoT5's recipe
# run    python train.py config/t5_large.py --micro_batch_size=16
# needs  data/c4 (python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4) and a GPU
# gives  not run yet
d_model = 1024
d_ff = 2816
n_head = 16
n_layer = 24
