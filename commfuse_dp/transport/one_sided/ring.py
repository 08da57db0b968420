"""The allocator of one inbox: a byte ring whose free space is managed by the sender."""

from __future__ import annotations

_RESERVED, _SENT, _FREED = range(3)

ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ring:
    """Places of messages in a ring of `capacity` bytes (a multiple of 64).

    The owner of the memory never looks into this: the sender chooses the offsets and the owner only gives them back
    (a credit), as with writes by RDMA. Places may be freed in any order; space is taken back in the order in which it
    was given out, so that what is free is always one stretch. A message never wraps: if it does not fit behind the head
    it goes to the start, and the gap is taken back with it. An empty ring starts at 0 again, so that a message of the
    whole capacity always fits once everything is freed.
    """

    __slots__ = ("_head", "_live", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < ALIGNMENT or capacity % ALIGNMENT:
            raise ValueError(f"ring capacity {capacity}: a positive multiple of {ALIGNMENT} is needed")
        self.capacity = capacity
        self._head = 0
        self._live: dict[int, int] = {}  # offset -> _RESERVED, _SENT or _FREED, oldest first

    def reserve(self, nbytes: int) -> int | None:
        """Offset of a 64-byte aligned place for nbytes, or None if there is no room now."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT  # an empty message still needs an identity
        head = self._head
        if not self._live:
            head = 0
            if size > self.capacity:
                return None
        else:
            tail = next(iter(self._live))
            if head > tail:
                if self.capacity - head < size:
                    if tail < size:
                        return None
                    head = 0
            elif tail - head < size:
                return None
        self._head = head + size
        self._live[head] = _RESERVED
        return head

    def send(self, offset: int) -> bool:
        """Mark the place at `offset` as sent. False if it was not reserved, or was sent before."""
        if self._live.get(offset) != _RESERVED:
            return False
        self._live[offset] = _SENT
        return True

    def reset(self) -> None:
        """Nothing is in the ring, whatever was reserved or sent: both ends have agreed on it."""
        self._live.clear()
        self._head = 0

    @property
    def live(self) -> int:
        """Places that are reserved, or sent and not given back."""
        return len(self._live)

    def free(self, offset: int) -> None:
        """Take back the place at `offset`. Raises KeyError if no message sent from there is in flight."""
        live = self._live
        if live.get(offset) != _SENT:
            raise KeyError(offset)
        live[offset] = _FREED
        while live:
            oldest = next(iter(live))
            if live[oldest] != _FREED:
                break
            del live[oldest]
