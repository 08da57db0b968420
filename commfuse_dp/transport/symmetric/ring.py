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

[Note: Words are used again]
A ring has `ARRIVAL_WORDS` arrival words, taken in turn. The sender writes that of message n only when the owner has released
message n - ARRIVAL_WORDS, and so has seen it. Two fingerprints that follow each other in a word are never equal.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from typing_extensions import Self

from commfuse_dp.device.base import Event, as_int32
from commfuse_dp.transport.base import Tag
from commfuse_dp.transport.streams.staging import Lane, PlaceRing

ARRIVAL_WORDS = 256  # per pair and channel: the most messages that can be under way there

_IDENTITY = struct.Struct("<q4qq")


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


class Outbox(Lane):
    """The sender's side of one inbox ring."""

    def __init__(self, capacity: int) -> None:
        self.places = PlaceRing(capacity, ARRIVAL_WORDS)
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
        self.places = PlaceRing(capacity, ARRIVAL_WORDS)
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
