"""How a block of steps is timed: by the host's clock on the CPU, by events on a GPU. The GPU part is not yet run on a GPU.

[Note: When the host waits for the GPU]
    host   | synchronize, meet |record| step step step ... (enqueues) |record|  wait for the second event
    device |       idle        |  e0  |   step   step   step ...         e1  |
The device is idle when e0 is recorded, so the time between the events holds everything that the steps need, a host that is too
slow included; nothing waits in between. At e1 the current stream has waited for all side streams: the optimizer's step
needs every gradient.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Reading:
    wall_s: float
    host_s: float | None = None  # until the host had enqueued everything
    peak_bytes: int | None = None  # allocated above what was at the start, by torch's allocator


class Clock(Protocol):
    def settle(self) -> None:
        """Wait until the device has nothing to do."""

    def start(self) -> None: ...

    def stop(self) -> Reading: ...


class HostClock:
    """Everything runs on the calling thread."""

    def settle(self) -> None:
        pass

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> Reading:
        return Reading(time.perf_counter() - self._start)


class CudaClock:
    """Events on the current stream of the current device. `cuda`: torch.cuda."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def settle(self) -> None:
        self._cuda.synchronize()

    def start(self) -> None:
        cuda = self._cuda
        cuda.reset_peak_memory_stats()
        self._allocated = cuda.memory_allocated()
        self._begin, self._end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        self._host = time.perf_counter()
        self._begin.record()

    def stop(self) -> Reading:
        self._end.record()
        host_s = time.perf_counter() - self._host
        self._end.synchronize()
        self._cuda.synchronize()
        wall_s = self._begin.elapsed_time(self._end) / 1e3
        return Reading(wall_s, host_s, self._cuda.max_memory_allocated() - self._allocated)


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else HostClock()


@dataclass(frozen=True)
class Footprint:
    """Device memory in use: by torch's allocator, and beside it (symmetric memory, NCCL, the context; other processes, too)."""

    allocated: int
    beside: int

    @classmethod
    def now(cls, cuda: Any = torch.cuda) -> Footprint:
        cuda.synchronize()
        free, total = cuda.mem_get_info()
        return cls(cuda.memory_allocated(), total - free - cuda.memory_reserved())

    def since(self, before: Footprint) -> dict[str, int]:
        return {"allocated_bytes": self.allocated - before.allocated, "beside_bytes": self.beside - before.beside}
