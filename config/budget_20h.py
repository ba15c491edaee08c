# config/budget_20h.py: length and batch of nanoT5's 20-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_20h.py --out_dir=runs/base_20h
# needs  what the model's config needs
# gives  not run yet
max_steps = 66_665
warmup_steps = 8_332
batch_size = 256
