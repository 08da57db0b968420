"""A script that knows nothing of CommFuse: a model of transformers, tensor-parallel or sharded over all ranks, or both, trained
for some steps.

hugging_face_script.py FOLDER size|auto|sharded|both
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def main() -> None:
    dist.init_process_group("gloo")
    ranks = int(os.environ["WORLD_SIZE"])
    plan = {
        "size": DistributedConfig(tp_size=ranks, enable_sequence_parallel=True),
        "auto": DistributedConfig(tp_plan="auto", enable_sequence_parallel=True),
        "sharded": DistributedConfig(fsdp_size=ranks),
        "both": DistributedConfig(tp_size=2, fsdp_size=ranks // 2),
    }[sys.argv[2]]
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
