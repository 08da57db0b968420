"""Unfused: gather all of a sharded sequence, or sum and scatter all of it, as functions of autograd. Stock collectives."""

from __future__ import annotations

from typing import Any

import torch

from commfuse_dp.collectives import reference
from commfuse_dp.ops.sequence import Place, Tokens


def gather_sequence(x: torch.Tensor, dim: int, tokens: Tokens, place: Place) -> torch.Tensor:
    """[*, s_r, *, K] -> [*, S, *, K]; backward: the gradient is summed over the ranks and scattered."""
    return _Gather.apply(x, dim, tokens, place)


def scatter_sequence(x: torch.Tensor, dim: int, tokens: Tokens, place: Place, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """[*, S, *, K], summed over the ranks -> [*, s_r, *, K]; backward: the gradient is gathered."""
    return _Scatter.apply(x, dim, tokens, place, reduce_dtype)


def replicated(bias: torch.Tensor, place: Place) -> torch.Tensor:
    """`bias`, whose gradient is summed over the ranks."""
    return _Replicated.apply(bias, place)


def _gather(x: torch.Tensor, dim: int, tokens: Tokens, place: Place) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous()
    whole = reference.all_gather(moved, sizes=tokens.sizes, group=place.group)
    assert whole is not None
    return whole.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, tokens: Tokens, place: Place, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous().to(reduce_dtype if reduce_dtype is not None else x.dtype)
    own = reference.reduce_scatter(moved, sizes=tokens.sizes, dtype=x.dtype, group=place.group)
    return own.movedim(0, dim).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, tokens: Tokens, place: Place) -> torch.Tensor:
        ctx.how = dim, tokens, place
        return _gather(x, dim, tokens, place)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dim, tokens, place = ctx.how
        return _scatter(grad, dim, tokens, place, None), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, tokens: Tokens, place: Place, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.how = dim, tokens, place
        return _scatter(x, dim, tokens, place, reduce_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grad, *ctx.how), None, None, None, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, place: Place) -> torch.Tensor:
        ctx.place = place
        return bias.view_as(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reference.all_reduce(grad, group=ctx.place.group), None
