"""Wall time of forward and backward where every block is recomputed (full activation checkpointing), over shared memory.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/micro/checkpointed.py [--kind fsdp|tensor] [--rounds 8]

Stock (FSDP2, or DTensor with sequence parallelism, over gloo) and CommFuse, two steps of each in turn; medians. The layers are
the linears of a Llama block with something cheap in place of attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import commfuse_dp

BLOCKS, WIDTH, HIDDEN, TOKENS = 6, 512, 1408, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o(torch.tanh(q * k) * v)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Attention(), FeedForward()) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp":
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = {name: ColwiseParallel() for name in ("0.qkv", "1.gate", "1.up")}
    rows = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("0.o", "1.down")}
    for block in net.blocks:
        parallelize_module(block, mesh, {"0": gathered, "1": gathered, **columns, **rows})
    return net


def step_ms(net: nn.Module, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    net(x).square().mean().backward()
    dist.barrier()
    taken = time.perf_counter() - start
    net.zero_grad()
    return 1e3 * taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("fsdp", "tensor"), default="fsdp")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    nets = {"stock": build(options.kind), "commfuse": build(options.kind)}
    commfuse_dp.apply(nets["commfuse"], commfuse_dp.CommFuseConfig(transport="shm"))
    tokens = TOKENS // dist.get_world_size() if options.kind == "tensor" else TOKENS
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {variant: [] for variant in nets}
    for measured in (False, *[True] * options.rounds):
        for variant, net in nets.items():
            taken = [step_ms(net, x) for _ in range(2)]
            times[variant] += taken if measured else []
    if dist.get_rank() == 0:
        found = {variant: round(statistics.median(of), 1) for variant, of in times.items()}
        ratio = round(found["stock"] / found["commfuse"], 3)
        print(json.dumps({"kind": options.kind, "step_ms": found, "stock over commfuse": ratio}))
    commfuse_dp.remove(nets["commfuse"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
