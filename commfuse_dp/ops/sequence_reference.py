"""Unfused: gather all of a sharded sequence, or sum and scatter all of it, as functions of autograd. Stock collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.collectives import reference

Sizes = tuple[int, ...]  # positions on every rank
Group = dist.ProcessGroup | None


def gather_sequence(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    """[*, s_r, *, K] -> [*, S, *, K]; backward: the gradient is summed over the ranks and scattered."""
    return _Gather.apply(x, dim, sizes, group)


def scatter_sequence(x: torch.Tensor, dim: int, sizes: Sizes, group: Group, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """[*, S, *, K], summed over the ranks -> [*, s_r, *, K]; backward: the gradient is gathered."""
    return _Scatter.apply(x, dim, sizes, group, reduce_dtype)


def replicated(bias: torch.Tensor, group: Group) -> torch.Tensor:
    """`bias`, whose gradient is summed over the ranks."""
    return _Replicated.apply(bias, group)


def _gather(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous()
    whole = reference.all_gather(moved, sizes=sizes, group=group)
    assert whole is not None
    return whole.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, sizes: Sizes, group: Group, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous().to(reduce_dtype if reduce_dtype is not None else x.dtype)
    own = reference.reduce_scatter(moved, sizes=sizes, dtype=x.dtype, group=group)
    return own.movedim(0, dim).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
        ctx.how = dim, sizes, group
        return _gather(x, dim, sizes, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, sizes, group = ctx.how
        return _scatter(grad, dim, sizes, group, None), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dim: int,
        sizes: tuple[int, ...],
        group: Group,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.how = dim, sizes, group
        return _scatter(x, dim, sizes, group, reduce_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, *ctx.how), None, None, None, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reference.all_reduce(grad, group=ctx.group), None
