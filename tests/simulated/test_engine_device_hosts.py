"""The engine over several hosts of simulated devices: random programs, what crosses hosts, planted mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.engine.routes.stream import Crossing
from commfuse_dp.transport.base import ExchangeFn, Transport
from commfuse_dp.transport.hierarchical.rail import Rail
from tests.simulated.test_engine import Policy, base_case, cases, run_program
from tests.simulated.test_engine_hierarchical import run_steps
from tests.support import fake_device
from tests.support.cells import slow
from tests.support.fake_device import FakeDevice, FakeWorld, Race
from tests.support.hosts import DeviceHosts, shuffled_hosts
from tests.support.threads import run_ranks
from tests.support.watched import Watched


def run_on_hosts(case: dict[str, Any]) -> None:
    n, per_host = case["world_size"], case["per_host"]
    world = FakeWorld(n, seed=case["seed"], deferred=False, stands=True)
    hosts = DeviceHosts(world, shuffled_hosts(n, per_host, case["seed"]))

    def open_transport(rank: int, exchange: ExchangeFn) -> Transport:
        return hosts.open(rank, exchange, inbox_bytes=case["bytes"])

    @contextmanager
    def watching(transport: Transport) -> Iterator[None]:
        with Watched(world.devices[transport.rank]):
            yield

    run_program(case, open_transport, watching)


SHAPES = [(2, 2), (2, 3), (3, 2)]


IGNORED = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """kernels: auto: whole layers as one product, blas: slice by slice."""
    case = draw(cases().filter(lambda case: case["layout"] != "replicated"))
    kernels, (hosts, per_host) = draw(st.sampled_from(["auto", "blas"])), draw(st.sampled_from(SHAPES))
    return {**case, "bytes": 1 << 16, "kernels": kernels, "world_size": hosts * per_host, "per_host": per_host}


@settings(max_examples=4, suppress_health_check=IGNORED)
@given(programs())
def test_random_programs_on_devices_of_several_hosts(case):
    run_on_hosts(case)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=IGNORED)
@given(programs())
def test_more_random_programs_on_devices_of_several_hosts(case):
    run_on_hosts(case)


@pytest.mark.parametrize(("hosts", "per_host"), [slow(2, 2), slow(2, 3), (3, 2)])
def test_what_crosses_hosts(hosts, per_host):
    n, steps = hosts * per_host, 3
    world = FakeWorld(n, seed=5, deferred=False)
    opened = DeviceHosts(world, [str(rank // per_host) for rank in range(n)])

    def body(rank: int, exchange: ExchangeFn) -> tuple[Any, int]:
        transport = opened.open(rank, exchange, inbox_bytes=1 << 14)
        with Watched(world.devices[rank]):
            run_steps(transport, Policy(compute_dtype=torch.float32, reduce_dtype=torch.float64), steps)
        return transport.probe.across, sum(row[rank] for row in transport.sizes)

    results = run_ranks(n, body)
    shards = [size for _, size in results]
    for rank, (across, _) in enumerate(results):
        rail = [r for r in range(n) if r % per_host == rank % per_host and r != rank]
        assert across.param_bytes_received == steps * sum(shards[r] for r in rail)
        assert across.grad_bytes_received == steps * (hosts - 1) * shards[rank] * 2  # sums in float64


# ---- the simulation catches what these tests are for -------------------------------------------------------------------
def _relay_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay reads the segment without waiting for the stream that packs it."""
    publish = Rail.publish
    wait = FakeDevice.wait_event

    def deaf(device: FakeDevice, stream: Any, event: Any) -> None:
        if stream.name != "relay":
            wait(device, stream, event)

    def hasty(self: Rail, *arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(FakeDevice, "wait_event", deaf)
            publish(self, *arguments)

    monkeypatch.setattr(Rail, "publish", hasty)


def _pack_under_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next epoch is packed while the last one may still be leaving."""
    monkeypatch.setattr(Rail, "wait_finished", lambda *_, **__: None)


def _cross_without_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums leave before they are made."""
    cross = Rail.cross

    def hasty(self: Rail, *arguments: Any) -> Any:
        device = self.whole.device
        with device.on(device.side_stream("elsewhere")):
            return cross(self, *arguments)

    monkeypatch.setattr(Rail, "cross", hasty)


def _sum_without_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over hosts is made before the other hosts' sums are there."""
    monkeypatch.setattr(Crossing, "wait", lambda self: None)


@pytest.mark.parametrize(
    "mistake", [None, _relay_without_packing, _pack_under_exchange, _cross_without_sums, _sum_without_landing]
)
def test_a_mistake_between_hosts_is_a_race(monkeypatch, mistake):
    case = base_case(bytes=1 << 13, world_size=4, per_host=2)
    if mistake is None:
        run_on_hosts(case)
        return
    mistake(monkeypatch)
    monkeypatch.setattr(fake_device, "STANDS", 0.0)  # a host that stands may hide it
    monkeypatch.setattr(fake_device, "PATIENCE_S", 1.0)  # the others wait for the rank that raised
    with pytest.raises(Race):
        run_on_hosts(case)
