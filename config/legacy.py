# config/legacy.py: T5's own inverse square root schedule in place of cosine
# run    python train.py config/nanot5_base.py config/legacy.py --out_dir=runs/adamwscale_legacy
# needs  what the config before it needs
# gives  not run yet; the paper reports 2.040 with AdamWScale, and 1.995 with config/adafactor.py as well
schedule = "legacy"
