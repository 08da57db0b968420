"""Measuring one product on the GPU that is there: the kernel with each candidate's tiles, and torch slice by slice.

Random operands, no words to wait for, the L2 cache flushed before every run, times by events, medians. One trial takes a second
or two, most of it compilation, and needs the memory of the operands once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.kernels import by_slices
from commfuse_dp.kernels.measured import Trial
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.kernels.tiles import OPERANDS, Problem, TileConfig

_RUNS = 9
_WARM_UP = 2
_FLUSH_BYTES = 128 << 20  # more than any L2 cache

Call = Callable[[], None]
CallWith = Callable[[TileConfig], None]


def _random(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, vectored: bool, transposed: bool = False
) -> torch.Tensor:
    """Aligned as the operands measured for: rows (columns, transposed) at multiples of 16 bytes, or one element past."""
    if transposed:
        return _random(columns, rows, dtype, device, vectored).t()
    shift, width = (0, -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize) if vectored else (1, columns)
    flat = torch.empty(rows * width + shift, dtype=dtype, device=device).normal_()
    return flat[shift:].view(rows, width)[:, :columns]


def operands(problem: Problem, device: torch.device) -> tuple[Call, CallWith]:
    """The product by slices, and by the kernel with a configuration, on random operands."""
    dtype, vectored = problem.dtype, problem.vectored
    out_features = sum(problem.rows)
    weight_dtype = problem.out_dtype if problem.op == "wgrad" else dtype
    entries, at = [], 0
    for rows in problem.rows:
        data = _random(rows, problem.columns, weight_dtype, device, vectored)
        bias = torch.empty(rows, dtype=weight_dtype, device=device).normal_() if problem.has_bias else None
        entries.append(SliceEntry(data, at, bias))
        at += rows
    table = SliceTable(entries)
    widths = {"x": problem.columns, "dx": problem.columns, "y": out_features, "dy": out_features}
    first, second = (
        _random(problem.tokens, widths[name], problem.out_dtype if name in ("y", "dx") else dtype, device, vectored, transposed)
        for name, transposed in zip(OPERANDS[problem.op], problem.transposed, strict=True)
    )
    if problem.op == "forward":
        from commfuse_dp.kernels.gemm_forward import gemm_forward

        return (
            lambda: by_slices.gemm_forward(first, table, second),
            lambda config: gemm_forward(first, table, second, config=config),
        )
    if problem.op == "dgrad":
        from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad

        return (
            lambda: by_slices.gemm_dgrad(first, table, second),
            lambda config: gemm_dgrad(first, table, second, config=config),
        )
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    return (
        lambda: by_slices.gemm_wgrad(first, second, table),
        lambda config: gemm_wgrad(first, second, table, config=config),
    )


def time_ms(call: Call, flush: torch.Tensor) -> float:
    """Median milliseconds of a call's work on the current stream, each run with a cold L2 cache."""
    for _ in range(_WARM_UP):
        call()
    marks = []
    for _ in range(_RUNS):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        marks.append((start, stop))
    marks[-1][1].synchronize()  # not the device: other streams may wait for peers
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def first_line(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def measure(problem: Problem, device: torch.device, configs: Sequence[TileConfig]) -> Trial:
    """Run it. Waits for the device. Raises torch.OutOfMemoryError if the operands do not fit beside what is there."""
    with torch.cuda.device(device):
        by_blas, by_kernel = operands(problem, device)
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        times: dict[TileConfig, float] = {}
        failed: dict[TileConfig, str] = {}
        for config in configs:
            try:
                times[config] = time_ms(lambda config=config: by_kernel(config), flush)  # type: ignore[misc]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler may raise: this candidate is out, and says why
                failed[config] = first_line(error)
        return Trial(time_ms(by_blas, flush), times, failed)
