"""Unfused: gather all of a sharded sequence, or sum and scatter all of it, as functions of autograd. Stock collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commfuse_dp.collectives import reference
from commfuse_dp.ops.adjoint import adjoint

Sizes = tuple[int, ...]  # positions on every rank
Group = dist.ProcessGroup | None


def gather_sequence(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    """[*, s_r, *, K] -> [*, S, *, K]; backward: the gradient is summed over the ranks and scattered."""
    return adjoint(x, lambda part: _gather(part, dim, sizes, group), lambda grad: _scatter(grad, dim, sizes, group, None))


def scatter_sequence(x: torch.Tensor, dim: int, sizes: Sizes, group: Group, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """[*, S, *, K], summed over the ranks -> [*, s_r, *, K]; backward: the gradient is gathered."""
    return adjoint(
        x, lambda whole: _scatter(whole, dim, sizes, group, reduce_dtype), lambda grad: _gather(grad, dim, sizes, group)
    )


def replicated(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """`tensor`, whose gradient is summed over the ranks."""
    return adjoint(tensor, lambda own: own.view_as(own), lambda grad: reference.all_reduce(grad, group=group))


def total(x: torch.Tensor, group: Group, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """x, summed for all ranks, which go on alike: its gradient is that of the sum."""
    return adjoint(x, lambda own: reference.all_reduce(own, reduce_dtype=reduce_dtype, group=group), lambda grad: grad)


def _gather(x: torch.Tensor, dim: int, sizes: Sizes, group: Group) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous()
    whole = reference.all_gather(moved, sizes=sizes, group=group)
    assert whole is not None
    return whole.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, sizes: Sizes, group: Group, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous().to(reduce_dtype if reduce_dtype is not None else x.dtype)
    own = reference.reduce_scatter(moved, sizes=sizes, dtype=x.dtype, group=group)
    return own.movedim(0, dim).contiguous()
