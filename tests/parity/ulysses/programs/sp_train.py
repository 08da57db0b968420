"""A training script with accelerate's sequence parallelism by someone who never heard of CommFuse."""

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from transformers import LlamaConfig, LlamaForCausalLM

settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
    parallelism_config=ParallelismConfig(
        sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    ),
)
torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 31, "num_hidden_layers": 2, "max_position_embeddings": 64}
model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rows = [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(12)} for ids in torch.randint(0, 31, (8, 12)).unbind()]
loader = torch.utils.data.DataLoader(rows, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for step, batch in enumerate(loader):
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"loss {step} {loss.item():.9f}", flush=True)
torch.distributed.destroy_process_group()  # else threads of stock gloo abort the process at its exit, now and then
