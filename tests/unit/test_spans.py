"""SpanRecorder: bounded, attached to one probe at a time, off by default."""

from __future__ import annotations

import pytest

from commfuse_dp.observe import SpanRecorder
from commfuse_dp.probe import COMPUTE, Probe


def test_records_only_while_attached() -> None:
    probe = Probe()
    recorder = SpanRecorder(probe)
    probe.span(COMPUTE, "before", 0, 1)
    with recorder:
        probe.span(COMPUTE, "during", 1, 2, slice=3)
        probe.exposed("layer", 2, 5)
    probe.span(COMPUTE, "after", 5, 6)
    assert [(s.lane, s.name, s.end_ns, s.arguments) for s in recorder.spans] == [
        ("compute", "during", 2, {"slice": 3}),
        ("wait", "layer", 5, {}),
    ]
    assert probe.sink is None


def test_bounded_and_says_how_much_was_dropped() -> None:
    probe = Probe()
    recorder = SpanRecorder(probe, limit=3)
    with recorder:
        for number in range(10):
            probe.span(COMPUTE, str(number), number, number + 1)
    assert [s.name for s in recorder.spans] == ["0", "1", "2"]
    gathered = recorder.gather()
    assert gathered is not None and gathered[0].dropped == 7
    recorder.clear()
    assert not recorder.spans and recorder.dropped == 0


def test_two_recorders_on_one_probe_are_refused() -> None:
    probe = Probe()
    with SpanRecorder(probe):
        with pytest.raises(RuntimeError, match="already has a span sink"):
            SpanRecorder(probe).attach()
        SpanRecorder(probe).detach()  # not its own: left alone
        assert probe.sink is not None
    assert probe.sink is None


def test_steps_and_phases_are_spans_with_their_number() -> None:
    ticks = iter(range(0, 1000, 10))
    recorder = SpanRecorder(Probe(), clock=lambda: next(ticks))
    with recorder, recorder.step(4), recorder.phase("forward"):
        pass
    (rank,) = recorder.gather() or []
    assert rank.steps() == {4: (0, 30)}
    assert [(s.name, s.start_ns, s.end_ns) for s in rank.spans] == [("forward", 10, 20), ("step 4", 0, 30)]


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit=0"):
        SpanRecorder(Probe(), limit=0)
