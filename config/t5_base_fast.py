# config/t5_base_fast.py: T5 v1.1 base with the recipe that needed the fewest steps in the study of README and LOG.md
# run    python train.py config/t5_base_fast.py --batch_size=128
# needs  what config/t5_base.py needs; one GPU, or several with torchrun (not --fsdp=True: Muon needs whole matrices)
# gives  not run yet; rates and momentum were chosen on a model of 0.74 million parameters and may not be the best here
d_model = 768
d_ff = 2048
n_head = 12
n_layer = 12
match_init = True
local_init = 2.0

optimizer = "muon"
muon_lr = 1e-2
muon_momentum = 0.8
normuon = True
learning_rate = 4e-2
beta2 = 0.98
schedule = "linear"
warmup_steps = 3_000
warmup_start = 0.0
