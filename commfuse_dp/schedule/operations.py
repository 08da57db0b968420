"""A collective as data: what one rank computes, sends and receives, and in which order.

A `Problem` says what is to be done and is the same on all ranks; a `Schedule` is one rank's program for it. Programs are
written by builders.py, proved by verifier.py, timed by cost.py and executed by commfuse_dp.collectives.

What moves is a `Piece`: one slice together with whose numbers they are.

| origin | the piece is |
| --- | --- |
| a rank | that rank's own data (all-gather, all-to-all) or its partial of the slice (reduce-scatter) |
| partial_sum(rank) | what that rank passes on: the sum of some ranks' partials, its own included (ring) |
| TOTAL | the sum of the partials of all ranks |

[Note: Lanes]
A program is a list, but a rank works on several lanes at once: the subsequence of Produce / Consume / Reduce (compute), the
Sends to each destination and the Receives from each source. Within a lane operations run in program order. Across lanes
only data counts: a Send, Consume or Reduce runs when its pieces are there, a Send also needs room in the channel, a Receive
needs the message, and nothing else is waited for. So no rank ever waits for a barrier or for another rank's pace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from commfuse_dp.schedule.layout import Slice, slices_of_sizes
from commfuse_dp.schedule.orders import check_order

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)

TOTAL = -1


def partial_sum(rank: int) -> int:
    """Origin of the sum that `rank` has added up and passes on. Inverse of itself: partial_sum(partial_sum(r)) == r."""
    return -2 - rank


class Piece(NamedTuple):
    """`slice` as contributed by `origin`; see the table above."""

    origin: int
    slice: Slice

    def __str__(self) -> str:
        if self.origin >= 0:
            whose = f"rank {self.origin}"
        else:
            whose = "total" if self.origin == TOTAL else f"sum by rank {partial_sum(self.origin)}"
        return f"slice {self.slice.index} of owner {self.slice.owner} ({whose})"


@dataclass(frozen=True)
class Produce:
    """Compute this rank's partial of `slice` (reduce-scatter) or its block for slice.owner (all-to-all)."""

    slice: Slice


@dataclass(frozen=True)
class Consume:
    """Compute with a piece that is readable here."""

    piece: Piece


@dataclass(frozen=True)
class Reduce:
    """Add up pieces of one slice, left fold in the order of `inputs` (origins); the result is the piece (output, slice)."""

    slice: Slice
    inputs: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Send:
    to: int
    piece: Piece


@dataclass(frozen=True)
class Receive:
    source: int
    piece: Piece


Operation = Produce | Consume | Reduce | Send | Receive


@dataclass(frozen=True)
class Problem:
    """What a collective has to do, in rows of the sharded dimension.

    sizes: rows that each rank keeps (all_gather, reduce_scatter, all_reduce), any sizes >= 0; for all_to_all a table,
        sizes[source][destination].
    """

    collective: Collective
    sizes: tuple
    order: str = "pairwise"
    slices_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective={self.collective!r}: must be one of {', '.join(COLLECTIVES)}")
        check_order(self.order)
        n = len(self.sizes)
        if n == 0:
            raise ValueError("sizes is empty: one entry per rank is needed")
        if self.collective == "all_to_all":
            for source, row in enumerate(self.sizes):
                if not isinstance(row, tuple) or len(row) != n:
                    raise ValueError(f"all_to_all: sizes[{source}] = {row!r} must be a tuple of {n} sizes, one per destination")
        _ = self.slices_by_source  # refuses negative sizes and a bad slices_per_rank here and not in the middle of a run

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @cached_property
    def slices_by_source(self) -> tuple[tuple[tuple[Slice, ...], ...], ...]:
        """[source][owner] -> slices. All sources share one entry (index 0) unless the collective is all_to_all."""
        rows = self.sizes if self.collective == "all_to_all" else (self.sizes,)
        return tuple(slices_of_sizes(row, self.slices_per_rank) for row in rows)

    def slices(self, owner: int, source: int = 0) -> tuple[Slice, ...]:
        """Slices that end up at `owner`; for all_to_all those that `source` sends there (rows of the source's tensor)."""
        return self.slices_by_source[source if self.collective == "all_to_all" else 0][owner]


@dataclass(frozen=True)
class Schedule:
    """The program of `rank` for `problem`."""

    problem: Problem
    rank: int
    operations: tuple[Operation, ...]

    @property
    def compute_lane(self) -> Iterable[Produce | Consume | Reduce]:
        return (op for op in self.operations if isinstance(op, (Produce, Consume, Reduce)))

    @cached_property
    def send_lanes(self) -> dict[int, tuple[Send, ...]]:
        """Sends per destination, in program order."""
        lanes: dict[int, list[Send]] = {}
        for op in self.operations:
            if isinstance(op, Send):
                lanes.setdefault(op.to, []).append(op)
        return {peer: tuple(lane) for peer, lane in lanes.items()}

    @cached_property
    def receive_lanes(self) -> dict[int, tuple[Receive, ...]]:
        """Receives per source, in program order."""
        lanes: dict[int, list[Receive]] = {}
        for op in self.operations:
            if isinstance(op, Receive):
                lanes.setdefault(op.source, []).append(op)
        return {peer: tuple(lane) for peer, lane in lanes.items()}

    @property
    def rows_sent(self) -> int:
        return sum(op.piece.slice.size for op in self.operations if isinstance(op, Send))

    @property
    def rows_received(self) -> int:
        return sum(op.piece.slice.size for op in self.operations if isinstance(op, Receive))
