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


class Message(NamedTuple):
    """Where a message lies, and how its arrival is told."""

    number: int
    offset: int
    behind: int  # the latest earlier message that must have been released before this one is written; 0: none
    word: int  # index of the arrival word
    value: int
    before: int  # what the word holds until the message comes


class Messages(Lane):
    """Messages of one ring in their order. Both ends work them out alike."""

    def __init__(self, capacity: int) -> None:
        self.places = PlaceRing(capacity, ARRIVAL_WORDS)
        self._last = [0] * ARRIVAL_WORDS  # fingerprints

    def clone(self) -> Self:
        other = type(self)(self.places.capacity)
        other.places, other._last = self.places.clone(), self._last.copy()
        return other

    def next(self, tag: Tag, room: int) -> Message:
        """room: bytes that its sender sets aside for it, see `Sending`."""
        number, offset, behind = self.places.place(room)
        word = number % ARRIVAL_WORDS
        before = self._last[word]
        value = zlib.crc32(_IDENTITY.pack(number, *tag, room))
        if value >= 1 << 31:  # as_int32
            value -= 1 << 32
        if value == before:
            value = as_int32(value + 1)
        self._last[word] = value
        return tuple.__new__(Message, (number, offset, behind, word, value, before))


class Outbox(Messages):
    """The sender's side of one inbox ring."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.credited = 0  # the copies enqueued from now on run behind the release of all messages up to this one

    def clone(self) -> Self:
        other = super().clone()
        other.credited = self.credited
        return other


class Inbox(Messages):
    """The owner's side: what is expected, and how far it has been released."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.expected: dict[Tag, tuple[Message, int]] = {}  # or here; with its bytes
        self.received: set[Tag] = set()  # of those: a stream waits for them, or has
        self.released = 0  # all messages up to this number
        self._early: dict[int, Event] = {}  # released before an earlier one: behind the event the bytes are not read

    def clone(self) -> Self:
        other = super().clone()
        other.released = self.released
        other.expected, other.received, other._early = self.expected.copy(), self.received.copy(), self._early.copy()
        return other

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
