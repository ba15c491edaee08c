# config/budget_16h.py: length and batch of nanoT5's 16-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_16h.py --out_dir=runs/base_16h
# needs  what the model's config needs
# gives  not run yet
max_steps = 53_332
warmup_steps = 6_666
batch_size = 256
