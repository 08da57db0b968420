"""SpanRecorder: takes a probe's spans while it is attached, and brings those of all ranks together on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.profiler import record_function

from commfuse_dp.observe.clock import clock_offsets
from commfuse_dp.observe.intervals import Interval
from commfuse_dp.probe import Probe, now_ns

STEP = "step"  # lane of the recorder's own spans: whole steps ("step 7") and their phases ("forward", "backward", ...)
PHASES = ("forward", "backward", "optimizer")


class Span(NamedTuple):
    """One thing that lasted; times in ns of the monotonic clock."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    arguments: dict[str, object]


@dataclass
class RankSpans:
    """The spans of one rank, on rank 0's clock once gathered."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0  # did not fit the recorder's limit

    def lane(self, lane: str) -> list[Interval]:
        return [(s.start_ns, s.end_ns) for s in self.spans if s.lane == lane]

    def steps(self) -> dict[int, Interval]:
        """Step number -> its interval."""
        out = {}
        for span in self.spans:
            number = span.arguments.get("step")
            if span.lane == STEP and isinstance(number, int):
                out[number] = (span.start_ns, span.end_ns)
        return out


class SpanRecorder:
    """Bounded store for the spans of one probe.

    Nothing is recorded, and nothing is spent, while it is not attached:

        recorder = SpanRecorder(report.probe)
        with recorder:
            with recorder.step(7):
                with recorder.phase("forward"):
                    loss = model(x)
                ...
        ranks = recorder.gather()          # collective; rank 0 gets a list, the others None
    """

    def __init__(self, probe: Probe, *, limit: int = 200_000, clock: Callable[[], int] = now_ns) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: a recorder keeps at least 1 span.")
        self.probe = probe
        self.limit = limit
        self.spans: list[Span] = []
        self.dropped = 0
        self._clock = clock

    def attach(self) -> None:
        if self.probe.sink is not None:
            raise RuntimeError("this probe already has a span sink: detach the other recorder first.")
        self.probe.watch()
        self.probe.sink = self._record

    def detach(self) -> None:
        """Safe to call when not attached; the spans are kept."""
        if self.probe.sink == self._record:
            try:
                self.probe.settle()
            finally:
                self.probe.unwatch()
                self.probe.sink = None

    def __enter__(self) -> SpanRecorder:
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def clear(self) -> None:
        self.spans.clear()
        self.dropped = 0

    def _record(self, lane: str, name: str, start_ns: int, end_ns: int, arguments: dict[str, object]) -> None:
        # Called by I/O threads too: list.append is atomic, and overshooting the limit by a few spans does no harm.
        if len(self.spans) < self.limit:
            self.spans.append(Span(lane, name, start_ns, end_ns, arguments))
        else:
            self.dropped += 1

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One training step: the frame of the timeline. On a GPU it ends when the device has done it."""
        start = self._clock()
        try:
            with record_function(f"commfuse::step {number}"):
                yield
            self.probe.settle()
        finally:
            self._record(STEP, f"step {number}", start, self._clock(), {"step": number})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of a step (`PHASES`): busy time apart from the waits that lie in it."""
        start = self._clock()
        try:
            with record_function(f"commfuse::{name}"):
                yield
        finally:
            self._record(STEP, name, start, self._clock(), {})

    def gather(self, group: dist.ProcessGroup | None = None) -> list[RankSpans] | None:
        """Collective (no process group: this rank alone). On rank 0 all ranks' spans on rank 0's clock, elsewhere None."""
        if not dist.is_initialized():
            return [RankSpans(0, list(self.spans), self.dropped)]
        offsets = clock_offsets(group, clock=self._clock)
        everyone: list[tuple[list[Span], int]] = [([], 0)] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (self.spans, self.dropped), group=group)
        if dist.get_rank(group) != 0:
            return None
        return [
            RankSpans(rank, [s._replace(start_ns=s.start_ns + offset, end_ns=s.end_ns + offset) for s in spans], dropped)
            for rank, ((spans, dropped), offset) in enumerate(zip(everyone, offsets, strict=True))
        ]
