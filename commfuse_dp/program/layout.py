"""How a tensor is divided among the ranks of a group, and each rank's part into slices. Pure Python: integers only.

Two rules exist in the frameworks served here:

* rows (`row_slices`): FSDP2 cuts dim 0 as `torch.chunk` does, in chunks of ceil(rows / N); the last ones are short or empty;
* flat (`FlatLayout`): DeepSpeed cuts flattened tensors in contiguous ranges of elements, ZeRO-3 in ceil(numel / N) of each
  tensor, ZeRO-1/2 in equal parts of many tensors laid end to end, so that a range may start and end in the middle of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Tensor(NamedTuple):
    """What slices are of, where a program has several. Messages of different channels never wait for each other."""

    name: str = ""
    channel: str = ""


ONLY = Tensor()


@dataclass(frozen=True)
class Slice:
    """Rows start .. stop-1 of the sharded dimension, kept by `owner`; the unit of every program."""

    owner: int
    index: int  # number of the slice within its owner's shard: 0 .. slices_per_rank - 1
    start: int
    stop: int
    tensor: Tensor = ONLY

    @property
    def size(self) -> int:
        return self.stop - self.start


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")


def chunk_bounds(size: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every rank under the rule of `torch.chunk`, as FSDP2 shards dim 0 and ZeRO-3 flat elements.

    All chunks have ceil(size / world_size) rows, except that the last ones are short or empty: 37 rows on 4 ranks are
    10, 10, 10, 7; 5 rows on 4 ranks are 2, 2, 1, 0.
    """
    _check("size", size, 0)
    _check("world_size", world_size, 1)
    chunk = -(-size // world_size)
    return tuple((min(rank * chunk, size), min((rank + 1) * chunk, size)) for rank in range(world_size))


def cut(owner: int, start: int, stop: int, parts: int, tensor: Tensor = ONLY) -> tuple[Slice, ...]:
    """Rows start .. stop-1 of `owner` cut in `parts` near-equal slices (sizes differ by at most 1); empty ones are omitted."""
    _check("slices_per_rank", parts, 1)
    base, longer = divmod(stop - start, parts)
    slices, at = [], start
    for index in range(parts):
        end = at + base + (index < longer)
        if end > at:
            slices.append(Slice(owner, index, at, end, tensor))
        at = end
    return tuple(slices)


def slices_of_sizes(sizes: tuple[int, ...], slices_per_rank: int = 1, tensor: Tensor = ONLY) -> tuple[tuple[Slice, ...], ...]:
    """Slices per owner of a tensor whose rank r keeps sizes[r] rows, one rank's after the other's. Any sizes are allowed."""
    out, at = [], 0
    for owner, size in enumerate(sizes):
        _check(f"sizes[{owner}]", size, 0)
        out.append(cut(owner, at, at + size, slices_per_rank, tensor))
        at += size
    return tuple(out)


def row_slices(rows: int, world_size: int, slices_per_rank: int = 1) -> tuple[tuple[Slice, ...], ...]:
    """Slices per owner of a dimension of `rows`, sharded by FSDP2's rule: at most slices_per_rank, none of an empty shard."""
    return tuple(cut(owner, *own, slices_per_rank) for owner, own in enumerate(chunk_bounds(rows, world_size)))


class Rectangle(NamedTuple):
    """Rows row_start .. row_stop-1, columns column_start .. column_stop-1 of a 2-D tensor: whole rows, or a part of one row."""

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int
    offset: int  # elements from the start of the flat range it was cut from

    @property
    def numel(self) -> int:
        return (self.row_stop - self.row_start) * (self.column_stop - self.column_start)


def rectangles(start: int, stop: int, row_elems: int) -> tuple[Rectangle, ...]:
    """Flat elements start .. stop-1 of a tensor with rows of `row_elems`: at most a partial row, whole rows, a partial row."""
    _check("row_elems", row_elems, 1)
    out, at = [], start
    while at < stop:
        row, column = divmod(at, row_elems)
        if column or stop - at < row_elems:
            end = min(stop, (row + 1) * row_elems)
            out.append(Rectangle(row, row + 1, column, column + end - at, at - start))
        else:
            last = stop // row_elems
            end = last * row_elems
            out.append(Rectangle(row, last, 0, row_elems, at - start))
        at = end
    return tuple(out)


class FlatLayout:
    """A tensor in rows of `row_elems`, of which every rank keeps one contiguous range of flat elements: `bounds` (start, stop).

    Ranges follow one another and cover the tensor; they may be empty. Under ZeRO-3 they are `chunk_bounds(numel, N)`; under
    ZeRO-1/2 a rank keeps what its partition of a whole bucket of parameters has of this one.
    """

    __slots__ = ("_slices", "bounds", "numel", "row_elems", "slices_per_rank", "split_rows")

    def __init__(self, bounds: Sequence[tuple[int, int]], row_elems: int, slices_per_rank: int = 1) -> None:
        _check("row_elems", row_elems, 1)
        _check("slices_per_rank", slices_per_rank, 1)
        at = 0
        for start, stop in bounds:
            if start != at or stop < start:
                raise ValueError(f"bounds={list(bounds)}: ranges must follow one another from 0 on, {(start, stop)} does not")
            at = stop
        if at % row_elems:
            raise ValueError(f"numel={at} is no multiple of row_elems={row_elems}: a flat layout needs whole rows in total")
        self.bounds = tuple(bounds)
        self.numel = at
        self.row_elems = row_elems
        self.slices_per_rank = slices_per_rank
        self._slices = tuple(self._cut(owner) for owner in range(len(self.bounds)))
        parts = [r for own in self._slices for s in own for r in rectangles(s.start, s.stop, row_elems)]
        split = {r.row_start for r in parts if r.column_stop - r.column_start < row_elems}
        self.split_rows = tuple(sorted(split))  # rows that no slice has as a whole

    def slices(self, owner: int) -> tuple[Slice, ...]:
        """The owner's range in flat elements, cut in near-equal slices, between rows wherever it has any."""
        return self._slices[owner]

    def _cut(self, owner: int) -> tuple[Slice, ...]:
        start, stop = self.bounds[owner]
        first, last = -(-start // self.row_elems), stop // self.row_elems  # whole rows; first > last: all lies within one row
        if last - first < 1:
            return (Slice(owner, 0, start, stop),) if stop > start else ()
        inner = cut(owner, first, last, self.slices_per_rank)
        edges = [start, *(piece.stop * self.row_elems for piece in inner[:-1]), stop]
        return tuple(Slice(owner, index, low, high) for index, (low, high) in enumerate(itertools.pairwise(edges)))
