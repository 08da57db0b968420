"""Communication fused with compute as data: what one rank computes, sends and receives, and in which order.

A `Problem` is one collective over one tensor and is the same on all ranks. A `Program` is what one rank does for one problem
(plain collectives), for two (a layer's backward: parameters gathered, gradients reduced) or for many (a step).

    build.py, layer.py  ->  Program  ->  verify.py     proves the programs of all ranks together
                                     ->  simulate.py   their time on a machine model
                                     ->  collectives/execution.py, engine/   run them

What moves is a `Piece`: one slice together with whose numbers they are.

| origin | the piece is |
| --- | --- |
| a rank | that rank's own data (all-gather, all-to-all) or its partial of the slice (reduce-scatter) |
| partial_sum(rank) | what that rank passes on: the sum of some ranks' partials, its own included (ring) |
| TOTAL | the sum of the partials of all ranks |

[Note: Lanes]
A program is a list, but a rank works on several lanes at once: the compute lane (Produce, Consume, and a Reduce that says so),
one lane of Sends to each peer and one of Receives from each (of each channel), and further lanes of Reduces. Within a lane
operations run in program order. Across lanes only data counts: a Send, Consume or Reduce waits for its pieces, a Send also
for room in the channel, a Receive for the message, and for nothing else. So no rank ever waits for a barrier or for another
rank's pace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.layout import ONLY, Slice, Tensor, slices_of_sizes
from commfuse_dp.program.orders import (
    ORDERS,
    gather_owners,
    hierarchical_gather_owners,
    hierarchical_scatter_owners,
    scatter_owners,
)

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)

TOTAL = -1

COMPUTE = "compute"  # the lane of products; see [Note: Lanes]


def partial_sum(rank: int) -> int:
    """Origin of the sum that `rank` has added up and passes on. Inverse of itself: partial_sum(partial_sum(r)) == r."""
    return -2 - rank


class Piece(NamedTuple):
    """`slice` as contributed by `origin`; see the table above."""

    origin: int
    slice: Slice

    def __str__(self) -> str:
        return self.told(int)

    def told(self, called: Callable[[int], int]) -> str:
        """called: what a rank is called."""
        if self.origin >= 0:
            whose = f"rank {called(self.origin)}"
        else:
            whose = "total" if self.origin == TOTAL else f"sum by rank {called(partial_sum(self.origin))}"
        of = f" of {self.slice.tensor.name}" if self.slice.tensor.name else ""
        return f"slice {self.slice.index} of owner {called(self.slice.owner)}{of} ({whose})"


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
    lane: Hashable = COMPUTE


@dataclass(frozen=True)
class Send:
    to: int
    piece: Piece


@dataclass(frozen=True)
class Receive:
    source: int
    piece: Piece


Operation = Produce | Consume | Reduce | Send | Receive


Way = Literal["direct", "ring", "hosts"]
_WAYS: dict[str, Way] = {"pairwise": "direct", "ring": "ring", "hierarchical": "hosts"}


@dataclass(frozen=True)
class Problem:
    """What a collective has to do, in rows (or elements) of the sharded dimension.

    sizes: rows that each rank keeps (all_gather, reduce_scatter, all_reduce), any sizes >= 0; for all_to_all a table,
        sizes[source][destination].
    order: in which a rank turns to the owners (orders.py).
    way: how pieces travel: straight to their owners, through the neighbour, or once per host; empty: as the order suggests.
    hosts: the ranks of each host, for the order and the way through hosts.
    cut: the slices of each owner, where a framework has cut them already; sizes and slices_per_rank then only count.
    tensor: what it is about, where a program has several problems: all slices carry it.
    """

    collective: Collective
    sizes: tuple
    order: str = "pairwise"
    slices_per_rank: int = 1
    way: str = ""
    hosts: Hosts | None = None
    cut: tuple[tuple[Slice, ...], ...] | None = None
    tensor: Tensor = ONLY

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective={self.collective!r}: must be one of {', '.join(COLLECTIVES)}")
        if self.order not in _WAYS or (self.order == "hierarchical" and self.hosts is None):
            raise ValueError(f"order={self.order!r}: must be one of {', '.join(map(repr, ORDERS))}; 'hierarchical' needs hosts")
        if not self.way:
            object.__setattr__(self, "way", _WAYS[self.order])
        if self.way not in get_args(Way) or (self.way == "hosts" and self.hosts is None):
            raise ValueError(f"way={self.way!r}: must be one of {', '.join(map(repr, get_args(Way)))}; 'hosts' needs hosts")
        n = len(self.sizes)
        if n == 0:
            raise ValueError("sizes is empty: one entry per rank is needed")
        if self.collective == "all_to_all":
            for source, row in enumerate(self.sizes):
                if not isinstance(row, tuple) or len(row) != n:
                    raise ValueError(f"all_to_all: sizes[{source}] = {row!r} must be a tuple of {n} sizes, one per destination")
        _ = self.slices_by_source  # refuses negative sizes and a bad slices_per_rank here and not in the middle of a run

    @classmethod
    def of(cls, collective: Collective, cut: Sequence[Sequence[Slice]], **how: object) -> Problem:
        """From the slices of each owner."""
        table = tuple(tuple(own) for own in cut)
        return cls(collective, tuple(sum(part.size for part in own) for own in table), cut=table, **how)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @cached_property
    def slices_by_source(self) -> tuple[tuple[tuple[Slice, ...], ...], ...]:
        """[source][owner] -> slices. All sources share one entry (index 0) unless the collective is all_to_all."""
        if self.cut is not None:
            return (tuple(tuple(replace(part, tensor=self.tensor) for part in own) for own in self.cut),)
        rows = self.sizes if self.collective == "all_to_all" else (self.sizes,)
        return tuple(slices_of_sizes(row, self.slices_per_rank, self.tensor) for row in rows)

    def slices(self, owner: int, source: int = 0) -> tuple[Slice, ...]:
        """Slices that end up at `owner`; for all_to_all those that `source` sends there (rows of the source's tensor)."""
        return self.slices_by_source[source if self.collective == "all_to_all" else 0][owner]

    def gather_owners(self, rank: int) -> tuple[int, ...]:
        """Owners in the order in which `rank` consumes their slices: own first."""
        if self.order == "hierarchical":
            return hierarchical_gather_owners(rank, self._hosts.members)
        return gather_owners(rank, self.world_size, self.order)

    def scatter_owners(self, rank: int) -> tuple[int, ...]:
        """Owners in the order in which `rank` computes what it owes them: own last."""
        if self.order == "hierarchical":
            return hierarchical_scatter_owners(rank, self._hosts.members)
        return scatter_owners(rank, self.world_size, self.order)

    @property
    def _hosts(self) -> Hosts:
        assert self.hosts is not None
        return self.hosts

    # ---- the way through hosts -----------------------------------------------------------------------------------------
    def source(self, rank: int, owner: int) -> int:
        """The rank from which `rank` gets slices of `owner`."""
        if self.way == "ring":
            return (rank - 1) % self.world_size
        if self.way == "hosts":
            gateway = self._hosts.gateway(rank, owner)
            return owner if gateway == rank else gateway
        return owner


class Link(NamedTuple):
    """Where messages stay in order: to or from one peer, in one channel."""

    peer: int
    channel: str = ""


@dataclass(frozen=True, eq=False)  # what is bound to a program is found by the object
class Program:
    """What `rank` does for the `problems`."""

    problems: tuple[Problem, ...]
    rank: int
    operations: tuple[Operation, ...]

    @property
    def problem(self) -> Problem:
        """Of a program that has one only."""
        (problem,) = self.problems
        return problem

    @property
    def world_size(self) -> int:
        return self.problems[0].world_size

    @cached_property
    def compute_lane(self) -> tuple[Produce | Consume | Reduce, ...]:
        kinds = (Produce, Consume, Reduce)
        return tuple(op for op in self.operations if isinstance(op, kinds) and getattr(op, "lane", COMPUTE) == COMPUTE)

    @cached_property
    def reduce_lanes(self) -> dict[Hashable, tuple[Reduce, ...]]:
        """Sums that are made beside the compute lane, as soon as their terms are there."""
        lanes: dict[Hashable, list[Reduce]] = {}
        for op in self.operations:
            if isinstance(op, Reduce) and op.lane != COMPUTE:
                lanes.setdefault(op.lane, []).append(op)
        return {name: tuple(lane) for name, lane in lanes.items()}

    @cached_property
    def send_lanes(self) -> dict[Link, tuple[Send, ...]]:
        """Sends per destination and channel, in program order."""
        lanes: dict[Link, list[Send]] = {}
        for op in self.operations:
            if isinstance(op, Send):
                lanes.setdefault(Link(op.to, op.piece.slice.tensor.channel), []).append(op)
        return {link: tuple(lane) for link, lane in lanes.items()}

    @cached_property
    def receive_lanes(self) -> dict[Link, tuple[Receive, ...]]:
        """Receives per source and channel, in program order."""
        lanes: dict[Link, list[Receive]] = {}
        for op in self.operations:
            if isinstance(op, Receive):
                lanes.setdefault(Link(op.source, op.piece.slice.tensor.channel), []).append(op)
        return {link: tuple(lane) for link, lane in lanes.items()}

    @property
    def own_data(self) -> tuple[Piece, ...]:
        """What is there before it begins: this rank's shards of what is gathered."""
        gathered = (problem for problem in self.problems if problem.collective == "all_gather")
        return tuple(Piece(self.rank, part) for problem in gathered for part in problem.slices(self.rank))

    @property
    def rows_sent(self) -> int:
        return sum(op.piece.slice.size for op in self.operations if isinstance(op, Send))

    @property
    def rows_received(self) -> int:
        return sum(op.piece.slice.size for op in self.operations if isinstance(op, Receive))
