# config/budget_12h.py: length and batch of nanoT5's 12-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_12h.py --out_dir=runs/base_12h
# needs  what the model's config needs
# gives  not run yet
max_steps = 39_999
warmup_steps = 5_000
batch_size = 256
