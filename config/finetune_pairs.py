# config/finetune_pairs.py: your own pairs of texts, a tenth of them held out to find the best checkpoint
# run    python finetune.py config/finetune_pairs.py --model=google/t5-v1_1-small --data=my/train.jsonl
# needs  rows with input and target (--input_key, --target_key); --test=my/test.jsonl for scores at the end
# gives  depends on the data
val_share = 0.1             # with a validation file: --val=my/validation.jsonl --val_share=0
max_source_length = 512

learning_rate = 3e-4
schedule = "linear"
warmup_steps = 100
grad_clip = 1.0
dropout = 0.1

batch_size = 32
epochs = 10
patience = 3
