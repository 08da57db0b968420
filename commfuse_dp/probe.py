"""The measuring points that transports, engine and ops write to.

Counters are always on (integer additions only). Spans are recorded only while a sink is attached; `commfuse_dp.observe`
owns the sinks, so that the lower rooms need not know how a trace or a picture is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

now_ns: Callable[[], int] = time.monotonic_ns  # CLOCK_MONOTONIC: one clock for all processes of a host

# Lanes of a rank in traces and timelines.
COMPUTE, SEND, RECEIVE, WAIT = "compute", "send", "receive", "wait"


@dataclass
class Counters:
    """Totals since the probe was made. Times in nanoseconds, sizes in bytes; bytes are counted by the transport, at the end
    where they are handed over (parameters read in place count when they are read)."""

    exposed_ns: int = 0  # compute was blocked on a transfer
    param_bytes_received: int = 0  # parameter slices of other ranks, read in place or copied
    param_bytes_sent: int = 0
    grad_bytes_received: int = 0
    grad_bytes_sent: int = 0
    waits: int = 0  # waits that really blocked
    order_misses: int = 0  # a layer came in another order than recorded
    window_bytes: int = 0  # unsharded parameter bytes held now
    window_bytes_peak: int = 0

    def snapshot(self) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) for f in fields(self)})

    def since(self, earlier: Counters) -> Counters:
        """Difference to an earlier snapshot; the peak is kept as it is."""
        out = Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
        out.window_bytes, out.window_bytes_peak = self.window_bytes, self.window_bytes_peak
        return out


SpanSink = Callable[[str, str, int, int, "dict[str, object]"], None]  # lane, name, start_ns, end_ns, arguments


class Probe:
    """One per engine (and its transport). `sink` is None while spans are off: test it before building arguments."""

    __slots__ = ("counters", "exposed_by_layer", "sink")
    made: ClassVar[int] = 0  # in this process: whatever uses CommFuse makes one

    def __init__(self) -> None:
        Probe.made += 1
        self.counters = Counters()
        self.exposed_by_layer: dict[str, int] = {}
        self.sink: SpanSink | None = None

    def exposed(self, layer: str, start_ns: int, end_ns: int) -> None:
        """Compute of `layer` was blocked on a transfer from start_ns to end_ns (monotonic clock)."""
        spent = end_ns - start_ns
        self.counters.exposed_ns += spent
        self.counters.waits += 1
        self.exposed_by_layer[layer] = self.exposed_by_layer.get(layer, 0) + spent
        if self.sink is not None:
            self.sink(WAIT, layer, start_ns, end_ns, {})

    def span(self, lane: str, name: str, start_ns: int, end_ns: int, **arguments: object) -> None:
        if self.sink is not None:
            self.sink(lane, name, start_ns, end_ns, arguments)
