# config/tiny.py: a small T5 on the documentation of Python, numpy and torch
# run    python train.py config/tiny.py
# needs  nothing; prepares data/pydocs at its first run
# gives  TBD
data_dir = "data/pydocs"
input_length = 64
d_model = 192
d_kv = 32
n_head = 6
d_ff = 512
n_layer = 3
optimizer = "adamwscale"
learning_rate = 2e-2
warmup_steps = 100
warmup_start = 0.05
schedule = "linear"
beta2 = 0.98
batch_size = 32
max_steps = 1_500
eval_every = 500
eval_batches = 8
log_every = 50
n_sample = 3
