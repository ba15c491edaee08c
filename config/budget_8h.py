# config/budget_8h.py: length and batch of nanoT5's 8-hour budget on one A100
# run    python train.py config/t5_base.py config/budget_8h.py --out_dir=runs/base_8h
# needs  what the model's config needs
# gives  not run yet
max_steps = 26_666
warmup_steps = 3_332
batch_size = 256
