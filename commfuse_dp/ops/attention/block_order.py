"""In which order blocks of attention, (a slice of queries, a slice of keys), are computed while one all-to-all brings slices in
and another takes results away.

A sequence of R m slices has (R m)^2 blocks. `arrived(slice)` is called as slices come, own ones first; `finished(slice)` for
every slice before its result leaves, own ones last. What is computed in which of these calls is fixed by the slices alone and
never by time, so results repeat bit for bit. R = 4, m = 1, forward, rank 0 (slices in the order of arrival 0, 3, 2, 1):

    arrived   0: (0,0)   3: (3,0) (3,3) (0,3)   2: (2,*) (*,2) of what is here   1: nothing: its blocks hide what leaves
    finished  1: (1,*)   2: (2,1)               3: (3,1)                         0: (0,1), own last

Forward, all but the last slice's blocks are computed while slices come in; a slice of queries is then complete with one row of
blocks, or one block, more. In backward queries come in (their dO), while a slice is complete only with its row and its column:
half of the rows are computed while they come, and the block of the last own slice with itself waits for the end. The second
all-to-all has three times the bytes of the first, so more is left to hide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from commfuse_dp.program.layout import slices_of_sizes


class Span(NamedTuple):
    """Positions start .. stop-1."""

    start: int
    stop: int


def arrivals(sizes: Sequence[int], slices_per_rank: int, rank: int) -> list[Span]:
    """The slices of a sequence in the order in which an all-to-all brings them to `rank`."""
    slices = slices_of_sizes(tuple(sizes), slices_per_rank)
    n = len(sizes)
    return [Span(part.start, part.stop) for step in range(n) for part in slices[(rank - step) % n]]


def runs(spans: Iterable[Span]) -> list[Span]:
    """In order of position, neighbours joined."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined


class ForwardBlocks:
    """compute(queries, keys) is called for all blocks, keys that lie together at once."""

    def __init__(self, order: Sequence[Span], compute: Callable[[Span, Span], None]) -> None:
        self._compute = compute
        self._last = order[-1] if order else None
        self._here: list[Span] = []
        self._missing = {queries: set(order) for queries in order}

    def arrived(self, span: Span) -> None:
        self._here.append(span)
        if span == self._last:
            return
        self._cover(span, self._here)
        for queries in self._here[:-1]:
            self._cover(queries, [span])

    def finished(self, span: Span) -> None:
        self._cover(span, list(self._missing[span]))

    def _cover(self, queries: Span, keys: Sequence[Span]) -> None:
        self._missing[queries].difference_update(keys)
        for run in runs(keys):
            self._compute(queries, run)


class BackwardBlocks:
    """compute(queries, keys) is called for all blocks, those of one slice that lie together at once. All keys are there."""

    def __init__(self, order: Sequence[Span], own: int, compute: Callable[[Span, Span], None]) -> None:
        """own: how many of `order` are of this rank, the first ones."""
        self._compute = compute
        self._missing = set(itertools.product(order, order))
        self._early = set(order[: (len(order) + 1) // 2])
        self._end = order[own - 1] if own else None

    def arrived(self, span: Span) -> None:
        if span in self._early:
            self._row(span, {keys for queries, keys in self._missing if queries == span and not queries == keys == self._end})

    def finished(self, span: Span) -> None:
        self._row(span, {keys for queries, keys in self._missing if queries == span})
        column = {queries for queries, keys in self._missing if keys == span}
        self._missing -= {(queries, span) for queries in column}
        for run in runs(column):
            self._compute(run, span)

    def _row(self, queries: Span, keys: set[Span]) -> None:
        self._missing -= {(queries, key) for key in keys}
        for run in runs(keys):
            self._compute(queries, run)
