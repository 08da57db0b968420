"""Part (d): times of the kernels, and the targets.

* Products, all slices there: the kernel with its fastest tiles, torch slice by slice, and one cuBLAS product of the whole.
* Products, slices coming over the length of the GEMM: kernel and torch slice by slice against the least that any order of such
  slices takes (schedule.bound_ms), of two times measured in the same run: the kernel with all slices there, the copies alone.
* Inbox sums and publishing: bytes read and written per time, against a copy inside the device measured in the same run.
* The host's time for a fused product, enqueued behind others; and whether the host goes on while the device stands.

Events, medians of rounds in which the variants take turns, L2 flushed before every run, random data, 8192 tokens, bfloat16.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu import schedule, shapes
from benchmarks.gpu.clock import GpuClock, copy_bandwidth, host_link_bandwidth, host_microseconds
from benchmarks.gpu.figures import doubtful, gib_per_s, paired_ratio, spread, teraflops
from benchmarks.gpu.part import Options, Reporter, Row, run_part
from benchmarks.gpu.products import Product, candidates
from benchmarks.gpu.shapes import Kind, Shape
from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.by_slices import words_of
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.inbox_sum import inbox_sum
from commfuse_dp.kernels.publish import PublishPlan
from commfuse_dp.kernels.tiles import TileConfig

ROUNDS = 15
TRIAL_ROUNDS = 3  # of each tile configuration
MOST_CANDIDATES = 6  # the likeliest; each costs seconds of compilation the first time
SPREAD = 0.9  # the last slice comes at this part of the GEMM's time
SUMMED = 4096 * 14336  # elements of a gradient
HOST_CALLS = 150
HOST_STEPS = 20  # of a model of up to 64 layers
STANDING_S = 2.0  # the device stands that long at most while the host's calls are timed

TARGET_MEDIAN, TARGET_LEAST, TARGET_ARRIVALS, TARGET_BANDWIDTH = 0.95, 0.88, 1.05, 0.90
TARGET_HOST_FORWARD_US, TARGET_HOST_BACKWARD_US = 40.0, 80.0


def run(report: Reporter, options: Options) -> None:
    """Times of all kernels against their targets."""
    if options.device != "cuda":
        report.skip("times of kernels need a GPU")
        return
    device = torch.device("cuda", 0)
    clock = GpuClock(device)
    bandwidth = copy_bandwidth(clock)
    links = host_link_bandwidth(clock)
    report.outcome.notes |= {
        "copy_gib_per_s": gib_per_s(bandwidth, 1.0),
        "host_to_device_gib_per_s": gib_per_s(links["in"], 1.0),
        "device_to_host_gib_per_s": gib_per_s(links["out"], 1.0),
        "rounds": ROUNDS,
    }
    with report.guarded("inbox sums"):
        sums(report, clock, bandwidth)
    with report.guarded("publishing"):
        publishing(report, clock, bandwidth)
    with report.guarded("host time"):
        host_time(report, device)
    with report.guarded("host time of a layer"):
        layer_time(report)
    for kinds, shape, ranks in plan(options.small):
        for kind in kinds:
            what = f"{kind.name} {shape.name} N={ranks}"
            if report.enough(12.0, what):
                with report.guarded(what):
                    product_row(report, clock, kind, shape, ranks, links)
    judge_products(report)


def plan(small: bool) -> list[tuple[tuple[Kind, ...], Shape, int]]:
    """What is timed, the most telling first, since time may run out."""
    if small:
        return [(shapes.PLAIN, shapes.CHECKED[0], 2), (shapes.SEQUENCE, shapes.CHECKED[0], 2)]
    order = [(shape, 8) for shape in shapes.LLAMA] + [(shape, 2) for shape in shapes.LLAMA]
    order += [(shape, 8) for shape in shapes.OTHERS] + [(shape, 4) for shape in shapes.LLAMA]
    jobs = [(shapes.PLAIN, shape, ranks) for shape, ranks in order]
    return [*jobs[:4], (shapes.SEQUENCE, shapes.SEQUENCE_TIMED, 8), *jobs[4:]]


# ---- products ------------------------------------------------------------------------------------------------------------
def fastest(product: Product, clock: GpuClock) -> tuple[TileConfig | None, dict[str, str]]:
    """The fastest tiles, and what became of those that failed."""
    best: tuple[float, TileConfig] | None = None
    failed = {}
    for config in candidates(product, torch.cuda.get_device_capability(product.device), MOST_CANDIDATES):
        call = product.by_kernel(config)
        try:
            middle = statistics.median(clock.rounds({"": lambda call=call: call(0)}, TRIAL_ROUNDS, warm_up=1)[""])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise
            failed[str(config)] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
            continue
        if best is None or middle < best[0]:
            best = (middle, config)
    return (best[1] if best else None), failed


def product_row(report: Reporter, clock: GpuClock, kind: Kind, shape: Shape, ranks: int, links: dict[str, float]) -> None:
    """One line of figures: all slices there, and slices that come one by one."""
    pad = torch.zeros(ranks, dtype=torch.int32, device=clock.device)
    how = {"transposed": kind.transposed, "row_bias": kind.row_bias}
    product = Product(kind.op, shape, ranks, torch.bfloat16, clock.device, pad=pad, **how)
    config, failed = fastest(product, clock)
    row: Row = {"kind": "product", "op": kind.name, "shape": shape.name, "ranks": ranks, "tiles": str(config), "failed": failed}
    if config is None:
        report.row(**row)
        report.fail(f"{kind.name} {shape.name}: no tile configuration runs: {failed}")
        return
    kernel = product.by_kernel(config)
    without_words = Product(kind.op, shape, ranks, torch.bfloat16, clock.device, **how)
    slices, whole = without_words.by_slices(), product.whole()
    calls = {"kernel": lambda: kernel(0), "slices": lambda: slices(0), "whole": whole}
    for _ in range(2):  # again if the device was not quiet
        times = clock.rounds(calls, ROUNDS)
        if not doubtful(times):
            break
    row |= {f"{name}_ms": spread(values) for name, values in times.items()}
    row["kernel_tflops"] = teraflops(shape.operations, statistics.median(times["kernel"]))
    row["whole_over_kernel"] = paired_ratio(times["whole"], times["kernel"])
    row["whole_over_slices"] = paired_ratio(times["whole"], times["slices"])
    row["doubtful"] = doubtful(times)
    if product.awaited:
        row |= arrivals(clock, product, kernel, statistics.median(times["kernel"]), links)
    report.row(**row)


def arrivals(clock: GpuClock, product: Product, kernel: Callable[[int], None], gemm_ms: float, links: dict[str, float]) -> Row:
    """The kernel while slices come (forward, dgrad) or leave (wgrad), over SPREAD of its time."""
    from commfuse_dp.device.cuda import CudaDevice

    incoming = product.op != "wgrad"
    device = CudaDevice(product.device)
    side = device.side_stream("gather" if incoming else "scatter")
    planned = schedule.spread_over(
        gemm_ms, SPREAD, len(product.awaited), links["in" if incoming else "out"], most_bytes=512 << 20
    )
    host = torch.empty(planned.nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(planned.nbytes, dtype=torch.uint8, device=product.device)
    entries = {rank: entry for rank, entry in zip(product.order, product.table.entries, strict=True) if rank != product.own}
    epoch = 1

    def transfer() -> None:
        with device.on(side):
            if incoming:
                there.copy_(host, non_blocking=True)
            else:
                host.copy_(there, non_blocking=True)

    def together(compute: Callable[[int], None] | None) -> None:
        nonlocal epoch
        epoch += 1
        device.wait_event(side, device.record(device.current_stream()))
        if compute and not incoming:
            compute(epoch)  # it waits for nobody; the copies wait for it
        for entry in entries.values():
            assert entry.pad is not None
            if not incoming and compute:
                device.wait_value(side, entry.pad, entry.index, epoch)
            transfer()
            if incoming:
                device.write_value(side, entry.pad, entry.index, epoch)
        if compute and incoming:
            compute(epoch)
        device.wait_event(device.current_stream(), device.record(side))

    by_slices = product.by_slices(words_of(device))
    calls = {"kernel": lambda: together(kernel), "slices": lambda: together(by_slices), "copies": lambda: together(None)}
    times = clock.rounds(calls, ROUNDS)
    copies_ms = statistics.median(times["copies"])
    bound = schedule.bound_ms(gemm_ms, copies_ms, len(product.order))
    return {
        "arrivals_ms": spread(times["kernel"]),
        "slices_arrivals_ms": spread(times["slices"]),
        "copies_ms": spread(times["copies"]),
        "arrivals_bound_ms": bound,
        "arrivals_over_bound": statistics.median(times["kernel"]) / bound,
        "slices_over_bound": statistics.median(times["slices"]) / bound,
        "copy_bytes": planned.nbytes,
    }


def judge_products(report: Reporter) -> None:
    """The targets over all products that were timed. Skinny and odd ones are shown; the targets speak of the large ones."""
    names = {shape.name for shape in shapes.LLAMA}
    rows = [row for row in report.outcome.rows if row["kind"] == "product" and row["shape"] in names and "kernel_ms" in row]
    for target in product_targets(rows):
        report.target(*target[:3], at_least=target[3])


def product_targets(rows: Iterable[Row]) -> list[tuple[str, float, float, bool]]:
    """(name, value, limit, at least) of the rows of each product and of all."""
    rows = list(rows)
    found = []
    for op in tiles.PASSES:
        own = [row["whole_over_kernel"] for row in rows if row["op"] == op]
        if own:
            found.append((f"{op}: cuBLAS whole / kernel, median over shapes", statistics.median(own), TARGET_MEDIAN, True))
    if rows:
        chosen = [max(row["whole_over_kernel"], row["whole_over_slices"]) for row in rows]
        least = min(row["whole_over_kernel"] for row in rows)
        found.append(("cuBLAS whole / kernel, worst shape", least, TARGET_LEAST, True))
        found.append(("cuBLAS whole / automatic choice, worst shape", min(chosen), TARGET_LEAST, True))
    for op in tiles.PASSES:
        late = [row["arrivals_over_bound"] for row in rows if row["op"] == op and "arrivals_over_bound" in row]
        if late:
            text = f"{op}: time with slices coming / bound of its slices, median over shapes"
            found.append((text, statistics.median(late), TARGET_ARRIVALS, False))
    return found


# ---- memory-bound kernels ------------------------------------------------------------------------------------------------
def sums(report: Reporter, clock: GpuClock, bandwidth: float) -> None:
    """A gradient, its partials in bfloat16."""
    shares, numel = [], SUMMED
    for ranks, accumulate in ((2, False), (4, False), (8, False), (8, True)):
        partials = [torch.randn(numel, device=clock.device).bfloat16() for _ in range(ranks)]
        out = torch.zeros(numel, device=clock.device)
        nbytes = ranks * numel * 2 + numel * 4 * (2 if accumulate else 1)

        def call(out: torch.Tensor = out, partials: list[torch.Tensor] = partials, accumulate: bool = accumulate) -> None:
            inbox_sum(out, partials, divisor=float(len(partials)), accumulate=accumulate, implementation="kernel")

        middle = clock.rounds({"sum": call}, ROUNDS)["sum"]
        share = nbytes / statistics.median(middle) / bandwidth
        shares.append(share)
        report.row(
            kind="inbox_sum",
            ranks=ranks,
            accumulate=accumulate,
            ms=spread(middle),
            gib_per_s=gib_per_s(nbytes, statistics.median(middle)),
            of_copy=share,
        )
    report.target("inbox sum: bandwidth / copy bandwidth, worst", min(shares), TARGET_BANDWIDTH)


def publishing(report: Reporter, clock: GpuClock, bandwidth: float) -> None:
    """An eighth of four Llama-3-8B layers, float32 to bfloat16, norms included."""
    per_layer = [4096, 4096, *(shape.in_features * shape.out_features for shape in shapes.LLAMA)]
    sources = [torch.randn(numel // 8, device=clock.device) for _ in range(4) for numel in per_layer]
    destinations = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    plan = PublishPlan(sources, destinations, implementation="kernel")
    nbytes = sum(source.numel() for source in sources) * 6
    times = clock.rounds(
        {"kernel": plan.run, "foreach": lambda: torch._foreach_copy_(destinations, sources)},
        ROUNDS,
    )
    middle = statistics.median(times["kernel"])
    report.row(
        kind="publish",
        shards=len(sources),
        ms=spread(times["kernel"]),
        torch_foreach_ms=spread(times["foreach"]),
        gib_per_s=gib_per_s(nbytes, middle),
        of_copy=nbytes / middle / bandwidth,
    )
    report.target("publish: bandwidth / copy bandwidth", nbytes / middle / bandwidth, TARGET_BANDWIDTH)


# ---- the host ------------------------------------------------------------------------------------------------------------
def host_time(report: Reporter, device: torch.device) -> None:
    """Microseconds of the host for the products of one layer (choice, checks, launch), and a call while the device stands."""
    from commfuse_dp.device.cuda import CudaDevice
    from commfuse_dp.kernels.choice import Chooser

    shape = Shape("host", 256, 1024, 1024)
    gemms = Gemms(Chooser("triton"), CudaDevice(device))
    pad = torch.zeros(8, dtype=torch.int32, device=device)
    products = {op: Product(op, shape, 8, torch.bfloat16, device, pad=pad) for op in tiles.PASSES}
    calls: dict[str, Callable[[], Any]] = {
        op: lambda op=op, product=product: getattr(gemms, op)(*product.arguments(), epoch=0) for op, product in products.items()
    }
    medians = {}
    for op, call in calls.items():
        spent = host_microseconds(call, HOST_CALLS)
        medians[op] = statistics.median(spent)
        report.row(kind="host", op=op, microseconds=spread(spent))
    report.target("host time of a forward product", medians["forward"], TARGET_HOST_FORWARD_US, at_least=False, unit="us")
    backward = medians["dgrad"] + medians["wgrad"]
    report.target("host time of dgrad and wgrad", backward, TARGET_HOST_BACKWARD_US, at_least=False, unit="us")
    standing = host_while_the_device_stands(device, calls["forward"])
    report.row(kind="host", op="forward while the device stands", microseconds={"p50": 1e6 * standing})
    if standing > STANDING_S / 2:
        report.fail(f"a forward product waited for the device: the call took {standing:.2f} s while the stream stood")


def layer_time(report: Reporter) -> None:
    """The host's time for one fused linear of a training step, communication and launches included, and its driver calls."""
    from benchmarks.micro.device_overhead import measure
    from benchmarks.one_rank import UnwaitingDevice

    for ranks in (2, 4, 8):
        row = measure(ranks, HOST_STEPS, UnwaitingDevice, config={"kernels": "triton"})
        report.row(kind="host_layer", **row)
        for name, limit in (("forward", TARGET_HOST_FORWARD_US), ("backward", TARGET_HOST_BACKWARD_US)):
            text = f"host time of a fused linear, {name}, N = {ranks}"
            report.target(text, row[name]["microseconds"], limit, at_least=False, unit="us")


def host_while_the_device_stands(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of a call whose stream stands in front of it; a timer frees the stream if the host waits, too."""
    from commfuse_dp.device.base import Word
    from commfuse_dp.device.cuda import CudaDevice

    cuda = CudaDevice(device)
    gate = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    timer = threading.Timer(STANDING_S, cuda.poke, args=([Word(gate, 0, 1)],))
    timer.start()
    cuda.wait_value(cuda.current_stream(), gate, 0, 1)
    start = time.perf_counter()
    call()
    spent = time.perf_counter() - start
    timer.cancel()
    cuda.poke([Word(gate, 0, 1)])
    torch.cuda.synchronize()
    return spent


if __name__ == "__main__":
    sys.exit(run_part("timings", run))
