"""Parts of gpu-check that need a GPU, with one that is pretended: torch's names of CUDA are the host's, streams run at once.

Numbers mean nothing here. What is seen is that every line runs, what is asked of the driver, and what is written down.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.gpu import clock, kernels_check, overlap, shapes, timings
from benchmarks.gpu.part import Clock, Options, Reporter
from benchmarks.gpu.products import Product
from benchmarks.micro import device_overhead
from benchmarks.one_rank import NullDevice, UnwaitingDevice
from commfuse_dp.device import cuda
from commfuse_dp.device.base import Stream, reached
from commfuse_dp.kernels import by_slices, tiles
from commfuse_dp.kernels.inbox_sum import inbox_sum
from commfuse_dp.kernels.publish import PublishPlan
from commfuse_dp.kernels.tiles import TileConfig
from tests.support.pretended_cuda import HOST, PretendedTorch


class AtOnce(NullDevice):
    """Copies are made at once. A wait is either over, or would never be: `stands` counts those, as nothing else runs."""

    stands = 0

    def __init__(self, device: object = None) -> None:
        super().__init__()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        assert dst.dtype == src.dtype == torch.uint8
        dst.copy_(src)

    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        AtOnce.stands += not reached(int(pad[index]), value, exact=exact)

    def write_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int) -> None:
        pad[index] = value

    def poke(self, words: Any) -> None:
        for pad, place, value in words:
            pad[place] = value


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_kernel(self: Product, config: TileConfig | None = None) -> Any:
        assert config is None or isinstance(config, TileConfig)
        return self.by_slices(by_slices.words_of(AtOnce()))

    monkeypatch.setattr(AtOnce, "stands", 0)
    for module in (clock, kernels_check, timings):
        monkeypatch.setattr(module, "torch", PretendedTorch())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(cuda, "CudaDevice", AtOnce)
    monkeypatch.setattr(Product, "by_kernel", by_kernel)


@pytest.mark.usefixtures("pretended")
def test_kernels_with_slices_on_their_way() -> None:
    """Ahead of the kernel: nothing comes later here."""
    for cell in kernels_check.cells(small=True):
        rows = kernels_check.check(cell, "cuda", ahead=True)
        assert [row["backend"] for row in rows] == ["slices", "kernel"]
        assert all(row["ok"] for row in rows), (str(cell), rows)
    assert AtOnce.stands == 0


@pytest.mark.usefixtures("pretended")
def test_a_kernel_that_reads_too_early_is_wrong() -> None:
    cell = kernels_check.cells(small=True)[0]
    product = Product(cell.op, cell.shape, cell.ranks, cell.dtype, HOST, pad=torch.zeros(cell.ranks, dtype=torch.int32))
    early = product.by_slices(by_slices.Words(lambda *_: None, lambda *_: None))
    assert cell.op == "forward"
    assert kernels_check._run_late(product, early, 1, ahead=False).isnan().any()


@pytest.mark.slow
@pytest.mark.usefixtures("pretended")
def test_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gemms:
        def __init__(self, *arguments: object) -> None:
            pass

        def __getattr__(self, op: str) -> Any:
            return lambda *operands, epoch: getattr(by_slices, f"gemm_{op}")(*operands, epoch=epoch, **words[op])

    def measure(ranks: int, steps: int, make: type, *, config: dict[str, str]) -> dict[str, Any]:
        assert config == {"kernels": "triton"} and make is UnwaitingDevice
        with device_overhead.nothing_computed():
            return host_time(ranks, 1, NullDevice)

    known, host_time = by_slices.words_of(AtOnce()), device_overhead.measure
    words = {"forward": {"wait": known.wait}, "dgrad": {"wait": known.wait}, "wgrad": {"signal": known.signal}}
    small = shapes.SMALL[0]
    monkeypatch.setattr(timings, "Gemms", Gemms)
    monkeypatch.setattr(timings, "inbox_sum", lambda *given, implementation, **how: inbox_sum(*given, **how))
    monkeypatch.setattr(timings, "PublishPlan", lambda *given, implementation: PublishPlan(*given))
    monkeypatch.setattr(timings, "copy_bandwidth", partial(clock.copy_bandwidth, nbytes=1 << 16))
    monkeypatch.setattr(timings, "host_link_bandwidth", partial(clock.host_link_bandwidth, nbytes=1 << 16))
    monkeypatch.setattr(clock, "FLUSH_BYTES", 1 << 10)
    for name, value in {"ROUNDS": 2, "HOST_CALLS": 3, "SUMMED": 4096, "STANDING_S": 20.0}.items():
        monkeypatch.setattr(timings, name, value)
    monkeypatch.setattr(shapes, "LLAMA", (small,))
    monkeypatch.setattr(shapes, "OTHERS", ())
    monkeypatch.setattr(shapes, "SEQUENCE_TIMED", small._replace(name="mlp"))
    monkeypatch.setattr(device_overhead, "measure", measure)
    monkeypatch.setattr(device_overhead, "SHALLOW", 2)
    monkeypatch.setattr(device_overhead, "DEEP", 4)
    report = Reporter("timings", Clock(1000.0))
    timings.run(report, Options("cuda"))
    assert not report.outcome.failures and not report.outcome.skipped
    kinds = [row["kind"] for row in report.outcome.rows]
    counts = {"inbox_sum": 4, "publish": 1, "host": 4, "host_layer": 3, "product": 3 * 3 + len(shapes.SEQUENCE)}
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    assert AtOnce.stands == 1  # of the host's time while the device stands
    assert len(report.outcome.targets) == 2 + 2 + 2 * 3 + len(tiles.PASSES) * 2 + 2


@pytest.mark.usefixtures("pretended")
def test_a_step_beside_its_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(overlap, "ROUNDS", 2)
    report = Reporter("overlap", Clock(1000.0))
    overlap.measure(report, NullDevice(), 32, width=64, layers=3)
    (row,) = report.outcome.rows
    names = ("compute", "transfers", "in_turn", "by_layers", "commfuse")
    assert all(row[f"{name}_ms"]["p50"] > 0 for name in names) and not report.outcome.failures
    assert row["bound_ms"] == max(row["compute_ms"]["p50"], row["transfers_ms"]["p50"])
