"""A script that knows nothing of CommFuse: a model wrapped as the first word says, trained for some steps.

fsdp2, fsdp1, ddp; blocks: `fully_shard` on the blocks alone; composable: taken from the older module; compiled: FSDP2, every
block compiled; methods: FSDP2, of which only a method is called.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 34)
        self.down = nn.Linear(34, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x)


def wrapped(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net().double()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    if kind == "composable":
        from torch.distributed._composable.fsdp import fully_shard as shard
    else:
        shard = fully_shard
    for block in net.blocks:
        if kind == "compiled":
            block.compile()
        shard(block)
    model = net if kind == "blocks" else shard(net)
    if kind == "methods":
        register_fsdp_forward_method(model, "score")
    return model


def main() -> None:
    kind = sys.argv[1]
    dist.init_process_group("gloo")
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    with torch.no_grad():  # as trainers do that check the evaluation first
        model.eval()
        (model.score if kind == "methods" else model)(torch.ones(2, 12, dtype=torch.float64))
        model.train()
    for step in range(4):
        torch.manual_seed(step * 10 + dist.get_rank())
        x = torch.rand(5, 12, dtype=torch.float64)
        loss = (model.score if kind == "methods" else model)(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{float(total):.9f}", flush=True)
    # The group stays. Where DDP's reducer would let go of it last, with the GIL, torch 2.13 deadlocks now and then: gloo's
    # thread wants the GIL for the last collective's tensors, and holds a lock of the group.


if __name__ == "__main__":
    main()
