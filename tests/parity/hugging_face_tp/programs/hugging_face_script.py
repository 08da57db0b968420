"""A script that knows nothing of CommFuse: a model of transformers, tensor-parallel over all ranks, trained for some steps."""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def main() -> None:
    dist.init_process_group("gloo")
    sizes = {"tp_size": int(os.environ["WORLD_SIZE"])} if sys.argv[2] == "size" else {"tp_plan": "auto"}
    plan = DistributedConfig(**sizes, enable_sequence_parallel=True)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64, distributed_config=plan)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    lines = []
    for step in range(3):
        tokens = torch.randint(3, 24, (2, 7), generator=torch.Generator().manual_seed(step))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(f"{float(loss):.9f}")
    model.eval()
    lines.append(str(model.generate(tokens, max_new_tokens=4, do_sample=False).tolist()))
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
