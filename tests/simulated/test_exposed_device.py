"""Exposed communication on a device: the engine over a simulated one whose products, copies and delays last what they are told.

One layer, two ranks, one step of each; c: a product of one slice, t: a copy of parameters, s: a copy of a gradient, D: rank 1
begins later. All else takes no time. In program order, with x not needing a gradient:

    forward    own slice c | the other slice c            that one was copied by max(start of both) + t
    backward   the other's gradient c, which leaves (s) | own gradient c | join
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.observe import SpanRecorder, StepMeter
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.probe import COMPUTE, RECEIVE, SEND, WAIT
from tests.simulated.test_engine import Policy, Slot, data, weights
from tests.support.fake_device import FakeStream, FakeWorld
from tests.support.fake_symmetric import open_fake
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.watched import Watched

C, T, S = 1000, 5000, 3000


def costs(c: int, t: int, s: int) -> Any:
    def of(stream: FakeStream, what: str, nbytes: int) -> int:
        if what == "copy":
            return t if stream.name == "gather" else s
        return c if "mm" in what else 0

    return of


def train(
    kernels: str,
    *,
    c: int = C,
    t: int = T,
    s: int = S,
    late: int = 0,
    readers: int = 0,
    layers: int = 1,
    inbox: int = 1 << 16,
    shared: bool = False,
    spans: bool = False,
) -> list[Any]:
    """(readings, what the device was asked for, spans) of both ranks.

    late: of rank 1, before every step, inside the reading. readers: of rank 1's copies, which hold up a second step."""
    world = FakeWorld(2, seed=5, deferred=False, costs=costs(c, t, s))
    params = weights(layers, 0, False)

    def body(rank: int, exchange: ExchangeFn) -> Any:
        transport = open_fake(world, rank, exchange, inbox_bytes=inbox, deadline_s=20.0, kernels_may_wait=not shared)
        device = world.devices[rank]
        with Watched(device):
            slots = [[Slot(f"{i}.0", layer[0], rank, 2)] for i, layer in enumerate(params)]
            units = [Unit(i, f"layer{i}", layer, Policy(), 1) for i, layer in enumerate(slots)]
            config = CommFuseConfig(prefetch_bytes=1 << 16, inbox_bytes=inbox, kernels=kernels)
            engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
            meter, recorder = StepMeter(engine.probe), SpanRecorder(engine.probe)
            if spans:
                recorder.attach()
            for number in range(2 if readers else 1):
                exchange(None)
                with meter.step():
                    if rank == 1 and late:
                        device.delay(late)
                    if rank == 1 and number:
                        gather = device.side_stream("gather")
                        device.wait_event(gather, device.record(device.current_stream()))
                        device.delay(readers, gather)
                    engine.begin_step()
                    y = data(rank, number)
                    for unit in units:
                        y = fused_linear(y, UnitOperand(engine, unit), 0)
                    engine.end_forward(True)
                    y.sum().backward()
            recorder.detach()
            counts = dict(device.counts)
            engine.close()
        return list(meter.readings), counts, recorder.spans

    return run_ranks(2, body)


def exposed(results: list[Any], step: int = 0) -> list[dict[str, int]]:
    return [readings[step].exposed_by_layer for readings, _, _ in results]


@pytest.mark.parametrize("kernels", ["blas", "auto"])
def test_slices_and_tail(kernels: str) -> None:
    """blas: slice by slice. auto: one product of the layer, which is bounded: its last slice came t behind its beginning."""
    forward = T - C if kernels == "blas" else min(T, 2 * C + T - C)
    tail = S - C
    for readings, _, _ in train(kernels):
        (reading,) = readings
        assert reading.exposed_by_layer == {"layer0": forward, "layer0 (tail)": tail}
        assert reading.counters.exposed_ns == forward + tail and reading.counters.waits == 2
        assert reading.counters.exposed_bound_ns == (0 if kernels == "blas" else forward)


def test_nothing_is_exposed_where_compute_takes_longer() -> None:
    assert exposed(train("blas", c=5000, t=4000, s=5000)) == [{}, {}]


def test_ranks_that_share_a_gpu() -> None:
    """The stream waits for all slices before the product: no bound, the wait itself."""
    results = train("auto", shared=True)
    assert exposed(results) == [{"layer0": T, "layer0 (tail)": S - C}] * 2
    assert all(readings[0].counters.exposed_bound_ns == 0 for readings, _, _ in results)


@pytest.mark.parametrize("late", [500, 20_000])
def test_a_late_peer_is_exposed_where_it_is_waited_for(late: int) -> None:
    """Rank 0 waits for the parameters of rank 1, which finds those of rank 0 published and waits for its own copy alone."""
    begun = (0, late)
    published = late  # the later one of the two: so the other one's slice has come at `late + t` on both
    forward = [published + T - (start + C) for start in begun]
    sent = [begun[rank] + C + forward[rank] + C + C for rank in (0, 1)]  # own slice, wait, the other slice, its gradient
    tail = [max(0, sent[1 - rank] + S - (sent[rank] + C)) for rank in (0, 1)]
    for rank, found in enumerate(exposed(train("blas", late=late))):
        wanted = {"layer0": forward[rank], "layer0 (tail)": tail[rank]}
        assert found == {name: spent for name, spent in wanted.items() if spent}


def test_the_next_step_waits_for_readers() -> None:
    """Rank 1's copies of the step before are late: neither rank may write its parameters."""
    results = train("blas", readers=9000)
    assert "(start of step)" not in exposed(results)[0] | exposed(results)[1]
    assert [found["(start of step)"] for found in exposed(results, 1)] == [9000, 9000]


def test_staging_that_is_still_being_sent_is_waited_for() -> None:
    """Room for two gradients, of which the first takes s to leave: the third layer's waits, seven products later."""
    for found in exposed(train("blas", t=0, s=100_000, layers=3, inbox=256)):
        assert found["layer0"] == 100_000 - 7 * C and not {"layer1", "layer2"} & set(found)


def test_nothing_is_asked_of_the_device_unless_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a meter: a mark a pull, two a product that waits itself, two a sum, three at a step's ends, three the meter's."""
    _, metered, _ = train("auto")[0]
    monkeypatch.setattr(StepMeter, "step", lambda self: nullcontext())
    _, bare, _ = train("auto")[0]
    assert "mark" not in bare
    assert sum(metered.values()) - sum(bare.values()) == 11


def test_copies_sums_and_waits_in_a_trace() -> None:
    _, _, spans = train("blas", spans=True)[0]
    lanes = {lane: [s for s in spans if s.lane == lane] for lane in (RECEIVE, SEND, COMPUTE, WAIT)}
    assert [s.end_ns - s.start_ns for s in lanes[RECEIVE]] == [T] and lanes[RECEIVE][0].arguments["peer"] == 1
    assert [s.end_ns - s.start_ns for s in lanes[SEND]] == [S]
    assert [s.name for s in lanes[COMPUTE]] == ["publish", "layer0 sum"]
    slice_wait, tail = sorted(lanes[WAIT], key=lambda s: s.start_ns)
    assert slice_wait.end_ns == lanes[RECEIVE][0].end_ns and tail.end_ns - tail.start_ns == S - C
