"""A small model that has every path of the integration, as stock FSDP2 and as CommFuse, from the same seed.

World sizes 1 to 3 divide no dimension evenly (rows 37, 24, 13, 11): short shards are the normal case here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.probe import Counters

TOKENS, WIDTH, HIDDEN, CLASSES = 13, 24, 37, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """run_block: how a block is called (activation checkpointing hooks in here)."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(WIDTH))  # no layer type that can be adopted: stays with FSDP2, over our hooks
        self.head = nn.Linear(WIDTH, CLASSES)
        self.run_block: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x * self.scale)


def build(blocks: int = 3, *, seed: int = 0, wrap: Callable[[nn.Module], nn.Module] | None = None, **fsdp: Any) -> Net:
    """Sharded by stock FSDP2, values by `seed`. wrap: applied to every block before it is sharded."""
    torch.manual_seed(seed)
    net = Net(blocks)
    if wrap is not None:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = wrap(block)
    return shard(net, **fsdp)


def shard(net: Net, **fsdp: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, **fsdp)
    fully_shard(net, **fsdp)
    return net


def config(**settings: Any) -> CommFuseConfig:
    return CommFuseConfig(**{"deadline_s": 20.0, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20, **settings})


@contextmanager
def applied(net: nn.Module, **settings: Any) -> Iterator[commfuse_dp.integrations.fsdp2.Report]:
    """CommFuse for the length of a block; nothing of it is left for the next test."""
    report = commfuse_dp.apply(net, config(**settings))
    try:
        yield report
    finally:
        commfuse_dp.remove(net)


def batch(rank: int, world_size: int, step: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the batch of `step`; the whole batch is the same whatever the world size (a divisor of `size`)."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, TOKENS, (size, 5), generator=generator)
    wanted = torch.randint(0, CLASSES, (size, 5), generator=generator)
    share = size // world_size
    mine = slice(rank * share, (rank + 1) * share)
    return tokens[mine], wanted[mine]


def loss_of(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, wanted = data
    return F.cross_entropy(net(tokens).float().flatten(0, 1), wanted.flatten())


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "no gradient"
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(param.grad).clone() for name, param in net.named_parameters()}


def assert_same_gradients(net: nn.Module, stock: nn.Module, *, relative: float = 2e-6) -> None:
    """relative: to the largest gradient element of the parameter. Stock sums in another order (ring, narrow type): fp32
    rounding of sums of a few terms, a few units of 6e-8, with room for GEMM tiling by slices."""
    wanted = gradients(stock)
    for name, grad in gradients(net).items():
        reference = wanted[name]
        assert grad.shape == reference.shape and grad.dtype == reference.dtype, name
        if grad.numel():
            bound = relative * max(reference.abs().max().item(), 1e-6)
            worst = (grad - reference).abs().max().item()
            assert worst <= bound, f"{name}: {worst} > {bound}"


def assert_gradients_of_one_step(
    net: nn.Module, stock: nn.Module, rank: int, world_size: int, step: int = 0, *, loss_relative: float = 1e-5, **kw: Any
) -> None:
    """One forward and backward of both on the same data. loss_relative: largest difference of the losses, to their size."""
    losses = []
    for model in (net, stock):
        model.zero_grad()
        loss = loss_of(model, batch(rank, world_size, step))
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= loss_relative * abs(losses[1]), losses
    assert_same_gradients(net, stock, **kw)


def counted(report: commfuse_dp.integrations.fsdp2.Report, what: Callable[[], object]) -> Counters:
    """The probe's counters over one call."""
    before = report.probe.counters.snapshot()
    what()
    return report.probe.counters.since(before)
