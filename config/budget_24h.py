# config/budget_24h.py: length and batch of nanoT5's 24-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_24h.py --out_dir=runs/base_24h
# needs  what the model's config needs
# gives  not run yet
max_steps = 79_998
warmup_steps = 10_000
batch_size = 256
