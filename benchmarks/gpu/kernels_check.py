"""Part (a): all kernels against float64 (GEMMs, attention by blocks) and bit for bit against torch (sums, publishing).

GEMMs run with the slices' data coming late: a window is NaN until a copy from pinned host memory (a copy engine's, which needs
no multiprocessor) has filled it, and its word follows the copy. A kernel that read early would give NaN. In wgrad a copy stream
waits for each word and takes the slice away; the output is spoiled afterwards, so what was taken must have been complete.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NotDone
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import shapes
from benchmarks.gpu.attention import check_attention
from benchmarks.gpu.part import Options, Reporter, Row, run_part
from benchmarks.gpu.products import Product, candidates, worst_error
from benchmarks.gpu.shapes import Kind, Shape
from commfuse_dp.kernels import by_slices
from commfuse_dp.kernels.inbox_sum import inbox_sum, inbox_sum_reference
from commfuse_dp.kernels.publish import publish
from commfuse_dp.kernels.table import SliceEntry
from commfuse_dp.kernels.tiles import Pass

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CELL_S = 8.0  # a cell may need that long, most of it compilation
# Twice the error of torch's whole product of the same operands and dtype: both round the same sums once, in another order; the
# second term is for products so short that torch's error happens to be zero.
TOLERANCE = 2.0


class Cell(NamedTuple):
    """One check of a GEMM; `all_tiles`: with every tile configuration, not the default one alone."""

    kind: Kind
    shape: Shape
    ranks: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    tf32: bool = False
    all_tiles: bool = False

    @property
    def op(self) -> Pass:
        return self.kind.op

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.") + (" tf32" if self.tf32 else "")
        out = "" if self.out_dtype == self.dtype else f" -> {str(self.out_dtype).removeprefix('torch.')}"
        return f"{self.kind.name} {self.shape.name} N={self.ranks} {name}{out}"


def cells(small: bool) -> list[Cell]:
    chosen = shapes.SMALL if small else shapes.CHECKED
    found = []
    square, odd = chosen[:2]
    for kind in shapes.PLAIN:
        for shape in chosen:
            for ranks in (2,) if small else (1, 3, 8):
                found.append(Cell(kind, shape, ranks, BF16, BF16, all_tiles=shape.name == "layer" and ranks == 8))
        found += [Cell(kind, square, 2, FP16, FP16), Cell(kind, square, 2, FP32, FP32), Cell(kind, square, 2, BF16, FP32)]
        if not small:
            found += [Cell(kind, square, 4, FP32, FP32, tf32=True), Cell(kind, odd, 2, FP32, FP32)]
    for kind in shapes.SEQUENCE:
        found += [Cell(kind, square, 2, BF16, BF16), Cell(kind, odd, 2, BF16, BF16)]
        if not small:
            found += [Cell(kind, chosen[-1], 8, BF16, BF16, all_tiles=True), Cell(kind, square, 4, FP32, FP32, tf32=True)]
    # The small ones, too: they are compiled here, by several processes, so that the sanitizers find them compiled.
    return found if small else found + cells(small=True)


def run(report: Reporter, options: Options) -> None:
    """Kernels against float64 and against torch, with slices that come late."""
    todo = cells(options.small)
    groups: dict[Any, list[Cell]] = {}
    for cell in todo:  # cells of one kernel and dtype share compiled code
        groups.setdefault((cell.kind, cell.dtype, cell.shape.name == "odd", cell.all_tiles), []).append(cell)
    if options.jobs <= 1:
        for cell in todo:
            if report.enough(CELL_S if options.device == "cuda" else 0.0, str(cell)):
                _take(report, cell, [check(cell, options.device, ahead=options.ahead)])
    else:
        _in_parallel(report, list(groups.values()), options)
    generator = random.Random(1)
    with report.guarded("inbox sums"):
        check_sums(report, torch.device(options.device), generator, count=12 if options.small else 60)
    with report.guarded("publishing"):
        check_publishing(report, torch.device(options.device), generator, rounds=3 if options.small else 10)
    with report.guarded("attention"):
        check_attention(report, torch.device(options.device), small=options.small)


def _in_parallel(report: Reporter, groups: Sequence[Sequence[Cell]], options: Options) -> None:
    """Compilation takes most of the time and one core each; the GPU serves all processes."""
    pool = ProcessPoolExecutor(min(options.jobs, len(groups)), mp_context=get_context("spawn"))
    futures = {pool.submit(check_group, group, options.device): group for group in groups}
    try:
        for future in as_completed(futures, timeout=max(report.clock.left - CELL_S, 1.0)):
            group = futures.pop(future)
            with report.guarded(str(group[0])):
                for cell, rows in zip(group, future.result(), strict=True):
                    _take(report, cell, [rows])
    except NotDone:
        for group in futures.values():
            report.fail(f"{group[0]} and {len(group) - 1} more: not done in time")
    finally:
        pool.shutdown(wait=not futures, cancel_futures=True)


def _take(report: Reporter, cell: Cell, results: Sequence[list[Row]]) -> None:
    for rows in results:
        for row in rows:
            report.row(kind="gemm", cell=str(cell), **row)
            if not row["ok"]:
                report.fail(f"{cell} by {row['backend']}: {row['why']}")


def check_group(group: Sequence[Cell], device: str) -> list[list[Row]]:
    return [check(cell, device) for cell in group]


def check(cell: Cell, device: str, *, ahead: bool = False) -> list[Row]:
    """Rows of one cell: each backend, each configuration. ahead: see Options."""
    torch.backends.cuda.matmul.allow_tf32 = cell.tf32
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    pad = torch.zeros(cell.ranks, dtype=torch.int32, device=where) if device == "cuda" else None
    how = {"transposed": cell.kind.transposed, "row_bias": cell.kind.row_bias}
    exact = cell.kind in shapes.SEQUENCE and cell.op != "wgrad"  # their words name messages
    product = Product(cell.op, cell.shape, cell.ranks, cell.dtype, where, pad=pad, out_dtype=cell.out_dtype, exact=exact, **how)
    oracle = product.oracle()
    unfused = worst_error(product.whole()().to(cell.out_dtype), oracle)
    allowed = TOLERANCE * unfused + 1e-6 * oracle.abs().max().item()
    slices_allowed = allowed * max(1, len(product.order)) if cell.op == "dgrad" else allowed  # rounded once per slice
    rows = []
    for number, (name, call, limit) in enumerate(_backends(product, cell, device, allowed, slices_allowed), start=1):
        product.spoil()
        row: Row = {"backend": name, "unfused_error": unfused, "allowed": limit}
        try:
            result = _run_late(product, call, number, ahead=ahead) if device == "cuda" else _run(product, call)
            wrong = worst_error(result, oracle)
            row |= {"error": wrong, "ok": wrong <= limit, "why": f"error {wrong:.3g}, allowed {limit:.3g}"}
        except Exception as failure:
            row |= {"ok": False, "why": f"{type(failure).__name__}: {str(failure).strip()[:300]}"}
        rows.append(row)
    return rows


def _backends(
    product: Product, cell: Cell, device: str, allowed: float, slices_allowed: float
) -> Iterator[tuple[str, Any, float]]:
    if device != "cuda":
        yield "slices", product.by_slices(), slices_allowed
        return
    from commfuse_dp.device.cuda import CudaDevice

    # Slices come behind the calls, so no call may stand ([Note: The host may stand] in device/base.py): kernels are loaded.
    product.by_slices(by_slices.Words(_nothing, _nothing))(0)
    yield "slices", product.by_slices(by_slices.words_of(CudaDevice(product.device))), slices_allowed
    if cell.all_tiles:
        for config in candidates(product, torch.cuda.get_device_capability()):
            yield f"kernel {config}", product.by_kernel(config), allowed
    else:
        yield "kernel", product.by_kernel(None), allowed


def _nothing(entry: SliceEntry, epoch: int) -> None:
    return


def _run(product: Product, call: Any) -> torch.Tensor:
    call(0)
    return product.result()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _run_late(product: Product, call: Any, epoch: int, *, ahead: bool) -> torch.Tensor:
    """The result, where the slices came (or were taken) while the call ran.

    All copies are between pinned host memory and the GPU, so that no kernel is needed beside the one that holds the GPU; by the
    driver, not by torch, whose sanitizer knows nothing of words and would report what they order as a race."""
    from commfuse_dp.device.cuda import CudaDevice

    device = CudaDevice(product.device)
    side = device.side_stream("gather")
    entries = dict(zip(product.order, product.table.entries, strict=True))
    if product.op != "wgrad":
        host = {rank: product.sources[rank].cpu().pin_memory() for rank in product.awaited}
        for rank in product.awaited:
            product.windows[rank].fill_(float("nan"))
        device.wait_event(side, device.record(device.current_stream()))
        if not ahead:  # first the reader: on a machine where it could not wait it would now read NaN
            call(epoch)
        for rank in product.awaited:
            device.copy(_bytes(product.windows[rank]), _bytes(host[rank]), side)
            entry = entries[rank]
            assert entry.pad is not None
            device.write_value(side, entry.pad, entry.index, entry.value if entry.exact else epoch)
        if ahead:
            call(epoch)
        torch.cuda.synchronize()
        return product.result()
    taken = {rank: torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True) for rank, grad in enumerate(product.grads)}
    spoilt = {
        rank: torch.full(grad.shape, float("nan"), dtype=grad.dtype).pin_memory() for rank, grad in enumerate(product.grads)
    }
    device.wait_event(side, device.record(device.current_stream()))
    call(epoch)
    for rank in product.awaited:
        entry, grad = entries[rank], _bytes(product.grads[rank])
        assert entry.pad is not None
        device.wait_value(side, entry.pad, entry.index, epoch)
        device.copy(_bytes(taken[rank]), grad, side)
        device.copy(grad, _bytes(spoilt[rank]), side)  # the kernel must not write again
    torch.cuda.synchronize()
    own = product.grads[product.own].cpu()
    return torch.cat([own if rank == product.own else taken[rank] for rank in range(len(product.grads))]).to(product.device)


# ---- sums and publishing -------------------------------------------------------------------------------------------------
def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, all NaNs alike."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def _shifted(numel: int, dtype: torch.dtype, shift: int, device: torch.device) -> torch.Tensor:
    """On the host pseudo-random, then at an address that is `shift` elements past a multiple of 256 bytes."""
    room = torch.empty(numel + shift, dtype=dtype, device=device)[shift:]
    return room.copy_(torch.randn(numel).to(dtype))


def check_sums(report: Reporter, device: torch.device, pick: random.Random, count: int) -> None:
    """Random calls; the kernel's result bitwise equal to the reference's on the host."""
    implementation = "kernel" if device.type == "cuda" else "reference"
    torch.manual_seed(0)
    wrong = 0
    for number in range(count):
        dtype, out_dtype = pick.choice((BF16, BF16, FP16, FP32, FP64)), pick.choice((BF16, FP16, FP32, FP64))
        ranks = pick.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64)) if number % 4 == 0 else pick.choice((1, 2, 4, 8))
        numel = pick.choice((1, 7, 8, 4095, 4096, 65537, 1 << 20))
        shift = pick.randrange(8)
        shifts = [shift if pick.random() < 0.7 else pick.randrange(8) for _ in range(ranks + 1)]
        divisor, accumulate = pick.choice((None, 2.0, 3.0, 8.0, 7.5)), pick.random() < 0.4
        partials = [_shifted(numel, dtype, shifts[i], device) for i in range(ranks)]
        out = _shifted(numel, out_dtype, shifts[-1], device)
        if dtype == out_dtype and not accumulate and pick.random() < 0.3:
            out = partials[pick.randrange(ranks)]
        want = inbox_sum_reference(
            out.cpu().clone(), [p.cpu().clone() for p in partials], divisor=divisor, accumulate=accumulate
        )
        on_device = inbox_sum_reference(out.clone(), [p.clone() for p in partials], divisor=divisor, accumulate=accumulate)
        inbox_sum(out, partials, divisor=divisor, accumulate=accumulate, implementation=implementation)  # type: ignore[arg-type]
        text = f"inbox sum N={ranks} {dtype}->{out_dtype} {numel} shifts {shifts} divisor {divisor} accumulate {accumulate}"
        for name, got in (("kernel", out), ("reference on the device", on_device)):
            if not _same(got.cpu(), want):
                wrong += 1
                report.fail(f"{text}: {name} differs from the sum on the host")
    report.row(kind="inbox_sum", calls=count, wrong=wrong, ok=wrong == 0)


def check_publishing(report: Reporter, device: torch.device, pick: random.Random, rounds: int) -> None:
    implementation = "kernel" if device.type == "cuda" else "reference"
    wrong = 0
    for number in range(rounds):
        out_dtype = (BF16, FP32, FP16, FP64)[number % 4]
        sources, destinations = [], []
        for _ in range(pick.choice((3, 60, 300))):
            numel = pick.choice((0, 1, 7, 64, 4096, 8193, 100_000))
            shift = pick.randrange(8)
            sources.append(_shifted(numel, pick.choice((FP32, FP32, BF16, FP16, FP64)), shift, device))
            destinations.append(
                torch.empty(numel + 8, dtype=out_dtype, device=device)[shift if pick.random() < 0.7 else 0 :][:numel]
            )
        publish(sources, destinations, implementation=implementation)  # type: ignore[arg-type]
        bad = [
            i for i, (s, d) in enumerate(zip(sources, destinations, strict=True)) if not _same(d.cpu(), s.cpu().to(out_dtype))
        ]
        wrong += len(bad)
        if bad:
            report.fail(f"publish of {len(sources)} shards to {out_dtype}: {len(bad)} differ, the first is number {bad[0]}")
    report.row(kind="publish", calls=rounds, wrong=wrong, ok=wrong == 0)


if __name__ == "__main__":
    sys.exit(run_part("kernels_check", run))
