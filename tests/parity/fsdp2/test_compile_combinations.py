"""torch.compile together with autocast, activation checkpointing and gradient accumulation: every combination, against stock.

Backend aot_eager; the compared model is stock FSDP2, not compiled. Each cell takes a step without accumulation and one with it.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.parity.fsdp2 import pair
from tests.support import graphs
from tests.support.cells import INDUCTOR

WIDTH, HEADS, HIDDEN, TOKENS = 24, 2, 37, 11

COMPILED = ("", "block", "model")
CHECKPOINTED = ("", "inner", "outer")  # a part of a block's forward, inside the graph of the block; the call of a block


class Block(nn.Module):
    """Under autocast the attention gives bfloat16 to a linear whose parameters are float32, and a linear gives to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.inner_norm = nn.RMSNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.checkpointed = False

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.inner_norm(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            x = x + checkpoint(self.attention, x, use_reentrant=False)
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        x = x + self.attention(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TOKENS)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def build(checkpointed: str) -> Net:
    torch.manual_seed(0)
    net = Net()
    net.checkpointed = checkpointed == "outer"
    for block in net.blocks:
        block.checkpointed = checkpointed == "inner"
        fully_shard(block)
    fully_shard(net)
    return net


def step(net: Any, run: Any, rank: int, *, autocast: bool, accumulate: bool) -> torch.Tensor:
    total = torch.zeros(())
    for number in range(2 if accumulate else 1):
        net.set_requires_gradient_sync(number == 1 or not accumulate)
        ids = torch.randint(0, TOKENS, (2, 2, 6), generator=torch.Generator().manual_seed(10 * rank + number))
        context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            loss = F.cross_entropy(run(ids[0]).float().flatten(0, 1), ids[1].flatten())
        loss.backward()
        total += loss.detach()
    return total


def cell(rank: int, compiled: str, backend: str, checkpointed: str, autocast: bool) -> None:
    graphs.fresh()
    stock, net = build(checkpointed), build(checkpointed)
    with pair.applied(net):
        run: Any = net
        if compiled == "block":
            for block in net.blocks:
                block.compile(backend=backend)
        elif compiled == "model":
            run = torch.compile(net, backend=backend)
        # Autocast: roundings of 2**-9 in other places than stock's, over four layers; each gradient to its largest element.
        relative = 2.0**-4 if autocast else 5e-6
        for accumulate in (False, True):
            net.zero_grad(), stock.zero_grad()
            options = {"autocast": autocast, "accumulate": accumulate}
            loss, wanted = step(net, run, rank, **options), step(stock, stock, rank, **options)
            assert abs(loss - wanted) <= (2.0**-6 if autocast else 1e-5) * wanted, (loss, wanted)
            pair.assert_same_gradients(net, stock, relative=relative)


def combinations(rank: int, world_size: int, backend: str, cells: list[tuple[str, str, bool]]) -> list[str]:
    failed = []
    for compiled, checkpointed, autocast in cells:
        try:
            cell(rank, compiled, backend, checkpointed, autocast)
        except Exception:
            failed.append(f"{(compiled, checkpointed, autocast)}: {traceback.format_exc(limit=-3)[-1500:]}")
    return failed


ALL = set(itertools.product(COMPILED, CHECKPOINTED, (False, True)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_combinations(workers):
    for failed in workers(2).run(combinations, "aot_eager", sorted(ALL), timeout=850):
        assert not failed, "\n\n".join(failed)


@pytest.mark.slow
@INDUCTOR
def test_inductor(workers):
    for failed in workers(2).run(combinations, "inductor", [("block", "inner", True)], timeout=400):
        assert not failed, "\n\n".join(failed)
