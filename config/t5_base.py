# config/t5_base.py: T5 v1.1 base (248 million parameters) on C4, nanoT5's recipe, the head initialised right
# run    python train.py config/t5_base.py --batch_size=128
# needs  data/c4 (python prepare.py --source=c4 --n_tokens=5e9 --out_dir=data/c4) and a GPU;
#        where 128 rows at once do not fit its memory, --micro_batch_size=32
# gives  not run yet
d_model = 768
d_ff = 2048
n_head = 12
n_layer = 12
