"""What gpu-check's parts enqueue on a GPU, on the simulated device: every line runs, and nothing is read too early."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import clock, multiprocessors, peers, shapes
from benchmarks.gpu.part import Clock, Reporter
from benchmarks.gpu.products import Product
from benchmarks.gpu.ranks import peers as peers_rank
from commfuse_dp.device import cuda
from commfuse_dp.kernels import by_slices
from commfuse_dp.kernels.inbox_sum import inbox_sum
from commfuse_dp.transport.symmetric import memory
from tests.support.fake_device import FakeDevice, FakeWorld, Race
from tests.support.fake_symmetric import FakeSymmetricMemory
from tests.support.pretended_cuda import HOST, PretendedCuda, PretendedTorch
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.watched import Watched


def pretend(monkeypatch: pytest.MonkeyPatch, world: FakeWorld, *modules: Any) -> None:
    def synchronize(device: object = None) -> None:
        world.drive(lambda: not any(stream.queue for stream in world.streams))

    monkeypatch.setattr(PretendedCuda, "synchronize", staticmethod(synchronize))
    for module in modules:
        monkeypatch.setattr(module, "torch", PretendedTorch())


def compared(monkeypatch: pytest.MonkeyPatch, seed: int, words: Any) -> Reporter:
    """Both of our sides of part "peers". words(device): what stands for the kernels' waits and signals."""
    world, ranks = FakeWorld(peers.SIZE, seed=seed, deferred=False), peers.SIZE
    pretend(monkeypatch, world, clock, peers_rank)

    def here() -> int:
        return int(threading.current_thread().name.removeprefix("rank-"))

    def by_kernel(product: Product, config: None) -> Any:
        return product.by_slices(words(world.devices[here()]))

    def barrier() -> None:
        """Always behind `synchronize`, on all ranks: what was enqueued before is before what is enqueued after."""
        meet.wait()
        with world.changed:
            times = {stream: max(other.clock.get(stream, 0) for other in world.streams) for stream in world.streams}
            for stream in world.streams:
                assert not stream.queue
                stream.clock = dict(times)
        meet.wait()

    def symmetric(group: None, exchange: ExchangeFn, where: torch.device, *, overlapping: bool) -> FakeSymmetricMemory:
        assert overlapping
        return FakeSymmetricMemory(world, here(), exchange)

    def summed(*given: Any, implementation: str) -> None:
        inbox_sum(*given)

    monkeypatch.setattr(cuda, "CudaDevice", lambda device: world.devices[here()])
    monkeypatch.setattr(memory, "TorchSymmetricMemory", symmetric)
    monkeypatch.setattr(Product, "by_kernel", by_kernel)
    monkeypatch.setattr("commfuse_dp.kernels.inbox_sum.inbox_sum", summed)
    monkeypatch.setattr(clock, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(peers_rank, "dist", SimpleNamespace(barrier=barrier))

    def body(rank: int, exchange: ExchangeFn) -> dict[str, Any]:
        monkeypatch.setattr(peers_rank.Comparison, "_exchange", lambda self, value: exchange_of[self.rank](value))
        exchange_of[rank] = exchange
        with Watched(world.devices[rank]):
            return peers_rank.Comparison(rank, ranks, shapes.Shape("tiny", 16, 24, 32)).run("commfuse")

    exchange_of: dict[int, ExchangeFn] = {}
    meet = threading.Barrier(ranks, timeout=20.0)
    report = Reporter("peers", Clock(60.0))
    peers.compare(report, run_ranks(ranks, body))
    return report


@pytest.mark.parametrize("seed", range(3))
def test_our_side_of_the_comparison(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    report = compared(monkeypatch, seed, by_slices.words_of)
    assert not report.outcome.failures
    assert [row["name"] for row in report.outcome.rows] == ["gather_commfuse", "scatter_commfuse"]


def test_a_kernel_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(device: FakeDevice) -> by_slices.Words:
        return by_slices.Words(lambda *_: None, by_slices.words_of(device).signal)

    with pytest.raises(Race):
        compared(monkeypatch, 0, deaf)


def test_operations_that_should_need_no_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is enqueued, and copies what it says; what only the driver can do is left out."""
    world = FakeWorld(1, seed=3, deferred=False)
    pretend(monkeypatch, world, multiprocessors)
    monkeypatch.setattr(multiprocessors, "MOST", 1 << 16)
    device = world.devices[0]
    copies = []

    def copy(target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        source.fill_(len(copies) + 1)
        FakeDevice.copy(device, target, source, stream)
        copies.append((target, len(copies) + 1))

    monkeypatch.setattr(device, "copy", copy)
    found = [*multiprocessors.own_operations(device, HOST), *multiprocessors.peer_operations(device, HOST, HOST)]
    for operation in found:
        if "asked for a copy engine" not in operation.name:
            operation.work(device.side_stream("gather"))
            PretendedCuda.synchronize()
            assert all((target == value).all() for target, value in copies[-1:])
    assert [operation.needs for operation in found].count(True) == 1 and len(copies) >= 10
