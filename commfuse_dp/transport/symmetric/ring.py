"""Where messages lie in rings of symmetric memory: computed alike by sender and owner, so that nothing about it is told.

    sender     staging (its own memory)     reserve: a place; the current stream waits until its last message has left
                    |  copy, stream "scatter", behind a wait for credit
    owner      inbox ring of (sender, channel)     place and arrival word follow from the number and size of the message
                    |  the reader's stream waits until the arrival word is there
    sender     credit word of (owner, channel)     all messages up to this number have been read

[Note: Mirrored rings]
Messages of one pair and channel are numbered from 1 in the order of `send` at the one end and of `expect` at the other.
`PlaceRing` gives each number the same place at both ends. A message of another size, or another message, would be looked for in
the wrong place: so its arrival word is a fingerprint of number, tag and size (`room`), for which the owner waits exactly. Ranks
that run in different orders get stuck, are found by the watchdog, and never read each other's bytes as something that they
are not.

[Note: Steps begin at the start]
In a program of a steady order every step computes the same partials. So that they also come to lie where they lay, and what
knows an address knows it for good (engine/whole.py), the staging starts anew when an epoch is finished. That is going round
early: the places that are skipped are waited for as any others. Inboxes do not: both ends would have to see it in the same
message, and a sender would wait for room where there is some.

[Note: Words are used again]
A ring has `ARRIVAL_WORDS` arrival words, taken in turn. The sender writes that of message n only when the owner has released
message n - ARRIVAL_WORDS, and so has seen it. Two fingerprints that follow each other in a word are never equal.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from typing_extensions import Self

from commfuse_dp.device.base import Event, as_int32
from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import Tag
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, align

ARRIVAL_WORDS = 256  # per pair and channel: the most messages that can be under way there

_IDENTITY = struct.Struct("<q4qq")


class Place(NamedTuple):
    number: int  # of the message, from 1
    offset: int  # bytes from the start of the ring
    behind: int  # the latest earlier message that must be gone before this one is written; 0: none


class PlaceRing:
    """Places of messages that are written in the order of their numbers. Deterministic: it is asked at both ends."""

    __slots__ = ("_head", "_live", "_number", "_words", "capacity")

    def __init__(self, capacity: int, words: int = ARRIVAL_WORDS) -> None:
        if capacity < ALIGNMENT or capacity % ALIGNMENT:
            raise ValueError(f"ring capacity {capacity}: a positive multiple of {ALIGNMENT} is needed")
        self.capacity = capacity
        self._words = words
        self._head = 0
        self._number = 0
        self._live: deque[tuple[int, int, int]] = deque()  # number, first byte, end; oldest first, which is ring order

    def place(self, nbytes: int) -> Place:
        """The next message's place. nbytes <= capacity. A message never wraps."""
        size = align(nbytes) or ALIGNMENT
        assert size <= self.capacity
        self._number = number = self._number + 1
        behind = max(0, number - self._words)
        start = self._head
        if start + size > self.capacity:
            behind = max(behind, self._take(start, self.capacity))  # lost, but whoever lies there comes first in the ring
            start = 0
        stop = self._head = start + size
        live = self._live
        while live and live[0][1] < stop and start < live[0][2]:  # as `_take`, which would be a frame for each message
            behind = max(behind, live.popleft()[0])
        live.append((number, start, stop))
        return Place(number, start, behind)

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


class Fingerprints:
    """Arrival words of one ring, in the order of their messages. Both ends compute them alike."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = [0] * ARRIVAL_WORDS

    def clone(self) -> Fingerprints:
        other = Fingerprints()
        other._last = self._last.copy()
        return other

    def next(self, number: int, tag: Tag, nbytes: int) -> tuple[int, int, int]:
        """(index of the word, its value, the value that it has before) for a message."""
        index = number % ARRIVAL_WORDS
        before = self._last[index]
        value = zlib.crc32(_IDENTITY.pack(number, *tag, nbytes))
        if value >= 1 << 31:  # as_int32
            value -= 1 << 32
        if value == before:
            value = as_int32(value + 1)
        self._last[index] = value
        return index, value, before


class Reservation:
    """A place in the staging ring, from `reserve` to the end of the copy out of it."""

    __slots__ = ("left", "nbytes", "offset", "order")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.left: Event | None = None  # passed when the bytes have left; None: not sent yet
        self.order = 0  # of the sends, which are copied in this order by one stream


class Lane:
    """What one end knows of its messages with a peer. See `Lanes`."""

    users = 1  # peers whose messages have been alike so far

    def clone(self) -> Self:
        """The same, for some of them."""
        raise NotImplementedError


Name = TypeVar("Name", bound=Hashable)
Kind = TypeVar("Kind", bound=Lane)


class Lanes(dict[Name, Kind]):
    """The lanes of one rank, by name. What a layer sends has the same size for every owner, and what it awaits comes from all
    peers alike: lanes that have had the same messages are one object, so that what is worked out about the next message is
    worked out once for all of them. A message of some of them only makes these go on with a lane of their own."""

    def __init__(self, alike: Sequence[Sequence[Name]], make: Callable[[], Kind]) -> None:
        """alike: names that begin with one lane."""
        super().__init__()
        for names in alike:
            lane = make()
            lane.users = len(names)
            self.update(dict.fromkeys(names, lane))

    def alone(self, name: Name) -> Kind:
        """The lane of one peer, which is to have a message that others do not have."""
        lane = self[name]
        return lane if lane.users == 1 else self._split(lane, (name,))

    def together(self, names: Sequence[Name]) -> list[tuple[Kind, list[Name]]]:
        """The lanes of peers that are to have the same message, each with their names."""
        if names and self[names[0]].users == len(names):
            lane = self[names[0]]
            for name in names:
                if self[name] is not lane:
                    break
            else:  # all of them, as ever
                return [(lane, list(names))]
        found: dict[int, tuple[Kind, list[Name]]] = {}
        for name in names:
            lane = self[name]
            known = found.get(id(lane))
            if known is None:
                found[id(lane)] = lane, [name]
            else:
                known[1].append(name)
        return [
            (lane if len(members) == lane.users else self._split(lane, members), members) for lane, members in found.values()
        ]

    def _split(self, lane: Kind, names: Sequence[Name]) -> Kind:
        own = lane.clone()
        own.users = len(names)
        lane.users -= len(names)
        self.update(dict.fromkeys(names, own))
        return own


class StagingRing(Lane):
    """Where a rank computes what it sends to one peer. Places are used again in the order in which they were given out."""

    def __init__(self, capacity: int, dst: int | None = None) -> None:
        """dst: for errors."""
        self._places = PlaceRing(capacity, words=capacity // ALIGNMENT + 1)
        self._live: dict[int, Reservation] = {}  # number -> reservation, oldest first
        self._open: dict[int, Reservation] = {}  # offset -> reserved, not sent
        self._dst = dst
        self._number = 0
        self._sends = 0

    def clone(self) -> StagingRing:
        other = StagingRing(self._places.capacity, self._dst)
        other._places, other._number, other._sends = self._places.clone(), self._number, self._sends
        for number, reservation in self._live.items():
            kept = other._live[number] = Reservation(reservation.offset, reservation.nbytes)
            kept.left, kept.order = reservation.left, reservation.order
            if self._open.get(reservation.offset) is reservation:
                other._open[reservation.offset] = kept
        return other

    def reserve(self, nbytes: int) -> tuple[Reservation, Event | None]:
        """A place, and what its writer must be ordered behind."""
        offset, behind = self._places.place(nbytes)[1:]
        latest: Reservation | None = None
        while self._live and (number := next(iter(self._live))) <= behind:  # they are in order
            earlier = self._live.pop(number)
            if earlier.left is None:
                who = "a peer" if self._dst is None else f"rank {self._dst}"
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


class Outbox(Lane):
    """The sender's side of one inbox ring."""

    def __init__(self, capacity: int) -> None:
        self.places = PlaceRing(capacity)
        self.fingerprints = Fingerprints()
        self.credited = 0  # the copies enqueued from now on run behind the release of all messages up to this one

    def clone(self) -> Self:
        other = type(self)(self.places.capacity)
        other.places, other.fingerprints, other.credited = self.places.clone(), self.fingerprints.clone(), self.credited
        return other


class Arrival(NamedTuple):
    """A message that is expected, or here."""

    number: int
    offset: int
    nbytes: int
    word: int
    value: int
    before: int  # what the word holds until the message comes


class Inbox(Lane):
    """The owner's side: what is expected, and how far it has been released."""

    def __init__(self, capacity: int) -> None:
        self.places = PlaceRing(capacity)
        self.fingerprints = Fingerprints()
        self.expected: dict[Tag, Arrival] = {}
        self.received: set[Tag] = set()  # of those: a stream waits for them, or has
        self.released = 0  # all messages up to this number
        self._early: dict[int, Event] = {}  # released before an earlier one: behind the event the bytes are not read

    def clone(self) -> Inbox:
        other = Inbox(self.places.capacity)
        other.places, other.fingerprints, other.released = self.places.clone(), self.fingerprints.clone(), self.released
        other.expected, other.received, other._early = self.expected.copy(), self.received.copy(), self._early.copy()
        return other

    def expect(self, tag: Tag, nbytes: int, room: int) -> None:
        """room: bytes that its sender sets aside for it, see `Sending`."""
        place = self.places.place(room)
        word, value, before = self.fingerprints.next(place.number, tag, room)
        self.expected[tag] = Arrival(place.number, place.offset, nbytes, word, value, before)

    def release_early(self, number: int, event: Event) -> None:
        """While an earlier message is still held."""
        self._early[number] = event

    def release(self, number: int) -> tuple[int, list[Event]]:
        """The message after the last: (the credit to give, what the giver must be ordered behind)."""
        assert number == self.released + 1
        self.released, events = number, []
        while (event := self._early.pop(self.released + 1, None)) is not None:
            self.released += 1
            events.append(event)
        return self.released, events
