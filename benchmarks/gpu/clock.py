"""Times on a GPU: events, a cold L2 cache, variants that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 << 20  # several times any L2 cache


class GpuClock:
    """Times calls on the current stream. Random data is the caller's business: zeros make a GPU clock higher."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def one(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Events around one call behind a flush of the L2 cache; the host does not wait."""
        self._flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        return start, stop

    def rounds(self, calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
        """Milliseconds of each call in each round. The calls take turns, so that a change of the clocks hits all alike."""
        for _ in range(warm_up):
            for call in calls.values():
                call()
        names = list(calls)
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
        for turn in range(rounds):
            for i in range(len(names)):
                name = names[(i + turn) % len(names)]
                marks[name].append(self.one(calls[name]))
        torch.cuda.synchronize(self.device)
        return {name: [start.elapsed_time(stop) for start, stop in pairs] for name, pairs in marks.items()}


def host_microseconds(call: Callable[[], object], calls: int) -> list[float]:
    """What each of so many calls takes the host, behind one that may compile; the device is idle when the first begins."""
    call()
    torch.cuda.synchronize()
    spent = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return spent


def copy_bandwidth(clock: GpuClock, nbytes: int = 1 << 30, rounds: int = 9) -> float:
    """Bytes per millisecond of a copy inside the device's memory, reads and writes counted."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=clock.device).random_()
    target = torch.empty_like(source)
    times = clock.rounds({"copy": lambda: target.copy_(source)}, rounds)["copy"]
    return 2 * nbytes / statistics.median(times)


def host_link_bandwidth(clock: GpuClock, nbytes: int = 64 << 20, rounds: int = 5) -> dict[str, float]:
    """Bytes per millisecond of a copy engine from ("in") and to ("out") pinned memory of the host."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=clock.device)
    times = clock.rounds(
        {"in": lambda: device.copy_(host, non_blocking=True), "out": lambda: host.copy_(device, non_blocking=True)}, rounds
    )
    return {name: nbytes / statistics.median(values) for name, values in times.items()}
