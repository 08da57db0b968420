"""Attention over ranks, unfused, on torch.distributed's own collectives: oracle of tests, and for comparison.

Each function has the signature of the fused one. Everything is gathered or exchanged first, then comes torch's own attention;
autograd differentiates it. `slices_per_rank`, `order` and `transport` are checked and then not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from commfuse_dp.collectives import reference
from commfuse_dp.ops import row_attention
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.places import refuse
from commfuse_dp.transport.base import Transport


class _ScatterRows(torch.autograd.Function):
    """[S, ...] summed over the ranks, own rows kept; backward: all rows gathered."""

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return reference.reduce_scatter(partial, sizes=sizes, dtype=dtype, group=group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        return reference.all_gather(grad, sizes=ctx.sizes, group=ctx.group), None, None, None


def row_parallel_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
    **refused: object,
) -> torch.Tensor:
    """What `row_parallel_attention` computes: attention, projection, one reduce-scatter."""
    refuse(row_attention.NAME, refused)
    q, k, v, weight = autocast(q), autocast(k), autocast(v), autocast(weight)
    lines, partial_dtype = row_attention.prepare(
        q, k, v, weight, dim, sizes, group, reduce_dtype, slices_per_rank, order, None, causal
    )
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    partial = F.linear(o.permute(2, 0, 1, 3).flatten(2), weight).to(partial_dtype)
    y = _ScatterRows.apply(partial, lines.sizes, q.dtype, group)
    return y if dim == 0 else y.transpose(0, 1).contiguous()
