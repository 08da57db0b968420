"""What the pieces of a tensor are made of, where it is gathered from shards or summed up to shards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commfuse_dp.collectives.bound import Types
from commfuse_dp.collectives.execution import Bindings, ConsumeFn, ProduceFn, nothing_yet
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.program.operations import TOTAL, Piece


def of_gather(shard: torch.Tensor, base: int, consume: ConsumeFn | None, out: torch.Tensor | None = None) -> Bindings:
    """shard: [own rows, ...], contiguous; its first row is row `base` of the whole. out: the whole, which rows land in."""

    def landing(piece: Piece) -> torch.Tensor | None:
        assert out is not None
        return out[piece.slice.start : piece.slice.stop]

    def data(piece: Piece) -> torch.Tensor:
        part = piece.slice
        return shard if part.stop - part.start == shard.shape[0] else shard[part.start - base : part.stop - base]

    return Bindings(
        tuple(shard.shape[1:]),
        Types(shard.dtype, shard.dtype, shard.dtype),
        data=data,
        landing=nothing_yet if out is None else landing,
        consume=consume,
    )


def of_scatter(
    result: torch.Tensor,
    base: int,
    rank: int,
    partial_dtype: torch.dtype,
    produce: ProduceFn | None,
    data: Callable[[Piece], torch.Tensor | None] = nothing_yet,
    divisor: float | None = None,
) -> Bindings:
    """result: [own rows, ...], contiguous, receives the sums. partial_dtype: of what is summed, in which it travels.
    data: of partials that exist already; None for those that `produce` fills."""
    dtype = result.dtype

    def landing(piece: Piece) -> torch.Tensor | None:
        part = piece.slice
        own_partial = piece.origin == rank and part.owner == rank and partial_dtype == dtype
        if piece.origin != TOTAL and not own_partial:
            return None
        return result if part.stop - part.start == result.shape[0] else result[part.start - base : part.stop - base]

    return Bindings(
        tuple(result.shape[1:]),
        Types(partial_dtype, dtype, wide_dtype(dtype, partial_dtype)),
        data=data,
        landing=landing,
        produce=produce,
        divisor=divisor,
    )
