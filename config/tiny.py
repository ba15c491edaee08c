# config/tiny.py: a small T5 on the documentation of Python, numpy and torch, in minutes on a CPU
# run    python train.py config/tiny.py
# needs  nothing; prepares data/pydocs at its first run
# gives  held-out loss 8.099 -> 3.232 (frequencies alone: 4.714) in 3 min 57 s, preparation included, 2 cores
data_dir = "data/pydocs"
input_length = 64

d_model = 128
d_kv = 32
d_ff = 384
n_head = 4
n_layer = 3
match_init = True
local_init = 2.0

optimizer = "muon"
muon_lr = 1e-2
muon_momentum = 0.8
normuon = True
learning_rate = 4e-2
warmup_steps = 130
warmup_start = 0.0
schedule = "linear"
beta2 = 0.98

batch_size = 16
max_steps = 2_600
eval_every = 650
eval_batches = 2
log_every = 100
n_sample = 3
