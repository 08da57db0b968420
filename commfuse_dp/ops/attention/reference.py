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
from commfuse_dp.ops.adjoint import adjoint
from commfuse_dp.ops.attention import ring, row_parallel, ulysses
from commfuse_dp.ops.attention.arguments import refuse
from commfuse_dp.ops.attention.ulysses import laid_out, rows_first
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.sequence.reference import gather_sequence, scatter_sequence
from commfuse_dp.transport.base import Transport


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
    refuse(row_parallel.NAME, refused)
    q, k, v, weight = autocast(q), autocast(k), autocast(v), autocast(weight)
    lines, partial_dtype = row_parallel.prepare(
        q, k, v, weight, dim, sizes, group, reduce_dtype, slices_per_rank, order, None, causal
    )
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    y = scatter_sequence(F.linear(o.permute(2, 0, 1, 3).flatten(2), weight), 0, lines.sizes, group, partial_dtype)
    return y if dim == 0 else y.transpose(0, 1).contiguous()


def _exchange_blocks(rows: torch.Tensor, table: tuple[tuple[int, ...], ...], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Blocks of rows, one below the other, for every rank; backward: the same back. table[source][destination] in rows."""
    turned = tuple(zip(*table, strict=True))
    return adjoint(
        rows,
        lambda own: reference.all_to_all(own, sizes=table, group=group),
        lambda grad: reference.all_to_all(grad, sizes=turned, group=group),
    )


def ulysses_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    layout: str = "bshd",
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
    **refused: object,
) -> torch.Tensor:
    """What `ulysses_attention` computes: three all-to-alls, attention of the own heads, one all-to-all."""
    refuse(ulysses.NAME, refused)
    q, k, v = autocast(q), autocast(k), autocast(v)
    lines = ulysses.prepare(ulysses.NAME, q, k, v, layout, sizes, group, slices_per_rank, order, None)
    n = len(lines.sizes)
    ulysses.check_divisible(q, k, layout, n)
    q_rows, k_rows, v_rows = (rows_first(tensor, layout) for tensor in (q, k, v))
    heads = ulysses.Heads(q_rows.shape[2], k_rows.shape[2], n)
    to_heads, to_positions = tuple((size,) * n for size in lines.sizes), (lines.sizes,) * n

    def own_heads(rows: torch.Tensor, of: Any) -> torch.Tensor:
        return _exchange_blocks(torch.cat([rows[:, :, of(rank)] for rank in range(n)]), to_heads, group)

    parts = own_heads(q_rows, heads.queries_of), own_heads(k_rows, heads.keys_of), own_heads(v_rows, heads.keys_of)
    o = _attention(*parts, causal, scale)
    mine = _exchange_blocks(o, to_positions, group)
    return laid_out(torch.cat(mine.split([lines.own] * n), dim=2), layout)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[s, B, H, d], [t, B, G, d] -> [s, B, H, d]"""
    q, k, v = (ulysses.heads_first(rows) for rows in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return o.permute(2, 0, 1, 3)


def ring_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    layout: str = "bshd",
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
    **refused: object,
) -> torch.Tensor:
    """What `ring_attention` computes: all keys and values gathered, attention of the own queries."""
    refuse(ring.NAME, refused)
    q, k, v = autocast(q), autocast(k), autocast(v)
    lines = ulysses.prepare(ring.NAME, q, k, v, layout, sizes, group, slices_per_rank, order, None)
    keys, values = (gather_sequence(rows_first(tensor, layout), 0, lines.sizes, group) for tensor in (k, v))
    mask = None
    if causal:
        positions = torch.arange(lines.length, device=q.device)
        start = lines.start(lines.rank)
        mask = positions[start : start + lines.own, None] >= positions
    return laid_out(_attention(rows_first(q, layout), keys, values, False, scale, mask), layout)
