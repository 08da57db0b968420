"""Where a rank computes what it sends to its peers: a ring of own memory for each, whose places are used again behind streams.

Rings of peers that have had the same messages are one object (`Lanes`): what is worked out about the next message is worked
out once for all of them.

[Note: Steps begin at the start]
In a program of a steady order every step computes the same partials. So that they also come to lie where they lay, and what
knows an address knows it for good (engine/whole.py), the staging starts anew when an epoch is finished. That is going round
early: the places that are skipped are waited for as any others. Inboxes do not: both ends would have to see it in the same
message, and a sender would wait for room where there is some.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from typing_extensions import Self

from commfuse_dp.device.base import Event, Stream
from commfuse_dp.errors import TransportError
from commfuse_dp.transport.checks import check_message
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, align
from commfuse_dp.transport.streams.core import StreamCore
from commfuse_dp.transport.views import MOST_VIEWS


class Place(NamedTuple):
    number: int  # of the message, from 1
    offset: int  # bytes from the start of the ring
    behind: int  # the latest earlier message that must be gone before this one is written; 0: none


class PlaceRing:
    """Places of messages that are written in the order of their numbers. Deterministic: it is asked at both ends."""

    __slots__ = ("_head", "_live", "_number", "_words", "capacity")

    def __init__(self, capacity: int, words: int = 0) -> None:
        """words: the most messages at a time; 0: as many as there is room for."""
        if capacity < ALIGNMENT or capacity % ALIGNMENT:
            raise ValueError(f"ring capacity {capacity}: a positive multiple of {ALIGNMENT} is needed")
        self.capacity = capacity
        self._words = words or capacity // ALIGNMENT + 1
        self._head = 0
        self._number = 0
        self._live: deque[tuple[int, int, int]] = deque()  # number, first byte, end; oldest first, which is ring order

    def place(self, nbytes: int) -> Place:
        """The next message's place. nbytes <= capacity. A message never wraps."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT  # as `align`, which would be a frame for each message
        assert size <= self.capacity
        self._number = number = self._number + 1
        behind = number - self._words if number > self._words else 0
        start = self._head
        if start + size > self.capacity:
            behind = max(behind, self._take(start, self.capacity))  # lost, but whoever lies there comes first in the ring
            start = 0
        stop = self._head = start + size
        live = self._live
        while live and live[0][1] < stop and start < live[0][2]:  # as `_take`, which would be a frame, too
            behind = max(behind, live.popleft()[0])
        live.append((number, start, stop))
        return tuple.__new__(Place, (number, start, behind))

    def clone(self) -> PlaceRing:
        other = PlaceRing(self.capacity, self._words)
        other._head, other._number, other._live = self._head, self._number, self._live.copy()
        return other

    def rewind(self) -> None:
        """The next message goes to the start of the ring, as if it did not fit into the rest.

        It lies where a message lies that came after all in the rest, so it is behind them, too."""
        if self._head:
            self._take(self._head, self.capacity)
            self._head = 0

    def _take(self, start: int, stop: int) -> int:
        """Forget the oldest messages as far as they lie in [start, stop); the number of the last one, or 0."""
        last = 0
        live = self._live
        while live and live[0][1] < stop and start < live[0][2]:
            last = live.popleft()[0]
        return last


class Reservation:
    """A place in the staging ring, from `reserve` to the end of the copy out of it."""

    __slots__ = ("left", "nbytes", "offset", "order")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.left: Event | None = None  # passed when the bytes have left; None: not sent yet
        self.order = 0  # of the sends, which are copied in this order by one stream


class Lane(ABC):
    """What one end knows of its messages with a peer. See `Lanes`."""

    users = 1  # peers whose messages have been alike so far

    @abstractmethod
    def clone(self) -> Self:
        """The same, for some of them."""


Name = TypeVar("Name", bound=Hashable)
Kind = TypeVar("Kind", bound=Lane)


class Lanes(dict[tuple[Name, ...], list[tuple[Kind, tuple[Name, ...]]]]):
    """The lanes of one rank. What a layer sends has the same size for every owner, and what it awaits comes from all peers
    alike: lanes that have had the same messages are one object, so that what is worked out about the next message is worked out
    once for all of them. A message of some of them only makes these go on with a lane of their own.

    lanes[names] are the lanes of peers that are to have the same message, each with their names. Asking makes it so: peers that
    are to go on without the others get their lane here. An answer is kept until a lane is split, and costs no call until then.

    Attributes:
        of: the lane of each name.
    """

    def __init__(self, alike: Sequence[Name], make: Callable[[], Kind]) -> None:
        """alike: names, which begin with one lane."""
        super().__init__()
        self.of: dict[Name, Kind] = {}
        if alike:
            lane = make()
            lane.users = len(alike)
            self.of.update(dict.fromkeys(alike, lane))

    def alone(self, name: Name) -> Kind:
        """The lane of one peer, which is to have a message that others do not have."""
        lane = self.of[name]
        return lane if lane.users == 1 else self._split(lane, (name,))

    def __missing__(self, names: tuple[Name, ...]) -> list[tuple[Kind, tuple[Name, ...]]]:
        members: dict[int, list[Name]] = {}
        for name in names:
            members.setdefault(id(self.of[name]), []).append(name)
        found = []
        for some in members.values():
            lane = self.of[some[0]]
            found.append((lane if len(some) == lane.users else self._split(lane, some), tuple(some)))
        if len(self) >= MOST_VIEWS:
            self.clear()
        self[names] = found
        return found

    def _split(self, lane: Kind, names: Sequence[Name]) -> Kind:
        self.clear()
        own = lane.clone()
        own.users = len(names)
        lane.users -= len(names)
        self.of.update(dict.fromkeys(names, own))
        return own


class StagingRing(Lane):
    """Where a rank computes what it sends to one peer. Places are used again in the order in which they were given out."""

    def __init__(self, capacity: int, called: Callable[[int], int] = int) -> None:
        """called: what a rank is called in errors."""
        self._places, self._called = PlaceRing(capacity), called
        self._live: dict[int, Reservation] = {}  # number -> reservation, oldest first
        self._open: dict[int, Reservation] = {}  # offset -> reserved, not sent
        self._number = 0
        self._sends = 0

    def clone(self) -> StagingRing:
        other = StagingRing(self._places.capacity, self._called)
        other._places, other._number, other._sends = self._places.clone(), self._number, self._sends
        for number, reservation in self._live.items():
            kept = other._live[number] = Reservation(reservation.offset, reservation.nbytes)
            kept.left, kept.order = reservation.left, reservation.order
            if self._open.get(reservation.offset) is reservation:
                other._open[reservation.offset] = kept
        return other

    def reserve(self, nbytes: int, dsts: Sequence[int] = ()) -> tuple[Reservation, Event | None]:
        """A place, and what its writer must be ordered behind. dsts: who gets the message, for errors."""
        offset, behind = self._places.place(nbytes)[1:]
        latest: Reservation | None = None
        while self._live and (number := next(iter(self._live))) <= behind:  # they are in order
            earlier = self._live.pop(number)
            if earlier.left is None:
                who = " and ".join(f"rank {self._called(dst)}" for dst in dsts)
                raise TransportError(
                    f"{self._places.capacity} bytes are too few for what is reserved for {who} and not sent: the "
                    f"place of {nbytes} bytes would overwrite {earlier.nbytes} of them. Send before reserving more, or raise "
                    "inbox_bytes."
                )
            if latest is None or earlier.order > latest.order:
                latest = earlier
        self._number += 1
        reservation = Reservation(offset, nbytes)
        self._live[self._number] = self._open[offset] = reservation
        return reservation, latest.left if latest is not None else None

    def rewind(self) -> None:
        """As in PlaceRing; not while something that is reserved has not been sent."""
        if not self._open:
            self._places.rewind()

    def find(self, offset: int, nbytes: int) -> Reservation | None:
        """The open reservation that starts at `offset` and has room for nbytes."""
        reservation = self._open.get(offset)
        return reservation if reservation is not None and nbytes <= reservation.nbytes else None

    def sent(self, reservation: Reservation, left: Event) -> None:
        self._sends += 1
        reservation.left, reservation.order = left, self._sends
        del self._open[reservation.offset]


class Staging:
    """The rings of one rank, out of which the stream "scatter" copies.

    memory: of each peer's ring, zeroed behind what is in the current stream. limit: bytes of the largest message."""

    def __init__(self, core: StreamCore, memory: Mapping[int, torch.Tensor], limit: int) -> None:
        self._core, self._limit = core, limit
        self.memory = dict(memory)
        device = core.device
        device.wait_event(device.side_stream("scatter"), device.record(device.current_stream()))
        self.rings = Lanes(core.peers, lambda: StagingRing(align(limit), core.membership.called))
        self.addresses = {peer: ring.data_ptr() for peer, ring in self.memory.items()}
        self._views: dict[Hashable, list[torch.Tensor]] = {}  # of messages that are reserved together: places come again
        self._behind: tuple[Stream, Event] | None = None  # the last wait for something to leave

    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int) -> list[torch.Tensor]:
        """sizes: bytes, of which every message gets `room` in the ring of its peer; 0: of the largest."""
        core = self._core
        stream = core.enter()
        room = room or max(sizes, default=0)
        for dst, nbytes in zip(dsts, sizes, strict=True):
            if dst not in self.memory:
                core.check_peer(dst)
            if not 0 <= nbytes <= room <= self._limit:
                check_message(max(nbytes, room) if nbytes >= 0 else nbytes, self._limit, f"to rank {dst}")
        places: list[tuple[tuple[int, ...], int]] = []  # peers, and where in the rings of all of them
        for ring, members in self.rings[tuple(dsts)]:
            reservation, behind = ring.reserve(room, members)
            if behind is not None and (self._behind is None or self._behind[0] != stream or self._behind[1] is not behind):
                self._behind = stream, behind
                if core.probe.timing is not None and core.probe.timing.layer:
                    core.probe.waited(core.probe.timing.layer, core.probe.mark(), (behind,))
                core.device.wait_event(stream, behind)
            places.append((members, reservation.offset))
        name = *dsts, *sizes, *places
        found = self._views.get(name)
        if found is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            offsets = {dst: offset for members, offset in places for dst in members}
            wanted = zip(dsts, sizes, strict=True)
            found = self._views[name] = [self.memory[dst].narrow(0, offsets[dst], nbytes) for dst, nbytes in wanted]
        return found.copy()

    def rewind(self) -> None:
        """An epoch is over: see [Note: Steps begin at the start]."""
        for ring in {id(ring): ring for ring in self.rings.of.values()}.values():
            ring.rewind()

    def clear(self) -> None:
        """Let go of all memory."""
        self.memory.clear()
        self._views.clear()
