"""Grouped exchanges over the simulated device: both ends meet in every order that streams allow.

    board = FakeBoard(world)                             one for all ranks
    exchange = FakeGroupedExchange(board, rank)

An exchange is two operations of a lane's own stream: `post` (from here on buffers are read and written), `complete`, which runs
when every peer has posted the matching exchange. What NCCL promises, and no more:

* a receiver that is through comes after the sender's post: happens-before goes along;
* a sender that is through says nothing about the receiver: small messages may have left into buffers of the library. Whether a
  send waits for its receive is drawn from the seed;
* bytes move at the last possible moment, so that a buffer that is written too early spoils them.

Accesses are those of the lane's stream, from `post` to `complete`. A size or a partner that does not fit raises `Unmatched`; an
exchange whose partner never comes leaves the stream standing (`Stuck`, or until `abort`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from commfuse_dp.errors import TransportError, Where
from commfuse_dp.transport.base import GRAD_LANE, NOWHERE, PARAM_LANE
from commfuse_dp.transport.grouped.exchange import Exchanged, GroupedExchange, Labels, Part
from tests.support.fake_device import FakeEvent, FakeStream, FakeWorld, _merge, _Op

LANE_STREAMS = {PARAM_LANE: "lane parameters", GRAD_LANE: "lane gradients"}


class Unmatched(AssertionError):
    """Two ends of an exchange do not fit together."""


@dataclass(eq=False)
class _End:
    """One send or receive. `number`: of those of this pair, lane and direction."""

    src: int
    dst: int
    data: torch.Tensor
    eager: bool = False
    posted: bool = False
    clock: dict[FakeStream, int] = field(default_factory=dict)  # at the post
    at: int = 0  # simulated ns of the post
    bytes_: torch.Tensor | None = None  # a send that has left
    partner: _End | None = None


class FakeBoard:
    """Where ends find each other."""

    def __init__(self, world: FakeWorld, members: Sequence[int] | None = None) -> None:
        self.world = world
        self.members = tuple(range(world.world_size)) if members is None else tuple(members)  # whose devices its ranks use
        self.devices = [world.devices[member] for member in self.members]
        self.numbers: Sequence[int] | None = None  # of its ranks in the default group; None: their own
        self.open: dict[tuple[int, int, int, bool], list[_End]] = {}  # lane, src, dst, sending -> without partner yet
        self.aborted: set[int] = set()
        self.eager = 0.5  # share of the sends that do not wait for their receive
        self.calls: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}  # rank -> (lane, to, from)

    def match(self, lane: int, end: _End, *, sending: bool) -> None:
        waiting = self.open.setdefault((lane, end.src, end.dst, not sending), [])
        if not waiting:
            self.open.setdefault((lane, end.src, end.dst, sending), []).append(end)
            return
        other = waiting.pop(0)
        end.partner, other.partner = other, end
        if end.data.nbytes != other.data.nbytes:
            send, receive = (end, other) if sending else (other, end)
            raise Unmatched(
                f"rank {end.src} sends {send.data.nbytes} bytes to rank {end.dst}, which receives {receive.data.nbytes}"
            )


class FakeExchanged(Exchanged):
    def __init__(self, device, event: FakeEvent | None) -> None:  # type: ignore[no-untyped-def]
        self._device, self._event = device, event

    def done(self) -> bool:
        return self._event is None or self._event.done()

    def wait(self, where: Where = NOWHERE) -> None:
        if self._event is not None:
            self._device.wait_event(self._device.current_stream(), self._event)


class FakeGroupedExchange(GroupedExchange):
    def __init__(self, board: FakeBoard, rank: int) -> None:
        self.board, self.rank, self.numbers = board, rank, board.numbers
        self.world_size = len(board.members)
        self.device = board.devices[rank]
        self.closed = False
        board.calls[rank] = []

    def exchange(
        self,
        lane: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        *,
        labels: Labels | None = None,
        where: Where = NOWHERE,
    ) -> FakeExchanged:
        world, board, device = self.board.world, self.board, self.device
        if self.closed or self.rank in board.aborted:
            raise TransportError(f"grouped exchange of rank {self.rank}: closed or aborted")
        for parts in (sends, receives):
            peers = [peer for peer, _ in parts]
            if self.rank in peers or len(set(peers)) < len(peers) or not all(0 <= p < self.world_size for p in peers):
                raise ValueError(f"rank {self.rank} cannot exchange with {peers}")
            assert all(data.is_contiguous() for _, data in parts)
        stream = device.side_stream(LANE_STREAMS[lane])
        with world.changed:
            out = [_End(self.rank, peer, data, world.random.random() < board.eager) for peer, data in sends if data.numel()]
            into = [_End(peer, self.rank, data) for peer, data in receives if data.numel()]
            board.calls[self.rank].append((lane, tuple(end.dst for end in out), tuple(end.src for end in into)))
            if labels is not None:
                out += [_End(self.rank, end.dst, labels[0], end.eager) for end in out]
                into += [_End(end.src, self.rank, labels[1]) for end in into]
            for end in out:
                board.match(lane, end, sending=True)
            for end in into:
                board.match(lane, end, sending=False)
        if not out and not into:
            return FakeExchanged(device, None)
        for end in (*out, *into):
            world.keep(end.data)
        device.wait_event(stream, device.record(device.current_stream()))
        what = f"exchange on {LANE_STREAMS[lane]} to {[e.dst for e in out]} from {[e.src for e in into]} ({where})"

        def post(at: FakeStream) -> None:
            for end in (*out, *into):
                end.posted, end.clock, end.at = True, dict(at.clock), at.now
                world.access(at, end.data, write=end.src != self.rank, what=what)

        def ready() -> bool:
            if self.rank in board.aborted:
                return True
            sent = all(end.eager or (end.partner is not None and end.partner.posted) for end in out)
            return sent and all(end.partner is not None and end.partner.posted for end in into)

        def complete(at: FakeStream) -> None:
            for end in (*out, *into):
                world.access(at, end.data, write=end.src != self.rank, what=what)
            if self.rank in board.aborted:
                return
            for end in out:
                if end.bytes_ is None:
                    end.bytes_ = end.data.clone()
            for end in into:
                send = end.partner
                assert send is not None
                if send.bytes_ is None:
                    send.bytes_ = send.data.clone()
                end.data.copy_(send.bytes_.view(end.data.dtype).view(end.data.shape))
                _merge(at.clock, send.clock)
                at.now = max(at.now, send.at)
            at.now += world.cost(at, "exchange", max(end.data.nbytes for end in (*out, *into)))

        device._enqueue(stream, _Op(f"post {what}", post))
        device._enqueue(stream, _Op(f"complete {what}", complete, ready))
        return FakeExchanged(device, device.record(stream))

    def abort(self) -> None:
        with self.board.world.changed:
            self.board.world.released = True
            self.board.aborted.add(self.rank)
            self.board.world.changed.notify_all()

    def close(self) -> None:
        self.closed = True
