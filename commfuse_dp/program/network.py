"""All ranks' programs executed symbolically: what moves is not numbers but a record of where they come from.

[Note: Why one execution speaks for all]
A rank is a set of lanes (operations.py), each a sequential process. Lanes of different ranks meet only in channels: first
in, first out, room for `credit` messages, one lane writing and one lane reading. Lanes of one rank meet only in pieces,
each of which is made once and never unmade. A lane looks at exactly one thing at a time and does nothing but wait for it.
Hence, if two lanes can both take a step, neither step takes away the other's: a step that a lane can take stays possible
until it is taken (room is used up only by the one writer, a message only by the one reader). Such a system is a Kahn
process network with bounded channels and has the diamond property, so all executions that run until nothing can move
take the same steps, merely in another order. If one greedy execution finishes, all do, whatever the timing; if it gets
stuck, all get stuck. The runtime may delay or bundle steps as it likes, but it must keep what the argument rests on: no
lane waits for something that another lane of its rank holds up for reasons of its own. In particular a rank that waits for
credit or for data goes on to receive.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from commfuse_dp.errors import CommFuseError
from commfuse_dp.program.operations import Consume, Link, Operation, Piece, Produce, Program, Receive, Reduce, Send

# Where numbers come from: (origin, slice) is data or one partial; (left, right) a sum; the leaves in order are the fold.
Value = tuple


class VerificationError(CommFuseError):
    """A program is wrong; `rank`, `operation` and `slice` say where."""

    def __init__(self, message: str, *, rank: int, operation: Operation | None = None, slice: object = None) -> None:
        super().__init__(f"rank {rank}: {message}" + (f" [{describe(operation)}]" if operation is not None else ""))
        self.rank = rank
        self.operation = operation
        self.slice = slice if slice is not None else _slice_of(operation)


def _slice_of(op: Operation | None) -> object:
    if op is None:
        return None
    return op.slice if isinstance(op, (Produce, Reduce)) else op.piece.slice


def describe(op: Operation) -> str:
    if isinstance(op, Send):
        return f"Send to rank {op.to}: {op.piece}"
    if isinstance(op, Receive):
        return f"Receive from rank {op.source}: {op.piece}"
    if isinstance(op, Consume):
        return f"Consume {op.piece}"
    return f"{type(op).__name__} slice {op.slice.index} of owner {op.slice.owner}"


@dataclass
class _Lane:
    rank: int
    operations: Sequence[Operation]
    at: int = 0

    @property
    def finished(self) -> bool:
        return self.at == len(self.operations)


@dataclass
class _Rank:
    pieces: dict[Piece, Value]
    compute: _Lane
    reduces: list[_Lane]
    sends: dict[Link, _Lane]
    receives: dict[Link, _Lane]
    waiting: dict[Piece, list[_Lane]] = field(default_factory=dict)

    @property
    def lanes(self) -> list[_Lane]:
        return [self.compute, *self.reduces, *self.sends.values(), *self.receives.values()]


class Network:
    """The programs of all ranks and the channels between them.

    credit: messages that fit into one channel. pick: takes a random lane each time; None runs each lane as far as it goes.
    """

    def __init__(self, programs: Sequence[Program], *, credit: int = 1, pick: random.Random | None = None) -> None:
        if credit < 1:
            raise ValueError(f"credit={credit}: a channel needs room for at least 1 message")
        self._credit = credit
        self._pick = pick
        self._channels: dict[tuple[int, int, str], deque[tuple[Piece, Value]]] = {}
        self.ranks = [self._start(program) for program in programs]
        self.steps = 0

    def _start(self, program: Program) -> _Rank:
        rank = program.rank
        return _Rank(
            {piece: (rank, piece.slice) for piece in program.own_data},
            _Lane(rank, program.compute_lane),
            [_Lane(rank, lane) for lane in program.reduce_lanes.values()],
            {link: _Lane(rank, lane) for link, lane in program.send_lanes.items()},
            {link: _Lane(rank, lane) for link, lane in program.receive_lanes.items()},
        )

    def run(self) -> None:
        """Until nothing can move. Raises VerificationError if some lane has not finished then, or at the first wrong step."""
        ready = [lane for rank in self.ranks for lane in rank.lanes]
        while ready:
            if self._pick is None:
                lane = ready.pop()
                while not lane.finished and self._step(lane, ready):
                    pass
            else:
                at = self._pick.randrange(len(ready))
                ready[at], ready[-1] = ready[-1], ready[at]
                lane = ready.pop()
                if not lane.finished and self._step(lane, ready):
                    ready.append(lane)
        self._check_finished()

    def _step(self, lane: _Lane, ready: list[_Lane]) -> bool:
        """Take one step if it is possible, and put the lanes that it may have woken on `ready`."""
        op, rank = lane.operations[lane.at], self.ranks[lane.rank]
        missing = self._missing(op, rank, lane.rank)
        if missing is not None:
            rank.waiting.setdefault(missing, []).append(lane)
            return False
        if isinstance(op, Send):
            if not 0 <= op.to < len(self.ranks) or op.to == lane.rank:
                raise VerificationError(f"rank {op.to} is no peer", rank=lane.rank, operation=op)
            name = op.piece.slice.tensor.channel
            channel = self._channels.setdefault((lane.rank, op.to, name), deque())
            if len(channel) >= self._credit:
                return False
            channel.append((op.piece, rank.pieces[op.piece]))
            self._wake(self.ranks[op.to].receives.get(Link(lane.rank, name)), ready)
        elif isinstance(op, Receive):
            name = op.piece.slice.tensor.channel
            channel = self._channels.get((op.source, lane.rank, name), deque())
            if not channel:
                return False
            piece, value = channel.popleft()
            if piece != op.piece:
                raise VerificationError(f"rank {op.source} sends {piece} at this point", rank=lane.rank, operation=op)
            self._make(lane.rank, piece, value, op, ready)
            self._wake(self.ranks[op.source].sends.get(Link(lane.rank, name)), ready)
        elif isinstance(op, Produce):
            self._make(lane.rank, Piece(lane.rank, op.slice), (lane.rank, op.slice), op, ready)
        elif isinstance(op, Reduce):
            total = rank.pieces[Piece(op.inputs[0], op.slice)]
            for origin in op.inputs[1:]:
                total = (total, rank.pieces[Piece(origin, op.slice)])
            self._make(lane.rank, Piece(op.output, op.slice), total, op, ready)
        lane.at += 1
        self.steps += 1
        return True

    def _missing(self, op: Operation, rank: _Rank, number: int) -> Piece | None:
        if isinstance(op, (Send, Consume)):
            return None if op.piece in rank.pieces else op.piece
        if isinstance(op, Reduce):
            if not op.inputs:
                raise VerificationError("a sum of nothing", rank=number, operation=op)
            for origin in op.inputs:
                if Piece(origin, op.slice) not in rank.pieces:
                    return Piece(origin, op.slice)
        return None

    def _make(self, rank: int, piece: Piece, value: Value, op: Operation, ready: list[_Lane]) -> None:
        state = self.ranks[rank]
        if piece in state.pieces:
            raise VerificationError(f"{piece} is here already: delivered or computed twice", rank=rank, operation=op)
        state.pieces[piece] = value
        for lane in state.waiting.pop(piece, ()):
            self._wake(lane, ready)

    @staticmethod
    def _wake(lane: _Lane | None, ready: list[_Lane]) -> None:
        if lane is not None:
            ready.append(lane)

    # ---- stuck -------------------------------------------------------------------------------------------------------
    def _check_finished(self) -> None:
        blocked = [lane for rank in self.ranks for lane in rank.lanes if not lane.finished]
        for lane in blocked:  # a cause that no other lane can ever cure explains the rest
            cause = self._hopeless(lane)
            if cause is not None:
                raise VerificationError(cause, rank=lane.rank, operation=lane.operations[lane.at])
        if blocked:
            where = "; ".join(f"rank {lane.rank} at {describe(lane.operations[lane.at])}" for lane in blocked[:8])
            raise VerificationError(
                f"deadlock with room for {self._credit} messages per channel: {where}",
                rank=blocked[0].rank,
                operation=blocked[0].operations[blocked[0].at],
            )
        for (source, to, _), channel in self._channels.items():
            if channel:
                raise VerificationError(
                    f"{channel[0][0]} was sent to rank {to}, which never receives it", rank=source, slice=channel[0][0].slice
                )

    def _hopeless(self, lane: _Lane) -> str | None:
        op, rank = lane.operations[lane.at], self.ranks[lane.rank]
        missing = self._missing(op, rank, lane.rank)
        if missing is not None:
            coming = (
                (isinstance(other, Receive) and other.piece == missing)
                or (isinstance(other, Produce) and Piece(lane.rank, other.slice) == missing)
                or (isinstance(other, Reduce) and Piece(other.output, other.slice) == missing)
                for source in rank.lanes
                for other in source.operations[source.at :]
            )
            return None if any(coming) else f"{missing} is neither received nor computed here"
        channel = op.piece.slice.tensor.channel if isinstance(op, (Send, Receive)) else ""
        if isinstance(op, Receive):
            sends = self.ranks[op.source].sends.get(Link(lane.rank, channel)) if 0 <= op.source < len(self.ranks) else None
            if sends is None or sends.finished:
                return f"rank {op.source} does not send it"
        if isinstance(op, Send):
            receives = self.ranks[op.to].receives.get(Link(lane.rank, channel))
            if receives is None or receives.finished:
                return f"rank {op.to} does not receive it"
        return None
