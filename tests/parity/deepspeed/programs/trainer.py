"""A script for the Hugging Face Trainer by someone who never heard of CommFuse: a small Llama on random tokens."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 61, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


arguments = TrainingArguments(
    output_dir=sys.argv[2],
    deepspeed=sys.argv[1] or None,
    use_cpu=True,
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=0,
)
set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
torch.distributed.destroy_process_group()  # else threads of stock gloo abort the process at its exit, now and then
