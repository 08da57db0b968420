"""The functions for everybody under selective activation checkpointing, whatever it saves: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp import ops
from tests.support.selective import POLICIES, selective

WIDTH, HEADS = 16, 4

Function = Callable[[torch.Tensor, list[torch.Tensor], list[int] | None], torch.Tensor]


def _block(save: str, layout: Any = "sharded") -> Function:
    def compute(x: torch.Tensor, params: list[torch.Tensor], sizes: list[int] | None) -> torch.Tensor:
        up, gate, bias, down = params
        if layout == "replicated":
            x, sizes = x[:, :3], None
        a, b = ops.column_parallel(torch.tanh(x), [up, gate], [bias, None], save=save, sizes=sizes, layout=layout)
        return torch.tanh(ops.row_parallel(torch.tanh(a * b), down, sizes=sizes, layout=layout))

    return compute


def _linear(x: torch.Tensor, params: list[torch.Tensor], sizes: list[int] | None) -> torch.Tensor:
    return torch.tanh(ops.fused_linear(torch.tanh(x), params[0], params[2], out_features=48))


def _attention(function: Callable[..., torch.Tensor]) -> Function:
    def compute(x: torch.Tensor, params: list[torch.Tensor], sizes: list[int] | None) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, -1))
        return torch.tanh(function(heads * 2, heads * 3, torch.sin(heads), layout="bshd", causal=True, sizes=sizes).flatten(2))

    return compute


FUNCTIONS = {
    "block": _block("shard"),
    "block, gathered": _block("gathered"),
    "block, replicated": _block("shard", "replicated"),
    "fused_linear": _linear,
    "ring_attention": _attention(ops.ring_attention),
    "ulysses_attention": _attention(ops.ulysses_attention),
}


def _same(rank: int, world_size: int, name: str) -> None:
    function, sizes = FUNCTIONS[name], [3, 4]

    def results(saves: str | None, told: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7 + rank)
        x = torch.randn(2, sizes[rank], WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        shapes = [(24, WIDTH), (24, WIDTH), (24,), (WIDTH, 24)]
        params = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]

        def run(x: torch.Tensor) -> torch.Tensor:
            return function(x, params, sizes if told else None)

        y = run(x) if saves is None else selective(saves)(run, x)
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in (x, *params) if leaf.grad is not None)]

    for told in (True, False) if name == "block" else (True,):
        wanted = results(None, told)
        for policy in POLICIES:
            found = results(policy, told)
            assert len(found) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (policy, told)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_bits_whatever_is_saved(workers: Any, name: str) -> None:
    workers(2).run(_same, name)
