# config/finetune_sni_dropout.py: after finetune_sni.py: dropout, whole instances and batches of like lengths
# run    python finetune.py config/finetune_sni.py config/finetune_sni_dropout.py --model=runs/t5_base --data=DATA
# needs  as finetune_sni.py
# gives  not run yet
dropout = 0.1
bucket_batches = 50
prompt_style = "keep_instance"
eos_on_cut_target = False
