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
from commfuse_dp.kernels.tiles import Problem, TileConfig

_RUNS = 9
_WARM_UP = 2
_FLUSH_BYTES = 128 << 20  # more than any L2 cache

Call = Callable[[], None]
CallWith = Callable[[TileConfig], None]


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device, vectored: bool) -> torch.Tensor:
    """Unaligned on purpose if the operands measured for are: one element past a multiple of 16 bytes."""
    shift = 0 if vectored else 1
    flat = torch.empty(rows * columns + shift, dtype=dtype, device=device).normal_()
    return flat[shift:].view(rows, columns)


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
    narrow = _random(problem.tokens, problem.columns, dtype, device, vectored)  # x; in dgrad the output
    wide = _random(problem.tokens, out_features, dtype, device, vectored)  # dy; in forward the output
    if problem.op == "forward":
        from commfuse_dp.kernels.gemm_forward import gemm_forward

        y = wide.to(problem.out_dtype)
        return (
            lambda: by_slices.gemm_forward(narrow, table, y),
            lambda config: gemm_forward(narrow, table, y, config=config),
        )
    if problem.op == "dgrad":
        from commfuse_dp.kernels.gemm_dgrad import gemm_dgrad

        dx = narrow.to(problem.out_dtype)
        return lambda: by_slices.gemm_dgrad(wide, table, dx), lambda config: gemm_dgrad(wide, table, dx, config=config)
    from commfuse_dp.kernels.gemm_wgrad import gemm_wgrad

    return (
        lambda: by_slices.gemm_wgrad(wide, narrow, table),
        lambda config: gemm_wgrad(wide, narrow, table, config=config),
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
