"""How a tensor is divided among the ranks of a group, and each rank's part into slices. Pure Python: integers only.

Two rules exist in the frameworks served here:

* rows (`RowLayout`): FSDP2 cuts dim 0 as `torch.chunk` does, in chunks of ceil(rows / N); the last ones are short or empty;
* flat (`FlatLayout`): DeepSpeed ZeRO-3 cuts the flattened tensor in partitions of ceil(numel / N) elements, the last one
  padded, so that a partition may start and end in the middle of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Slice:
    """Rows start .. stop-1 of the sharded dimension, kept by `owner`; the unit of every schedule."""

    owner: int
    index: int  # number of the slice within its owner's shard: 0 .. slices_per_rank - 1
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")


def chunk_bounds(size: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of every rank under the rule of `torch.chunk`, as FSDP2 shards dim 0.

    All chunks have ceil(size / world_size) rows, except that the last ones are short or empty: 37 rows on 4 ranks are
    10, 10, 10, 7; 5 rows on 4 ranks are 2, 2, 1, 0.
    """
    _check("size", size, 0)
    _check("world_size", world_size, 1)
    chunk = -(-size // world_size)
    return tuple((min(rank * chunk, size), min((rank + 1) * chunk, size)) for rank in range(world_size))


def cut(owner: int, start: int, stop: int, parts: int) -> tuple[Slice, ...]:
    """Rows start .. stop-1 of `owner` cut in `parts` near-equal slices (sizes differ by at most 1); empty ones are omitted."""
    _check("slices_per_rank", parts, 1)
    base, longer = divmod(stop - start, parts)
    slices, at = [], start
    for index in range(parts):
        end = at + base + (index < longer)
        if end > at:
            slices.append(Slice(owner, index, at, end))
        at = end
    return tuple(slices)


def slices_of_sizes(sizes: tuple[int, ...], slices_per_rank: int = 1) -> tuple[tuple[Slice, ...], ...]:
    """Slices per owner of a tensor whose rank r keeps sizes[r] rows, one rank's after the other's. Any sizes are allowed."""
    out, at = [], 0
    for owner, size in enumerate(sizes):
        _check(f"sizes[{owner}]", size, 0)
        out.append(cut(owner, at, at + size, slices_per_rank))
        at += size
    return tuple(out)


class RowLayout:
    """Dim 0 of a tensor of `rows` rows, sharded by FSDP2's rule on `world_size` ranks, each shard cut in `slices_per_rank`."""

    __slots__ = ("_bounds", "_slices", "rows", "slices_per_rank", "world_size")

    def __init__(self, rows: int, world_size: int, slices_per_rank: int = 1) -> None:
        self.rows = rows
        self.world_size = world_size
        self.slices_per_rank = slices_per_rank
        self._bounds = chunk_bounds(rows, world_size)
        self._slices = tuple(cut(owner, start, stop, slices_per_rank) for owner, (start, stop) in enumerate(self._bounds))

    def bounds(self, owner: int) -> tuple[int, int]:
        """(start, stop) of the rows that `owner` keeps; start == stop for an empty shard."""
        return self._bounds[owner]

    def slices(self, owner: int) -> tuple[Slice, ...]:
        """The owner's slices in row order: at most slices_per_rank, none for an empty shard."""
        return self._slices[owner]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows per rank."""
        return tuple(stop - start for start, stop in self._bounds)

    @property
    def max_rows(self) -> int:
        """Rows of the largest shard: what FSDP2 pads all shards to."""
        return self._bounds[0][1] - self._bounds[0][0]

    @property
    def max_slice_rows(self) -> int:
        """Rows of the largest slice."""
        return -(-self.max_rows // self.slices_per_rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowLayout):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"RowLayout(rows={self.rows}, world_size={self.world_size}, slices_per_rank={self.slices_per_rank})"

    @property
    def _key(self) -> tuple[int, int, int]:
        return (self.rows, self.world_size, self.slices_per_rank)


class PartialRow(NamedTuple):
    """Columns column_start .. column_stop-1 of one row; `offset` is where they lie in the owner's partition, in elements."""

    row: int
    column_start: int
    column_stop: int
    offset: int


class FlatPart(NamedTuple):
    """What one rank keeps of a flat-sharded 2-D tensor. Offsets are elements from the start of its partition."""

    start: int  # flat range of real elements
    stop: int
    padding: int  # elements after them that belong to no row
    row_start: int  # rows kept whole: row_start .. row_stop-1
    row_stop: int
    rows_offset: int
    head: PartialRow | None  # the row it starts in the middle of (or lies within)
    tail: PartialRow | None  # the row it ends in the middle of


class FlatLayout:
    """A tensor of `numel` elements in rows of `row_elems`, in 1-D partitions of ceil(numel / world_size) as DeepSpeed cuts it.

    The whole rows and the partial edge rows of all ranks together cover every element exactly once.
    """

    __slots__ = ("_parts", "numel", "partition", "row_elems", "world_size")

    def __init__(self, numel: int, row_elems: int, world_size: int) -> None:
        _check("numel", numel, 0)
        _check("row_elems", row_elems, 1)
        _check("world_size", world_size, 1)
        if numel % row_elems:
            raise ValueError(f"numel={numel} is no multiple of row_elems={row_elems}: a flat layout needs whole rows in total")
        self.numel = numel
        self.row_elems = row_elems
        self.world_size = world_size
        self.partition = -(-numel // world_size)
        self._parts = tuple(self._part(owner) for owner in range(world_size))

    def part(self, owner: int) -> FlatPart:
        return self._parts[owner]

    def bounds(self, owner: int) -> tuple[int, int]:
        """Flat range (start, stop) of the owner's real elements."""
        return self._parts[owner].start, self._parts[owner].stop

    @property
    def aligned(self) -> bool:
        """True if no partition starts or ends in the middle of a row."""
        return all(part.head is None and part.tail is None for part in self._parts)

    def _part(self, owner: int) -> FlatPart:
        width = self.row_elems
        start = min(owner * self.partition, self.numel)
        stop = min(start + self.partition, self.numel)
        padding = self.partition - (stop - start)
        row_start, row_stop = -(-start // width), stop // width  # rows inside; row_start > row_stop if all lies within a row
        head = tail = None
        if start < stop and start % width:
            row = start // width
            head = PartialRow(row, start % width, min(width, stop - row * width), 0)
        if stop > start and stop % width and row_start <= row_stop:
            tail = PartialRow(row_stop, 0, stop % width, row_stop * width - start)
        row_stop = max(row_start, row_stop)
        rows_offset = min(row_start * width, stop) - start
        return FlatPart(start, stop, padding, row_start, row_stop, rows_offset, head, tail)
