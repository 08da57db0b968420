"""What events say of waits, over a simulated device whose clock is exact: the figure is the delay that was put in."""

from __future__ import annotations

import pytest
import torch

from commfuse_dp.device.timing import LEAST_NS, EventTimer
from commfuse_dp.probe import COMPUTE, WAIT, Probe
from tests.support.fake_device import FakeDevice, FakeWorld, HostBlocked


@pytest.fixture
def setup() -> tuple[FakeDevice, Probe]:
    device, probe = FakeWorld(1, seed=3).devices[0], Probe()
    probe.measure_by(EventTimer(device, probe))
    return device, probe


def test_nothing_is_enqueued_while_nobody_watches(setup) -> None:
    device, probe = setup
    probe.settle()
    assert probe.timing is None and probe.mark() is None
    probe.waited("layer", None)
    probe.tail("layer", None)
    probe.joined()
    assert device.counts == {}
    probe.watch()
    probe.watch()
    probe.unwatch()
    assert probe.timing is not None
    probe.unwatch()
    assert probe.timing is None and device.counts == {"mark": 1}


@pytest.mark.parametrize("own, copy, exposed", [(1000, 5000, 4000), (5000, 1000, 0), (5000, 5000 + LEAST_NS - 1, 0)])
def test_stood_is_what_the_copy_took_longer(setup, own: int, copy: int, exposed: int) -> None:
    device, probe = setup
    gather = device.side_stream("gather")
    probe.watch()
    device.delay(copy, gather)
    landed = device.record(gather, timing=True)
    device.delay(own)
    probe.waited("layer", probe.mark(), (landed,))
    device.wait_event(device.current_stream(), landed)
    assert probe.counters.exposed_ns == 0
    probe.settle()
    probe.settle()
    assert probe.counters.exposed_ns == exposed and probe.counters.waits == bool(exposed)
    assert probe.exposed_by_layer == ({"layer": exposed} if exposed else {}) and probe.counters.exposed_bound_ns == 0


def test_a_wait_for_a_word_is_measured_by_a_mark_behind_it(setup) -> None:
    device, probe = setup
    pad, peer = torch.zeros(1, dtype=torch.int32), device.side_stream("peer")
    probe.watch()
    device.delay(7000, peer)
    device.write_value(peer, pad, 0, 1)
    device.delay(2000)
    begun = probe.mark()
    device.wait_value(device.current_stream(), pad, 0, 1)
    probe.waited("(start of step)", begun)
    device.delay(99000)
    probe.settle()
    assert probe.exposed_by_layer == {"(start of step)": 5000}


def test_copies_that_were_asked_for_before_anybody_watched_count_for_nothing(setup) -> None:
    device, probe = setup
    gather = device.side_stream("gather")
    device.delay(9000, gather)
    early = device.record(gather)
    probe.watch()
    probe.waited("layer", probe.mark(), (early,))
    assert probe.timing is not None
    probe.timing.kernel("product", "layer", probe.timing.mark(), (early,))
    probe.settle()
    assert probe.counters.exposed_ns == 0


def test_tails_count_from_the_join(setup) -> None:
    """reduce:  | sum 1 waits until 3000 | sums 1000 | sum 2 waits until 9000 | sums 500 |        join at 5000: 4000 of sum 2"""
    device, probe = setup
    pad, peer, reduce = torch.zeros(2, dtype=torch.int32), device.side_stream("peer"), device.side_stream("reduce")
    probe.watch()
    for index, when in enumerate((3000, 6000)):
        device.delay(when, peer)
        device.write_value(peer, pad, index, 1)
    for index, cost in enumerate((1000, 500)):
        with device.on(reduce):
            begun = probe.mark()
            device.wait_value(reduce, pad, index, 1)
            probe.tail(f"layer{index} (tail)", begun)
            device.delay(cost)
    device.delay(5000)
    probe.joined()
    device.wait_event(device.current_stream(), device.record(reduce))
    probe.settle()
    assert probe.exposed_by_layer == {"layer1 (tail)": 4000}


def launch(device: FakeDevice, probe: Probe, copy: int, own: int, others: int) -> None:
    """One layer's product: `own` ns on the own slice, then a slice that is copied for `copy` ns, then `others` ns on that."""
    gather = device.side_stream("gather")
    device.wait_event(gather, device.record(device.current_stream()))
    device.delay(copy, gather)
    landed = device.record(gather, timing=True)
    assert probe.timing is not None
    begun = probe.timing.mark()
    device.delay(own)
    device.wait_event(device.current_stream(), landed)  # stands for the kernel's own wait
    device.delay(others)
    probe.timing.kernel(("product", 1), "layer", begun, (landed,))


def test_a_kernel_that_waits_inside_is_bounded_by_its_last_slice(setup) -> None:
    device, probe = setup
    probe.watch()
    launch(device, probe, copy=3000, own=1000, others=4000)
    probe.settle()
    assert probe.exposed_by_layer == {"layer": 3000}  # it waited for 2000
    assert probe.counters.exposed_bound_ns == probe.counters.exposed_ns == 3000


def test_a_launch_that_found_everything_makes_the_bound_sharp(setup) -> None:
    """Also for launches before it: all are read together."""
    device, probe = setup
    probe.watch()
    launch(device, probe, copy=3000, own=1000, others=4000)
    launch(device, probe, copy=900, own=1000, others=4000)  # no wait, but the slice came when it had begun
    device.delay(10)
    launch(device, probe, copy=0, own=1000, others=4000)
    launch(device, probe, copy=0, own=1200, others=4000)  # slower, for another reason
    probe.settle()
    assert probe.exposed_by_layer == {"layer": 2000}
    launch(device, probe, copy=2500, own=1000, others=4000)
    probe.settle()
    assert probe.counters.exposed_bound_ns == probe.counters.exposed_ns == 2000 + 1500


def test_spans_lie_on_the_hosts_clock_only_while_there_is_a_sink(setup) -> None:
    device, probe = setup
    probe.watch()
    probe.span_since(COMPUTE, "unseen", 0, probe.mark())
    spans: list[tuple[str, str, int, int]] = []
    probe.sink = lambda lane, name, start, end, arguments: spans.append((lane, name, start, end))
    begun = probe.mark()
    device.delay(4000)
    probe.span_since(COMPUTE, "product", 0, begun)
    probe.waited("layer", probe.mark())
    gather = device.side_stream("gather")
    device.delay(10_000, gather)
    probe.waited("layer", probe.mark(), (device.record(gather, timing=True),))
    probe.settle()
    (wait,) = [span for span in spans if span[0] == WAIT]
    (product,) = [span for span in spans if span[0] == COMPUTE]
    assert product[1] == "product" and product[3] - product[2] == 4000
    assert wait[1] == "layer" and wait[2] - product[3] == 0 and wait[3] - wait[2] == 6000


def test_only_settle_waits_for_the_device(setup) -> None:
    device, probe = setup
    probe.watch()
    device.world.strict = True
    probe.waited("layer", probe.mark())
    probe.tail("layer", probe.mark())
    probe.joined()
    with pytest.raises(HostBlocked):
        probe.settle()


def test_what_a_watcher_has_left_is_not_the_next_ones(setup) -> None:
    device, probe = setup
    probe.watch()
    begun = probe.mark()
    device.delay(5000)
    probe.waited("layer", begun)
    probe.unwatch()
    probe.watch()
    probe.settle()
    assert probe.counters.exposed_ns == 0
