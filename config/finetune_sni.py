# config/finetune_sni.py: nanoT5's fine-tuning on Super-Natural-Instructions (nanoT5/configs/task/ft.yaml)
# run    python finetune.py config/finetune_sni.py --model=runs/t5_base --data=path/to/natural-instructions
# needs  a GPU, a T5 with T5's vocabulary, a clone of github.com/allenai/natural-instructions
# gives  not run yet; nanoT5's plot shows a ROUGE-L (one reference) of about 40.7 for its model of 16 hours
optimizer = "adamw_hf"
learning_rate = 5e-5
schedule = "constant"
warmup_steps = 0
grad_clip = 0.0
weight_decay = 0.0
eps = 1e-6
dropout = 0.0

batch_size = 8
epochs = 2
bucket_batches = 1          # as they come, as there; 50 pads far less, and makes batches of like lengths

max_source_length = 1024
max_target_length = 128
eos_on_cut_target = True
max_num_instances_per_task = 100
max_num_instances_per_eval_task = 100
add_task_definition = True
num_pos_examples = 2
num_neg_examples = 0
add_explanation = False
prompt_style = "nanot5"
normalize = True
