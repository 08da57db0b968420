"""StepMeter: differences of counters, step by step."""

from __future__ import annotations

import pytest

from commfuse_dp.errors import ConfigError
from commfuse_dp.observe import StepMeter
from commfuse_dp.probe import Probe

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 5 * MS

    def __call__(self) -> int:
        return self.now


def test_a_reading_holds_what_happened_in_its_step_only() -> None:
    probe, clock = Probe(), Clock()
    meter = StepMeter(probe, clock=clock)
    probe.exposed("before", 0, 7 * MS)
    probe.counters.param_bytes_received = 1000
    for number in (1, 2):
        with meter.step():
            clock.now += 10 * MS
            probe.exposed("a", 0, number * MS)
            probe.counters.param_bytes_received += 100 * number
            probe.counters.grad_bytes_received += 10 * number
            probe.counters.grad_bytes_sent += number
        clock.now += 99 * MS  # between steps: nobody's
    first, second = meter.readings
    assert (first.wall_ms, second.wall_ms) == (10, 10)
    assert (first.exposed_ms, second.exposed_ms) == (1, 2)
    assert (first.bytes_received, second.bytes_received) == (110, 220)
    assert second.bytes_sent == 2
    assert second.counters.waits == 1
    assert second.exposed_by_layer == {"a": 2 * MS}, "a layer that did not wait in this step is left out"


def test_a_failed_step_leaves_no_reading() -> None:
    meter = StepMeter(Probe())
    with pytest.raises(KeyError), meter.step():
        raise KeyError
    assert not meter.readings


def test_summary_takes_medians_and_names_the_worst_layer() -> None:
    probe, clock = Probe(), Clock()
    meter = StepMeter(probe, clock=clock)
    for wall, waited in ((1000, 500), (10, 1), (20, 2), (30, 6)):
        with meter.step():
            clock.now += wall * MS
            probe.exposed("late", 0, waited * MS)
            probe.exposed("early", 0, MS)
            probe.counters.window_bytes_peak = 77
    summary = meter.summary(skip=1)
    assert summary.steps == 3
    assert summary.wall_ms == 20
    assert summary.exposed_ms == 3
    assert summary.window_bytes_peak == 77
    assert list(summary.exposed_ms_by_layer.items()) == [("late", 3.0), ("early", 1.0)]


def test_nothing_to_summarise_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"got a object: StepMeter\(report\.probe\)"):
        StepMeter(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no step"):
        StepMeter(Probe()).summary()
