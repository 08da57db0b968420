"""Byte buffers that are used again and again: window slots, own partials, scratch.

Fresh large allocations are mapped and unmapped by the C library each time, and every page of them faults again; a pool of
the sizes that a model has costs neither. What is kept for later is bounded: sizes that were not used for longest go first. On a
device a buffer comes back with the event after which it is free: the host
is far ahead of the streams, and what it gives back is still being read.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque

import torch

from commfuse_dp.device.base import Event
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.probe import Probe


class BufferPool:
    """Free uint8 buffers by size, on one device. Not thread-safe.

    limit: bytes in use and free together, above which nothing is kept free; None: no bound.

    Attributes:
        held: bytes in use and free.
        allocations: made so far.
    """

    def __init__(
        self,
        device: torch.device,
        ordering: Ordering | None = None,
        probe: Probe | None = None,
        *,
        limit: int | None = None,
    ) -> None:
        self.device = device
        self.limit = limit
        self.held = 0
        self.allocations = 0
        self._spare = 0  # bytes of `held` that are free
        self._probe = probe
        self._ordering = ordering if ordering is not None else Ordering()
        self.mark = self._ordering.mark  # for `give`: one event for several buffers
        self._free: OrderedDict[int, deque[tuple[torch.Tensor, Event | None]]] = OrderedDict()  # least recently used size first
        self._made: dict[int, int] = defaultdict(int)  # buffers by size, free or not

    def take(self, nbytes: int, *, most: int = 0) -> torch.Tensor:
        """To be written on the current stream.

        most: as many buffers of this size are made before the stream is made to wait for one that is still read."""
        free = self._free.get(nbytes)
        behind = free[0][1] if free else None
        waits = behind is not None and not behind.done()
        if waits and self._made[nbytes] < most:
            waits = False
            self._free.move_to_end(nbytes)
            buffer, event = self._make(nbytes)
        else:
            buffer, event = self.take_later(nbytes)
        timing = self._probe.timing if waits and self._probe is not None else None
        begun = timing.mark() if timing is not None else None
        self._ordering.after(event)
        if timing is not None and begun is not None:
            timing.waited(timing.layer, begun)
        return buffer

    def take_later(self, nbytes: int) -> tuple[torch.Tensor, Event | None]:
        """To be written by whoever waits for the event first.

        On a device the one that was given back first, which is the first to be free; else the last one, still in the cache."""
        free = self._free.get(nbytes)
        if free:
            self._free.move_to_end(nbytes)
            self._spare -= nbytes
            return free.pop() if free[-1][1] is None else free.popleft()
        return self._make(nbytes)

    def reserve(self, nbytes: int) -> None:
        """As Arena.reserve."""
        return

    def _make(self, nbytes: int) -> tuple[torch.Tensor, Event | None]:
        self._made[nbytes] += 1
        self.allocations += 1
        self._trim(nbytes)
        self.held += nbytes
        with torch.inference_mode(False):  # else a buffer from an evaluation could not be written to in training
            # The allocator may hand out what the current stream still reads: `mark` comes after that.
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device), self._ordering.mark()

    def give(self, buffer: torch.Tensor, mark: Event | None = None) -> None:
        """The caller promises that what the current stream has been given so far is the last to read or write the buffer.

        mark: taken behind that, on the same stream."""
        nbytes = buffer.numel()
        free = self._free.get(nbytes)
        if free is None:
            free = self._free[nbytes] = deque()
        self._free.move_to_end(nbytes)
        free.append((buffer, self.mark() if mark is None else mark))
        self._spare += nbytes
        if self.limit is not None and self.held > self.limit:
            self._trim(0)

    def _trim(self, more: int) -> None:
        """Let go of free buffers until there is room for `more` bytes."""
        if self.limit is None:
            return
        while self._spare and self.held + more > self.limit:
            nbytes, free = next(iter(self._free.items()))
            if not free:
                del self._free[nbytes]
                continue
            self._ordering.after(free.popleft()[1])  # the allocator may hand it to the current stream at once
            self._made[nbytes] -= 1
            self._spare -= nbytes
            self.held -= nbytes

    def forget_taken(self) -> None:
        """Nothing that was taken is in use: an exception may have lost some of it."""
        self.held = self._spare
        self._made.clear()
        for nbytes, free in self._free.items():
            self._made[nbytes] = len(free)

    def settle(self) -> None:
        """At the start of a step: give out buffers in the order of the step before, so that in a program of a steady order each
        slice comes to lie where it lay, and whatever holds its address stays right. Of no matter to what is correct."""
        for free in self._free.values():
            if free and free[0][1] is not None:  # on a host the one that is still in the cache is worth more
                free.extend(sorted((free.popleft() for _ in range(len(free))), key=_address))

    def clear(self) -> None:
        self._free.clear()
        self._made.clear()
        self.held = self._spare = 0


def _address(entry: tuple[torch.Tensor, Event | None]) -> int:
    return entry[0].data_ptr()
