"""Calls of the sharded functions that are rare: a batch without entries, and inside of transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp import collectives, ops

FUNCTIONS = (
    "column_parallel",
    "row_parallel",
    "row_parallel_attention",
    "ulysses_attention",
    "ring_attention",
    "fused_linear",
)


def call_of(name: str, n: int, batch: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """(function of one tensor, that tensor)"""
    if name.endswith("attention"):
        q = torch.randn(batch, 2 * n, 2 * n, 4)
        attend: dict[str, Callable[..., torch.Tensor]] = {
            "row_parallel_attention": lambda q, **how: ops.row_parallel_attention(q, q, q, torch.ones(3, 8 * n), **how),
            "ulysses_attention": lambda q, **how: ops.ulysses_attention(q, q, q, **how),
            "ring_attention": lambda q, **how: ops.ring_attention(q, q, q, **how),
        }
        return lambda q: attend[name](q, causal=True), q
    x = torch.randn(batch, 2 * n, 4)
    others: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "column_parallel": lambda x: ops.column_parallel(x, [torch.ones(6, 4)])[0],
        "row_parallel": lambda x: ops.row_parallel(x, torch.ones(6, 4)),
        "fused_linear": lambda x: ops.fused_linear(x, torch.ones(3, 4), out_features=3 * n),
    }
    return others[name], x


def _without_entries(rank: int, world_size: int) -> None:
    for name in FUNCTIONS:
        function, x = call_of(name, world_size, 0)
        x.requires_grad_()
        y = function(x)
        assert y.shape[0] == 0 and y.shape[-1] > 0, name
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape, name
    collectives.close_transports()


def test_a_batch_without_entries(workers: Any) -> None:
    workers(2).run(_without_entries, timeout=60)


def _transformed(rank: int, world_size: int) -> None:
    for name in FUNCTIONS:
        function, x = call_of(name, world_size, 2)
        transforms: list[Callable[[], Any]] = [
            lambda function=function, x=x: torch.func.grad(lambda x: function(x).sum())(x),
            lambda function=function, x=x: torch.func.jvp(function, (x,), (x,)),
            lambda function=function, x=x: torch.vmap(function)(torch.stack([x, x])),
        ]
        for transform in transforms:
            with pytest.raises(RuntimeError, match=rf"{name} cannot be called inside a transform of torch\.func"):
                transform()
        assert function(x).shape[0] == 2, name  # nothing is lost
    collectives.close_transports()


def test_transforms_are_refused_before_the_first_message(workers: Any) -> None:
    workers(2).run(_transformed, timeout=60)
