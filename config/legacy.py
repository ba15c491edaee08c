# config/legacy.py: T5's own inverse square root schedule in place of cosine, nanoT5's "legacy"
# run    python train.py config/nanot5_base.py config/legacy.py --out_dir=runs/adamwscale_legacy
# needs  what the config before it needs
# gives  not run yet; the paper reports 2.040 with AdamWScale, and 1.995 with config/adafactor.py before it
schedule = "inverse_sqrt"
learning_rate = 1e-2
warmup_steps = 10_000
