# config/adafactor.py: Adafactor in place of AdamWScale; with legacy.py the other cells of the paper's table
# run    python train.py config/nanot5_base.py config/adafactor.py --out_dir=runs/adafactor_cosine
# needs  what the config before it needs
# gives  not run yet; the paper reports 1.993 with cosine, and 1.995 with config/legacy.py as well
optimizer = "adafactor"
learning_rate = 2e-2
