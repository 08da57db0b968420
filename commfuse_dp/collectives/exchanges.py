"""In which order streams move the messages of a program: exchanges, one list that all ranks agree about.

    exchange    a message to the peer d places further on, while one comes from the peer d places back; one may be missing

Programs of one problem are alike on all ranks but for the numbers of the ranks: whatever a rank does with the peer d places
further on, its peer d places back does with it. A message is told by what is the same on both ends and on all ranks: its half
of the program (phase), d, how far its sender is from its owner, and the number of its slice, or in an all-reduce of its round.
Sorted by these, exchanges have one order on all ranks, also where shards are uneven and some ranks have nothing to send: what a
lockstep transport needs ([Note: Lockstep transports] in transport/base.py), and what bounds the memory of messages under way on
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commfuse_dp.program.all_reduce import round_of
from commfuse_dp.program.operations import TOTAL, Problem, Program, Receive, Send
from commfuse_dp.transport.one_sided.ring import align

_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # of collectives, fewer than ranks and two more


class Way(NamedTuple):
    """What tells a message from all others between two ranks."""

    turn: tuple[int, ...]  # sorts exchanges as programs compute what they send
    distance: int  # from the sender to the receiver
    number: int  # of its tag


class Exchange(NamedTuple):
    """One part of a passage (bound.py) in either direction.

    out, into: number of the lane, and of the passage in it; None: nothing goes, or comes."""

    dst: int
    src: int
    number: int
    part: int
    out: tuple[int, int] | None
    into: tuple[int, int] | None
    room: int  # bytes that the larger of the two messages takes in a ring


class Numbering:
    """Of one program, the same on all ranks. Raises ValueError for the way through hosts, which not all ranks go alike."""

    def __init__(self, program: Program) -> None:
        for problem in program.problems:
            if problem.way == "hosts":
                raise ValueError(
                    "order='hierarchical' is not one of the orders that streams exchange in: use 'pairwise' or 'ring'"
                )
        self._n, self._rank = program.world_size, program.rank
        self._problems = {problem.tensor: (at, problem) for at, problem in enumerate(program.problems)}
        self._most = max(problem.slices_per_rank for problem in program.problems)

    def way(self, op: Send | Receive) -> Way:
        sender, receiver = (self._rank, op.to) if isinstance(op, Send) else (op.source, self._rank)
        n, (origin, part) = self._n, op.piece
        at, problem = self._problems[part.tensor]
        distance, hop = (receiver - sender) % n, (sender - part.owner) % n
        index = round_of(problem, part) if problem.collective == "all_reduce" else part.index
        passed = (sender - origin) % n if problem.collective == "all_to_all" and problem.way == "ring" else 0
        phase = 2 * at + (origin == TOTAL and problem.collective == "all_reduce")
        turn = self._turn(problem, phase, distance, hop, passed, index)
        if problem.way == "direct":  # messages to all peers have one number, and other collectives other ones
            hop = _KINDS.index(problem.collective)
        return Way(turn, distance, ((phase * (n + 2) + hop) * n + passed) * self._most + index)

    def _turn(self, problem: Problem, phase: int, distance: int, hop: int, passed: int, index: int) -> tuple[int, ...]:
        n, summed = self._n, problem.collective == "all_reduce"
        gathers = problem.collective == "all_gather" or (summed and phase % 2 == 1)
        if summed:  # a round's totals leave behind the next round's partials
            phase = 2 * (index + gathers) + gathers
        if problem.way == "direct":  # who needs it first comes first
            return (phase, n - distance if gathers else distance, index)
        if problem.collective == "all_to_all":
            return (phase, passed, (hop - passed) % n, index)
        # Of one owner's slices, running sums leave before rows are passed on: see layer.py.
        return (phase if summed else 0, hop - 1, index, 1 if gathers else 0)


Side = tuple[Sequence[Way], Sequence[tuple[int, ...]]]  # of a lane's passages: their ways, and the bytes of their messages


def exchanges_of(rank: int, world_size: int, outgoing: Sequence[Side], incoming: Sequence[Side]) -> tuple[Exchange, ...]:
    """outgoing, incoming: of each lane."""
    found: dict[Way, list[tuple[int, int] | None]] = {}
    sizes: dict[Way, list[tuple[int, ...]]] = {}
    for side, lanes in enumerate((outgoing, incoming)):
        for lane, (ways, messages) in enumerate(lanes):
            for at, (way, own) in enumerate(zip(ways, messages, strict=True)):
                found.setdefault(way, [None, None])[side] = lane, at
                sizes.setdefault(way, [(), ()])[side] = own
    exchanges = []
    for way in sorted(found):
        (out, into), (gone, come) = found[way], sizes[way]
        dst, src = (rank + way.distance) % world_size, (rank - way.distance) % world_size
        for part in range(max(len(gone), len(come))):
            ends = out if part < len(gone) else None, into if part < len(come) else None
            room = align(max(*gone[part : part + 1], *come[part : part + 1], 1))
            exchanges.append(Exchange(dst, src, way.number, part, *ends, room))
    return tuple(exchanges)
