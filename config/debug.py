# config/debug.py: seconds on a CPU, to see whether an idea runs at all
# run    python train.py config/debug.py
# needs  nothing; prepares data/pydocs at its first run
# gives  20 steps in 5 seconds on 2 CPU cores
data_dir = "data/pydocs"
input_length = 64
d_model = 64
d_kv = 16
d_ff = 128
n_head = 4
n_layer = 2
batch_size = 8
max_steps = 20
warmup_steps = 5
eval_batches = 1
log_every = 5
