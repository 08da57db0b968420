"""What a program costs: an alpha-beta model, executed event by event in simulated time.

Model
-----
* A rank computes one operation at a time (Produce, Consume, Reduce), each lane in program order, for as long as `compute_s`
  says; sums beside the compute lane go first.
* A message of b bytes takes alpha + b / beta: alpha seconds of latency, beta bytes per second.
* Links: every rank has one port out and one port in (full duplex). A port carries one message at a time, for b / beta
  seconds. The first send in program order whose piece is there takes the free port; those of one link stay in order. At the
  receiver, messages that meet wait for the port in the order in which their first byte arrives; the network between the ports
  is never the bottleneck and holds what waits (no credit limit).
* Nothing else is shared: copies cost no compute time, and communication does not slow compute down.

Closed forms this gives, N ranks, equal shards of b bytes, c seconds of compute per shard, t = b / beta:

    all-gather then compute, pairwise, c >= t + alpha       N c                        exposed 0
    all-gather then compute, pairwise, c <= t               alpha + (N-1) t + c        exposed alpha + (N-1) (t - c)
    reduce-scatter, both orders, c >= t + alpha             N c                        exposed 0
    all-gather, pairwise, no compute                        alpha + (N-1) t
    all-gather, ring, no compute                            (N-1) (alpha + t)

[Note: Scale]
Time is O(E log E) in the number of operations E, memory O(E): about N^2 m for all ranks of a pairwise or ring collective.
Larger worlds do not need all ranks: with equal sizes and equal `Costs` all ranks behave alike, shifted by their number.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from commfuse_dp.program.operations import Consume, Link, Operation, Piece, Produce, Program, Receive, Reduce, Send

COMPUTE, SEND, RECEIVE = "compute", "send", "receive"


def nothing(_rank: int, _op: Operation) -> float:
    return 0.0


@dataclass(frozen=True)
class Costs:
    """Seconds, bytes. compute_s(rank, operation) is asked for Produce, Consume and Reduce."""

    row_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    compute_s: Callable[[int, Operation], float] = nothing

    def __post_init__(self) -> None:
        if self.row_bytes < 0 or self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(
                f"row_bytes={self.row_bytes}, bytes_per_s={self.bytes_per_s}, latency_s={self.latency_s}: "
                "none may be negative and the bandwidth must be above 0"
            )


def compute_per_row(
    *, produce_s: float = 0.0, consume_s: float = 0.0, reduce_s: float = 0.0
) -> Callable[[int, Operation], float]:
    """A `compute_s` of so many seconds per row; reduce_s is per row and addition."""

    def compute_s(_rank: int, op: Operation) -> float:
        if isinstance(op, Produce):
            return produce_s * op.slice.size
        if isinstance(op, Consume):
            return consume_s * op.piece.slice.size
        assert isinstance(op, Reduce)
        return reduce_s * op.slice.size * (len(op.inputs) - 1)

    return compute_s


class Span(NamedTuple):
    """Something a rank did from start to end (seconds)."""

    lane: str  # COMPUTE, SEND (own port out) or RECEIVE (own port in)
    start: float
    end: float
    operation: Operation


@dataclass(frozen=True)
class Timeline:
    """One rank's part of a simulated collective. Times in seconds from the common start."""

    spans: tuple[Span, ...]
    compute_s: float  # sum of its operations
    finish_s: float  # everything computed, sent and received

    @property
    def exposed_s(self) -> float:
        """Time that communication adds to this rank's compute."""
        return self.finish_s - self.compute_s


@dataclass(frozen=True)
class Estimate:
    timelines: tuple[Timeline, ...]

    @property
    def makespan_s(self) -> float:
        return max(timeline.finish_s for timeline in self.timelines)

    @property
    def exposed_s(self) -> float:
        """Of the rank for which it is longest."""
        return max(timeline.exposed_s for timeline in self.timelines)


def estimate(programs: Sequence[Program], costs: Costs, *, keep_spans: bool = True) -> Estimate:
    """Execute the programs of all ranks in simulated time. Raises RuntimeError if they get stuck (verify them first)."""
    return _Simulation(programs, costs, keep_spans).run()


@dataclass
class _State:
    """One rank."""

    compute: deque[Produce | Consume | Reduce]
    reduces: list[deque[Reduce]]
    sends: deque[Send]
    receives: dict[Link, deque[Receive]]
    pieces: set[Piece]
    computing: bool = False
    sending: bool = False
    port_in_free: float = 0.0
    busy: float = 0.0
    finish: float = 0.0
    spans: list[Span] = field(default_factory=list)


class _Simulation:
    def __init__(self, programs: Sequence[Program], costs: Costs, keep_spans: bool) -> None:
        self._costs = costs
        self._keep = keep_spans
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._ranks: list[_State] = []
        for program in programs:
            state = _State(
                deque(program.compute_lane),
                [deque(lane) for lane in program.reduce_lanes.values()],
                deque(op for op in program.operations if isinstance(op, Send)),
                {link: deque(lane) for link, lane in program.receive_lanes.items()},
                set(program.own_data),
            )
            self._ranks.append(state)

    def run(self) -> Estimate:
        for rank in range(len(self._ranks)):
            self._advance(rank, 0.0)
        while self._events:
            time, _, event = heapq.heappop(self._events)
            event(time)
        for rank, state in enumerate(self._ranks):
            lanes: list[deque[Any]] = [state.compute, state.sends, *state.reduces, *state.receives.values()]
            left = sum(map(len, lanes))
            if left:
                raise RuntimeError(f"rank {rank} is stuck with {left} operations left; verifier.verify says why")
        return Estimate(tuple(Timeline(tuple(s.spans), s.busy, s.finish) for s in self._ranks))

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        self._number += 1  # events of one time happen in the order of their making
        heapq.heappush(self._events, (time, self._number, event))

    def _advance(self, rank: int, now: float) -> None:
        """Start whatever can start on this rank."""
        state = self._ranks[rank]
        # A sum beside the compute lane goes first: somebody waits for it.
        computing: list[deque[Any]] = [*state.reduces, state.compute]
        lane = next((lane for lane in computing if lane and self._ready(state, rank, lane[0])), None)
        if not state.computing and lane is not None:
            state.computing = True
            op = lane.popleft()
            seconds = self._costs.compute_s(rank, op)
            state.busy += seconds
            self._span(state, COMPUTE, now, now + seconds, op)
            self._at(now + seconds, lambda time: self._computed(rank, op, time))
        send = None if state.sending else self._next_send(state)
        if send is not None:
            state.sending = True
            state.sends.remove(send)
            seconds = self._seconds(send.piece)
            self._span(state, SEND, now, now + seconds, send)
            self._at(now + seconds, lambda time: self._port_free(rank, time))
            self._at(now + self._costs.latency_s, lambda time: self._first_byte(rank, send, time))

    @staticmethod
    def _next_send(state: _State) -> Send | None:
        """The first whose piece is there: messages of one link stay in order, links do not wait for each other."""
        stuck: set[Link] = set()
        for send in state.sends:
            link = Link(send.to, send.piece.slice.tensor.channel)
            if link not in stuck and send.piece in state.pieces:
                return send
            stuck.add(link)
        return None

    @staticmethod
    def _ready(state: _State, rank: int, op: Operation) -> bool:
        if isinstance(op, Consume):
            return op.piece in state.pieces
        if isinstance(op, Reduce):
            return all(Piece(origin, op.slice) in state.pieces for origin in op.inputs)
        return True

    def _computed(self, rank: int, op: Operation, now: float) -> None:
        state = self._ranks[rank]
        state.computing = False
        state.finish = max(state.finish, now)
        if isinstance(op, Produce):
            state.pieces.add(Piece(rank, op.slice))
        elif isinstance(op, Reduce):
            state.pieces.add(Piece(op.output, op.slice))
        self._advance(rank, now)

    def _port_free(self, rank: int, now: float) -> None:
        state = self._ranks[rank]
        state.sending = False
        state.finish = max(state.finish, now)
        self._advance(rank, now)

    def _first_byte(self, source: int, send: Send, now: float) -> None:
        """The message reaches the port of its receiver, which may still be taking in another one."""
        state = self._ranks[send.to]
        start = max(now, state.port_in_free)
        state.port_in_free = end = start + self._seconds(send.piece)
        self._span(state, RECEIVE, start, end, send)
        self._at(end, lambda time: self._received(source, send, time))

    def _received(self, source: int, send: Send, now: float) -> None:
        state = self._ranks[send.to]
        lane = state.receives.get(Link(source, send.piece.slice.tensor.channel))
        if not lane or lane[0].piece != send.piece:
            raise RuntimeError(f"rank {send.to} does not expect {send.piece} from rank {source} now; verifier.verify says why")
        lane.popleft()
        state.pieces.add(send.piece)
        state.finish = max(state.finish, now)
        self._advance(send.to, now)

    def _seconds(self, piece: Piece) -> float:
        return piece.slice.size * self._costs.row_bytes / self._costs.bytes_per_s

    def _span(self, state: _State, lane: str, start: float, end: float, op: Operation) -> None:
        if self._keep:
            state.spans.append(Span(lane, start, end, op))
