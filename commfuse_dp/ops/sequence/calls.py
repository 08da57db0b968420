"""What calls of a column- or row-parallel layer come to: worked out once for every signature, found again by it (`find_call`).

They refer neither to a transport nor to a group, for they are kept with the transport.

| activations outside of the layer | column, forward | column, backward | row, forward | row, backward |
| --- | --- | --- | --- | --- |
| "sharded" along the sequence | x gathered | dx summed and scattered, x gathered | y summed and scattered | dy gathered |
| "replicated" | nothing moves | dx summed for all | y summed for all | nothing moves |

Replicated activations have no division of their own: their rows, of all sequences, are divided evenly for the sums. A pass in
which nothing moves is one over all rows, of a rank that is alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commfuse_dp.collectives.bound import Binder, Rows
from commfuse_dp.kernels.by_slices import is_narrow
from commfuse_dp.ops.sequence.rows import (
    How,
    Layout,
    Tokens,
    gathered_rows,
    moves,
    summed_rows,
    tokens_of,
    totaled_rows,
)

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # of x, before the sequence and after it, but for the features


class Pass(NamedTuple):
    """A forward or a backward over the rows of `tokens`. slices: of this rank's rows, if they are summed up for all ranks.
    alone: nothing moves, and the rank is the only one (the session is `ALONE`)."""

    tokens: Tokens
    rank: int
    program: Binder
    slices: int = 0
    alone: bool = False


class Column(NamedTuple):
    """What calls of one signature come to."""

    name: str
    dim: int
    sizes: tuple[int, ...]  # positions of every rank; replicated: rows
    replicated: bool
    narrow: bool  # x's dtype
    own: tuple[int, ...]  # shape of the own shard, but for its last dimension
    whole: tuple[int, ...]  # of all positions
    keeps: bool  # the gathered x, for backward
    gathers: bool  # x again, in backward
    want_x: bool  # gradients: alike on all ranks
    want_weights: tuple[bool, ...]
    want_biases: tuple[bool, ...]
    forward: Pass
    backward: Pass

    def of(self, numbers: Sequence[int]) -> Column:
        """Of some of the weights; of a replicated input, for else x travels for all of them."""
        assert self.replicated
        weights, biases = (tuple([flags[number] for number in numbers]) for flags in (self.want_weights, self.want_biases))
        return self._replace(want_weights=weights, want_biases=biases)


def keeps_gathered(save: str, layout: Layout, want_weights: Sequence[bool]) -> bool:
    """Whether a column-parallel layer saves the gathered x for its backward; a replicated one is not gathered."""
    return save == "gathered" and layout == "sharded" and any(want_weights)


@functools.lru_cache(maxsize=1024)
def column_of(
    name: str,
    how: How,
    tokens: Tokens,
    dim: int,
    shape: Shape,
    features: tuple[int, torch.dtype],
    save: str,
    wanted: tuple[bool, ...],
    layout: Layout,
) -> Column:
    """features: how many, and x's dtype. wanted: gradients of x, of the weights, of the biases. layout: of x."""
    rank = how[-1]
    width, dtype = features
    count = len(wanted) // 2
    want_x, want_weights, want_biases = wanted[0], wanted[1 : 1 + count], wanted[1 + count :]
    replicated = layout == "replicated"
    gathers = any(want_weights) and save != "gathered" and not replicated
    x_rows, dx_rows = gathered_rows(width, dtype), summed_rows(width, dtype, dtype)
    if replicated:
        forward = _alone(tokens, x_rows)
        backward = _totaling(tokens, how, totaled_rows(width, dtype, dtype))
    else:
        back = (dx_rows,) * want_x + (x_rows,) * gathers
        forward = Pass(tokens, rank, moves(how, tokens.rows, (x_rows,)))
        backward = Pass(tokens, rank, moves(how, tokens.rows, back or (x_rows,)))
    return Column(
        name,
        dim,
        tokens.sizes,
        replicated,
        is_narrow(dtype),
        *_shapes(tokens, rank, shape, layout),
        keeps_gathered(save, layout, want_weights),
        gathers,
        want_x,
        want_weights,
        want_biases,
        forward,
        backward,
    )


class Row(NamedTuple):
    """What calls of one signature come to."""

    name: str
    dim: int
    sizes: tuple[int, ...]  # positions of every rank; replicated: rows
    replicated: bool
    narrow: bool  # x's dtype
    own: tuple[int, ...]  # shape of what this rank gets, but for the last dimension
    wanted: tuple[bool, ...]  # gradients of x, weight, bias: alike on all ranks
    forward: Pass
    backward: Pass


@functools.lru_cache(maxsize=1024)
def row_of(
    name: str,
    how: How,
    tokens: Tokens,
    dim: int,
    shape: Shape,
    features: tuple[int, torch.dtype],
    partial_dtype: torch.dtype,
    wanted: tuple[bool, ...],
    layout: Layout,
) -> Row:
    """features: of the result, and dtype. layout: of the result."""
    rank, (width, dtype) = how[-1], features
    replicated = layout == "replicated"
    grads = gathered_rows(width, dtype)
    if replicated:
        forward = _totaling(tokens, how, totaled_rows(width, partial_dtype, dtype))
        backward = _alone(tokens, grads)
    else:
        forward = Pass(tokens, rank, moves(how, tokens.rows, (summed_rows(width, partial_dtype, dtype),)))
        backward = Pass(tokens, rank, moves(how, tokens.rows, (grads,)))
    return Row(
        name,
        dim,
        tokens.sizes,
        replicated,
        is_narrow(dtype),
        _shapes(tokens, rank, shape, layout)[0],
        wanted,
        forward,
        backward,
    )


def _totaling(tokens: Tokens, how: How, rows: Rows) -> Pass:
    rank, program = how[-1], moves(how, tokens.rows, (rows,))
    return Pass(tokens, rank, program, len(program.program.problem.slices(rank)))


def _alone(tokens: Tokens, rows: Rows) -> Pass:
    every = tokens_of(tokens.outer, tokens.inner, (tokens.length,))
    return Pass(every, 0, moves(("pairwise", 1, 0), every.rows, (rows,)), alone=True)


def _shapes(tokens: Tokens, rank: int, shape: Shape, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(what this rank has outside of the layer, what the layer computes with), but for the last dimension."""
    before, after = shape
    if layout == "replicated":
        return before + after, before + after
    return (*before, tokens.sizes[rank], *after), (*before, tokens.length, *after)


__all__ = ["Column", "Pass", "Row", "column_of", "keeps_gathered", "row_of"]
