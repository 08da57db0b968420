"""How long the device's compute waited for its peers, and when copies ran: by events, read when nobody waits for them any more.

On a device the host cannot see a wait: it enqueues one and goes on. So marks (events that keep the time) are put where work
begins to need something of a peer, and compared with the mark of what it needed:

    waited    compute came to the wait at S, the last of what it needed was there at A          max(0, A - S)
    tail      stream "reduce" waited from B to E for partials, compute came to the join at J    max(0, E - max(B, J))
    kernel    a kernel that waits inside itself ran from S to E, its last slice came at A       at most what is said below

A mark does not occupy a multiprocessor. Comparing with A instead of a second mark on the same stream leaves out how long the
host took between the two calls. Without a watcher (probe.Probe.watch) nothing of this is enqueued.

[Note: Kernels that wait inside themselves]
No event can see such a wait. Two things bound it from above, and the smaller one is reported, as a bound (exposed_bound_ns):
* min(A, E) - S: behind its last slice a kernel waits for nothing. Much too high where a kernel computes while slices arrive.
* (E - S) - T, with T the fastest launch of the same product that found all its slices there when it began. What a launch
  takes beyond that is waiting, or something else that slowed it down (copies that share the memory, clocks). It is known only
  once such a launch was seen; `settle` looks for it among all launches that it reads before it judges any of them.

[Note: When marks are read]
Only in `settle`, which waits (host) until the device has passed all of them: at the end of a metered step, of a recorded step,
when a recorder is detached, or behind a backward if LIMIT marks have piled up. Never inside a forward or backward. Its own last
mark is the origin of the times that follow: it has been passed before any of them is enqueued, so no time is negative, and
differences stay short enough for the 32-bit milliseconds of cudaEventElapsedTime.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from commfuse_dp.device.base import Device, Event, Stream
from commfuse_dp.probe import Probe, now_ns

LEAST_NS = 500  # what CUDA's events resolve: less is no wait
LIMIT = 100_000  # records that are kept before somebody asks


class _Stood(NamedTuple):
    layer: str
    start: Event
    until: tuple[Event, ...]


class _Tail(NamedTuple):
    layer: str
    start: Event
    end: Event
    join: Event


class _Kernel(NamedTuple):
    product: Hashable
    layer: str
    start: Event
    end: Event
    arrivals: tuple[Event, ...]


class _Span(NamedTuple):
    lane: str
    name: str
    start: Event
    end: Event
    arguments: dict[str, object]


class EventTimer:
    """Of one rank. Called by its compute thread."""

    def __init__(self, device: Device, probe: Probe) -> None:
        self._device = device
        self._probe = probe
        self._origin: Event | None = None
        self._origin_ns = 0  # of the host's clock
        self._stood: list[_Stood] = []
        self._tails: list[tuple[str, Event, Event]] = []  # of sums that no join has followed yet
        self._joined: list[_Tail] = []
        self._kernels: list[_Kernel] = []
        self._spans: list[_Span] = []
        self._fastest: dict[Hashable, int] = {}
        self.layer = (
            ""  # what compute is being enqueued for: names the waits that a transport puts in; empty: it is not compute
        )

    # ---- marking -----------------------------------------------------------------------------------------------------
    def mark(self, stream: Stream | None = None) -> Event:
        """Behind all work that is in the stream (None: the current one) now."""
        return self._device.record(stream if stream is not None else self._device.current_stream(), timing=True)

    def waited(self, layer: str, start: Event, until: Sequence[Event | None] = ()) -> None:
        """From `start` on the current stream waits for all of `until`; empty: for what was enqueued in it since `start`."""
        events = tuple(event for event in until if event is not None and event.timed)
        if not until:
            events = (self.mark(),)
        if events:  # else: asked for before anybody watched
            self._stood.append(_Stood(layer, start, events))

    def kernel(self, product: Hashable, layer: str, start: Event, arrivals: Sequence[Event | None]) -> None:
        """All that was enqueued in the current stream since `start` is one product, which waits for `arrivals` by itself."""
        events = tuple(event for event in arrivals if event is not None and event.timed)
        if len(events) == len(arrivals):
            self._kernels.append(_Kernel(product, layer, start, self.mark(), events))

    def tail(self, layer: str, start: Event) -> None:
        """The current stream, which is not the one that computes, waits for what was enqueued in it since `start`."""
        self._tails.append((layer, start, self.mark()))

    def joined(self) -> None:
        """The current stream, the one that computes, is about to wait for all that `tail` spoke of."""
        join = self.mark()
        self._joined += [_Tail(layer, start, end, join) for layer, start, end in self._tails]
        self._tails.clear()
        if len(self._stood) + len(self._joined) + len(self._kernels) + len(self._spans) > LIMIT:
            self.settle()

    def span(self, lane: str, name: str, start: Event, end: Event | None, arguments: dict[str, object]) -> None:
        """Something that a stream did from `start` to `end` (None: to now, in the current stream), for a trace."""
        if self._probe.sink is not None:
            self._spans.append(_Span(lane, name, start, end if end is not None else self.mark(), arguments))

    # ---- reading -----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Somebody watches from now on: times count from here. Blocks until the device has come to this place."""
        for records in (self._stood, self._tails, self._joined, self._kernels, self._spans):
            records.clear()
        self._set_origin()

    def settle(self) -> None:
        """Add everything measured to the probe. Blocks until the device has done what the current stream was given."""
        if self._origin is None:
            return
        origin, origin_ns = self._origin, self._origin_ns
        self._set_origin()
        times: dict[int, int] = {}

        def at(event: Event) -> int:
            """Nanoseconds since the origin."""
            found = times.get(id(event))
            if found is None:
                event.wait()
                found = times[id(event)] = self._device.elapsed(origin, event)
            return found

        def exposed(layer: str, start: int, end: int) -> None:
            if end - start >= LEAST_NS:
                self._probe.exposed(layer, origin_ns + start, origin_ns + end)

        for layer, start, until in self._stood:
            exposed(layer, at(start), max(map(at, until)))
        for layer, start, end, join in self._joined:
            exposed(layer, max(at(start), at(join)), at(end))
        launches = [(k.product, k.layer, at(k.start), at(k.end), max(map(at, k.arrivals), default=0)) for k in self._kernels]
        for product, _, begun, ended, last in launches:
            if last <= begun:
                self._fastest[product] = min(ended - begun, self._fastest.get(product, ended - begun))
        for product, layer, begun, ended, last in launches:
            bound = min(last, ended) - begun
            if product in self._fastest:
                bound = min(bound, ended - begun - self._fastest[product])
            if bound >= LEAST_NS:
                self._probe.exposed_at_most(layer, origin_ns + begun, origin_ns + begun + bound)
        for lane, name, start, end, arguments in self._spans:
            self._probe.span(lane, name, origin_ns + at(start), origin_ns + at(end), **arguments)
        for records in (self._stood, self._joined, self._kernels, self._spans):
            records.clear()

    def _set_origin(self) -> None:
        origin = self.mark()
        origin.wait()
        self._origin, self._origin_ns = origin, now_ns()
