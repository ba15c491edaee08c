# config/budget_4h.py: length and batch of nanoT5's 4-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_4h.py --out_dir=runs/base_4h
# needs  what the model's config needs
# gives  not run yet
max_steps = 13_333
warmup_steps = 1_666
batch_size = 256
