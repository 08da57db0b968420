"""StepMeter: what each step cost, as differences of the probe's always-on counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from commfuse_dp.errors import ConfigError
from commfuse_dp.probe import Counters, Probe, now_ns


@dataclass(frozen=True)
class StepReading:
    """One step of one rank. Times in ns, sizes in bytes."""

    wall_ns: int
    counters: Counters  # of this step alone (window_bytes_peak: since the meter was made)
    across: Counters | None  # what crossed hosts, in the hierarchical order; `counters` has what moved inside the host
    exposed_by_layer: dict[str, int]  # layer -> ns in which its compute was blocked; layers that never waited are left out
    end: tuple[int, int] | None = None  # when its backward was computed, when its gradients were there (ns); None: not known

    @property
    def wall_ms(self) -> float:
        return self.wall_ns / 1e6

    @property
    def exposed_ms(self) -> float:
        return self.counters.exposed_ns / 1e6

    @property
    def exposed_bound_ms(self) -> float:
        """The part of exposed_ms that is an upper bound: of kernels that wait inside themselves (device/timing.py)."""
        return self.counters.exposed_bound_ns / 1e6

    @property
    def bytes_received(self) -> int:
        return self.counters.param_bytes_received + self.counters.grad_bytes_received

    @property
    def bytes_sent(self) -> int:
        return self.counters.param_bytes_sent + self.counters.grad_bytes_sent

    @property
    def across_bytes_received(self) -> int:
        return self.across.param_bytes_received + self.across.grad_bytes_received if self.across is not None else 0


@dataclass(frozen=True)
class StepSummary:
    """Medians over the readings."""

    steps: int
    wall_ms: float
    exposed_ms: float
    exposed_bound_ms: float  # the part of exposed_ms that is an upper bound; 0 on a host
    bytes_received: float
    bytes_sent: float
    across_bytes_received: float  # from other hosts, in the hierarchical order, for this one's host; else 0
    waits: float
    steps_replayed: int  # in which no layer's program had to be bound anew: see engine/bound.py
    window_bytes_peak: int
    exposed_ms_by_layer: dict[str, float]  # mean a step, worst layer first: which layer is to blame


class StepMeter:
    """Reads a probe around each step.

    On a GPU a reading begins and ends with a wait for the device, so that it is of this step alone; inside the step nothing
    waits. What the step costs without that can be measured over several steps, without a meter.

    meter = StepMeter(report.probe)
    for batch in data:
        with meter.step():
            ...
    print(meter.summary())
    """

    def __init__(self, probe: Probe, *, keep: int = 10_000, clock: Callable[[], int] = now_ns) -> None:
        if not isinstance(probe, Probe):
            raise ConfigError(f"StepMeter needs a probe, got a {type(probe).__name__}: StepMeter(report.probe)")
        self.probe = probe
        self.readings: deque[StepReading] = deque(maxlen=keep)
        self._clock = clock

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step that ends with an exception leaves no reading."""
        self.probe.watch()
        try:
            self.probe.settle()
            counters = self.probe.counters.snapshot()
            across = self.probe.across.snapshot() if self.probe.across is not None else None
            layers = dict(self.probe.exposed_by_layer)
            self.probe.step_end = None
            start = self._clock()
            yield
            self.probe.settle()
            wall = self._clock() - start
        finally:
            self.probe.unwatch()
        blocked = {name: ns - layers.get(name, 0) for name, ns in self.probe.exposed_by_layer.items()}
        self.readings.append(
            StepReading(
                wall,
                self.probe.counters.since(counters),
                self.probe.across.since(across) if self.probe.across is not None and across is not None else None,
                {name: ns for name, ns in blocked.items() if ns},
                self.probe.step_end,
            )
        )

    def summary(self, *, skip: int = 0) -> StepSummary:
        """Over all readings but the first `skip` (warm-up). Raises ValueError if none are left."""
        readings = list(self.readings)[skip:]
        if not readings:
            raise ValueError(f"no step to summarise: {len(self.readings)} read, {skip} to skip.")
        layers: dict[str, int] = {}
        for reading in readings:
            for name, spent in reading.exposed_by_layer.items():
                layers[name] = layers.get(name, 0) + spent
        worst = sorted(layers.items(), key=lambda item: -item[1])
        return StepSummary(
            steps=len(readings),
            wall_ms=median(r.wall_ms for r in readings),
            exposed_ms=median(r.exposed_ms for r in readings),
            exposed_bound_ms=median(r.exposed_bound_ms for r in readings),
            bytes_received=median(r.bytes_received for r in readings),
            bytes_sent=median(r.bytes_sent for r in readings),
            across_bytes_received=median(r.across_bytes_received for r in readings),
            waits=median(r.counters.waits for r in readings),
            steps_replayed=sum(r.counters.replayed > 0 and not r.counters.bound for r in readings),
            window_bytes_peak=max(r.counters.window_bytes_peak for r in readings),
            exposed_ms_by_layer={name: ns / 1e6 / len(readings) for name, ns in worst},
        )
