"""The measuring points that transports, engine and ops write to.

Counters are always on (integer additions only). Spans are recorded only while a sink is attached; `commfuse_dp.observe`
owns the sinks, so that the lower rooms need not know how a trace or a picture is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from commfuse_dp.device.base import Event
    from commfuse_dp.device.timing import EventTimer

now_ns: Callable[[], int] = time.monotonic_ns  # CLOCK_MONOTONIC: one clock for all processes of a host

# Lanes of a rank in traces and timelines.
COMPUTE, SEND, RECEIVE, WAIT = "compute", "send", "receive", "wait"


@dataclass
class Counters:
    """Totals since the probe was made. Times in nanoseconds, sizes in bytes; bytes are counted by the transport, at the end
    where they are handed over (parameters read in place count when they are read)."""

    exposed_ns: int = 0  # compute was blocked on a transfer
    exposed_bound_ns: int = 0  # the part of exposed_ns that is an upper bound: kernels that wait inside themselves
    param_bytes_received: int = 0  # parameter slices of other ranks, read in place or copied
    param_bytes_sent: int = 0
    grad_bytes_received: int = 0
    grad_bytes_sent: int = 0
    waits: int = 0  # waits that really blocked
    order_misses: int = 0  # a layer came in another order than recorded
    bound: int = 0  # backward passes of layers whose program was bound anew: see engine/bound.py
    replayed: int = 0  # those that had been bound before
    window_bytes: int = 0  # unsharded parameter bytes of other ranks that are here now
    window_bytes_peak: int = 0  # the most memory that was held for them, with what was kept for later ones

    def snapshot(self) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) for f in fields(self)})

    def since(self, earlier: Counters) -> Counters:
        """Difference to an earlier snapshot; the peak is kept as it is."""
        out = Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
        out.window_bytes, out.window_bytes_peak = self.window_bytes, self.window_bytes_peak
        return out


SpanSink = Callable[[str, str, int, int, "dict[str, object]"], None]  # lane, name, start_ns, end_ns, arguments


class Probe:
    """One per engine (and its transport). `sink` is None while spans are off: test it before building arguments.

    On a device waits are measured by events (`timing`), and only while somebody watches: a StepMeter inside a step, an attached
    SpanRecorder. They are in the counters after `settle`. `timing` is None at all other times, and on a host always."""

    __slots__ = ("_timer", "_watchers", "across", "bound_for", "counters", "exposed_by_layer", "sink", "step_end", "timing")
    made: ClassVar[int] = 0  # in this process: whatever uses CommFuse makes one

    def __init__(self) -> None:
        Probe.made += 1
        self.counters = Counters()
        self.across: Counters | None = None  # what crossed hosts, where `counters` counts what moved inside them
        self.exposed_by_layer: dict[str, int] = {}
        self.step_end: tuple[int, int] | None = None  # see `ended`; of the last backward
        self.bound_for: dict[str, int] = {}  # reason -> programs that were bound anew for it
        self.sink: SpanSink | None = None
        self.timing: EventTimer | None = None
        self._timer: EventTimer | None = None
        self._watchers = 0

    # ---- what only events can measure --------------------------------------------------------------------------------
    def measure_by(self, timer: EventTimer) -> None:
        """Of a stream-ordered transport."""
        self._timer = timer
        if self._watchers:
            timer.begin()
            self.timing = timer

    def watch(self) -> None:
        """Measure from now on, until as many calls of `unwatch`. On a device the first one waits for what was enqueued."""
        self._watchers += 1
        if self._watchers == 1 and self._timer is not None:
            self._timer.begin()
            self.timing = self._timer

    def unwatch(self) -> None:
        """What was measured since the last `settle` is lost."""
        self._watchers -= 1
        if self._watchers == 0:
            self.timing = None

    def settle(self) -> None:
        """Wait for the device, and count what it was measured to wait. Does nothing on a host, or while nobody watches."""
        if self.timing is not None:
            self.timing.settle()

    def mark(self) -> Event | None:
        """A mark in the current stream of a device that is watched; else None, which the methods below pass over."""
        return self.timing.mark() if self.timing is not None else None

    def waited(self, layer: str, start: Event | None, until: Sequence[Event | None] = ()) -> None:
        """See EventTimer.waited; so for the others."""
        if self.timing is not None and start is not None:
            self.timing.waited(layer, start, until)

    def tail(self, layer: str, start: Event | None) -> None:
        if self.timing is not None and start is not None:
            self.timing.tail(layer, start)

    def joined(self) -> None:
        if self.timing is not None:
            self.timing.joined()

    # ---- measuring points --------------------------------------------------------------------------------------------
    def exposed(self, layer: str, start_ns: int, end_ns: int) -> None:
        """Compute of `layer` was blocked on a transfer from start_ns to end_ns (monotonic clock)."""
        spent = end_ns - start_ns
        self.counters.exposed_ns += spent
        self.counters.waits += 1
        self.exposed_by_layer[layer] = self.exposed_by_layer.get(layer, 0) + spent
        if self.sink is not None:
            self.sink(WAIT, layer, start_ns, end_ns, {})

    def exposed_at_most(self, layer: str, start_ns: int, end_ns: int) -> None:
        """As `exposed`, where only an upper bound is known."""
        self.exposed(layer, start_ns, end_ns)
        self.counters.exposed_bound_ns += end_ns - start_ns

    def ended(self, start_ns: int, end_ns: int) -> None:
        """This rank had computed a backward at start_ns and had its gradients at end_ns. Host only: see observe/skew.py."""
        self.step_end = (start_ns, end_ns)

    def bound(self, reason: str) -> None:
        """The program of a layer's backward was bound anew."""
        self.counters.bound += 1
        self.bound_for[reason] = self.bound_for.get(reason, 0) + 1

    def span(self, lane: str, name: str, start_ns: int, end_ns: int, **arguments: object) -> None:
        if self.sink is not None:
            self.sink(lane, name, start_ns, end_ns, arguments)

    def span_since(self, lane: str, name: str, start_ns: int, mark: Event | None, **arguments: object) -> None:
        """From start_ns to now; where there is a mark (`mark`), from there to what the current stream has been given so far."""
        if self.timing is not None and mark is not None:
            self.timing.span(lane, name, mark, None, arguments)
        elif self.sink is not None:
            self.sink(lane, name, start_ns, now_ns(), arguments)
