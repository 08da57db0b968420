"""Byte buffers that are used again and again: window slots, own partials, scratch.

Fresh large allocations are mapped and unmapped by the C library each time, and every page of them faults again; a pool of
the few sizes that a model has costs neither.
"""

from __future__ import annotations

from collections import defaultdict

import torch


class BufferPool:
    """Free uint8 buffers by size, on one device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> torch.Tensor:
        free = self._free[nbytes]
        if free:
            return free.pop()
        with torch.inference_mode(False):  # else a buffer from an evaluation could not be written to in training
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """The caller promises that nothing reads or writes the buffer any more."""
        self._free[buffer.numel()].append(buffer)

    def clear(self) -> None:
        self._free.clear()
