"""What calls of a column- or row-parallel layer come to: worked out once for every signature, found again by it (`find_call`).

They refer neither to a transport nor to a group, for they are kept with the transport."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from commfuse_dp.collectives.bound import Binder
from commfuse_dp.kernels.by_slices import is_narrow
from commfuse_dp.ops.sequence import How, Tokens, gathered_rows, moves, summed_rows


class Column(NamedTuple):
    """What calls of one signature come to."""

    name: str
    rank: int
    dim: int
    tokens: Tokens
    narrow: bool  # x's dtype
    own: tuple[int, ...]  # shape of the own shard, but for its last dimension
    whole: tuple[int, ...]  # of all positions
    keeps: bool  # the gathered x, for backward
    gathers: bool  # x again, in backward
    want_x: bool  # gradients: alike on all ranks
    want_weights: tuple[bool, ...]
    want_biases: tuple[bool, ...]
    forward: Binder
    backward: Binder


@functools.lru_cache(maxsize=1024)
def column_of(
    name: str,
    how: How,
    tokens: Tokens,
    dim: int,
    shape: tuple[tuple[int, ...], tuple[int, ...]],
    features: tuple[int, torch.dtype],
    save: str,
    wanted: tuple[bool, ...],
) -> Column:
    """shape: of x, before the sequence and after it, but for the features.
    features: how many, and x's dtype. wanted: gradients of x, of the weights, of the biases."""
    rank = how[-1]
    before, after = shape
    width, dtype = features
    count = len(wanted) // 2
    want_x, want_weights, want_biases = wanted[0], wanted[1 : 1 + count], wanted[1 + count :]
    gathers = any(want_weights) and save != "gathered"
    x_rows, dx_rows = gathered_rows(width, dtype), summed_rows(width, dtype, dtype)
    back = (dx_rows,) * want_x + (x_rows,) * gathers
    return Column(
        name,
        rank,
        dim,
        tokens,
        is_narrow(dtype),
        (*before, tokens.sizes[rank], *after),
        (*before, tokens.length, *after),
        save == "gathered" and any(want_weights),
        gathers,
        want_x,
        want_weights,
        want_biases,
        moves(how, tokens.rows, (x_rows,)),
        moves(how, tokens.rows, back or (x_rows,)),
    )


class Row(NamedTuple):
    """What calls of one signature come to."""

    name: str
    rank: int
    dim: int
    tokens: Tokens
    narrow: bool  # x's dtype
    own: tuple[int, ...]  # shape of the own positions, but for the last dimension
    wanted: tuple[bool, ...]  # gradients of x, weight, bias: alike on all ranks
    forward: Binder
    backward: Binder


@functools.lru_cache(maxsize=1024)
def row_of(
    name: str,
    how: How,
    tokens: Tokens,
    dim: int,
    shape: tuple[tuple[int, ...], tuple[int, ...]],
    features: tuple[int, torch.dtype],
    partial_dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> Row:
    """shape: of x, before the sequence and after it, but for the features. features: of the result, and dtype."""
    rank, (before, after), (width, dtype) = how[-1], shape, features
    return Row(
        name,
        rank,
        dim,
        tokens,
        is_narrow(dtype),
        (*before, tokens.sizes[rank], *after),
        wanted,
        moves(how, tokens.rows, (summed_rows(width, partial_dtype, dtype),)),
        moves(how, tokens.rows, (gathered_rows(width, dtype),)),
    )
