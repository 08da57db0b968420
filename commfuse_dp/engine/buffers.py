"""Byte buffers that are used again and again: window slots, own partials, scratch.

Fresh large allocations are mapped and unmapped by the C library each time, and every page of them faults again; a pool of
the few sizes that a model has costs neither. On a device a buffer comes back with the event after which it is free: the host
is far ahead of the streams, and what it gives back is still being read.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from commfuse_dp.device.base import Event
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.probe import Probe


class BufferPool:
    """Free uint8 buffers by size, on one device. Not thread-safe."""

    def __init__(self, device: torch.device, ordering: Ordering | None = None, probe: Probe | None = None) -> None:
        self.device = device
        self._probe = probe
        self._ordering = ordering if ordering is not None else Ordering()
        self._free: dict[int, deque[tuple[torch.Tensor, Event | None]]] = defaultdict(deque)
        self._made: dict[int, int] = defaultdict(int)  # buffers by size, free or not

    def take(self, nbytes: int, *, most: int = 0) -> torch.Tensor:
        """To be written on the current stream.

        most: as many buffers of this size are made before the stream is made to wait for one that is still read."""
        free = self._free[nbytes]
        waits = bool(free) and free[0][1] is not None and not free[0][1].done()
        if waits and self._made[nbytes] < most:
            waits = False
            buffer, event = self._make(nbytes)
        else:
            buffer, event = self.take_later(nbytes)
        timing = self._probe.timing if waits and self._probe is not None else None
        begun = timing.mark() if timing is not None else None
        self._ordering.after(event)
        if timing is not None and begun is not None:
            timing.stood(timing.layer, begun)
        return buffer

    def take_later(self, nbytes: int) -> tuple[torch.Tensor, Event | None]:
        """To be written by whoever waits for the event first.

        On a device the one that was given back first, which is the first to be free; else the last one, still in the cache."""
        free = self._free[nbytes]
        if free:
            return free.pop() if free[-1][1] is None else free.popleft()
        return self._make(nbytes)

    def _make(self, nbytes: int) -> tuple[torch.Tensor, Event | None]:
        self._made[nbytes] += 1
        with torch.inference_mode(False):  # else a buffer from an evaluation could not be written to in training
            # The allocator may hand out what the current stream still reads: `mark` comes after that.
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device), self._ordering.mark()

    def mark(self) -> Event | None:
        """For `give`: one event for several buffers."""
        return self._ordering.mark()

    def give(self, buffer: torch.Tensor, mark: Event | None = None) -> None:
        """The caller promises that what the current stream has been given so far is the last to read or write the buffer.

        mark: taken behind that, on the same stream."""
        self._free[buffer.numel()].append((buffer, self._ordering.mark() if mark is None else mark))

    def settle(self) -> None:
        """At the start of a step: give out buffers in the order of the step before, so that in a program of a steady order each
        slice comes to lie where it lay, and whatever holds its address stays right. Of no matter to what is correct."""
        for free in self._free.values():
            if free and free[0][1] is not None:  # on a host the one that is still in the cache is worth more
                free.extend(sorted((free.popleft() for _ in range(len(free))), key=_address))

    def clear(self) -> None:
        self._free.clear()
        self._made.clear()


def _address(entry: tuple[torch.Tensor, Event | None]) -> int:
    return entry[0].data_ptr()
