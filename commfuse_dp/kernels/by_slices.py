"""The three products slice by slice, each slice one GEMM of torch (cuBLAS on a GPU): the baseline, and what runs where the
kernels cannot. Same arguments as in gemm_forward, gemm_dgrad and gemm_wgrad; any device, any dtype.

What a kernel does inside itself is done here between the GEMMs, by a callback that the caller gives:

    wait(entry, epoch)      the current stream waits until the slice has come
    signal(entry, epoch)    the slice's word is written behind what is in the current stream

`words_of(device)` makes both from a device layer. In bfloat16 and float16 dgrad puts the slices together as they come, and is
one GEMM behind the last: adding up by slices would round once a slice (see [Note: Sums in low precision] in ops/products.py).
One difference from the kernels is left: a product in another dtype than its operands' is first rounded to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Device, as_int32
from commfuse_dp.kernels.table import SliceEntry, SliceTable, check_row_bias

Word = Callable[[SliceEntry, int], None]  # (entry, epoch); called for entries that have a word only


class Words(NamedTuple):
    """None: only tables without words can be served."""

    wait: Word | None = None
    signal: Word | None = None


@cache  # then a call is no frame
def is_narrow(dtype: torch.dtype) -> bool:
    """A sum over slices must not be rounded to this type slice by slice: see [Note: Sums in low precision]."""
    return dtype.itemsize < 4


def words_of(device: Device) -> Words:
    """Waits and signals in the current stream, by stream memory operations: no multiprocessor is occupied."""

    def wait(entry: SliceEntry, epoch: int) -> None:
        assert entry.pad is not None
        value = entry.value if entry.exact else entry.value + epoch
        device.wait_value(device.current_stream(), entry.pad, entry.index, as_int32(value), exact=entry.exact)

    def signal(entry: SliceEntry, epoch: int) -> None:
        assert entry.pad is not None
        device.write_value(device.current_stream(), entry.pad, entry.index, as_int32(entry.value + epoch))

    return Words(wait, signal)


def _call(callback: Word | None, entry: SliceEntry, epoch: int, what: str) -> None:
    if entry.pad is None:
        return
    if callback is None:
        raise ValueError(
            f"the slice at row {entry.first_row} has a word to {what}, but no `{what}` was given: "
            "pass by_slices.words_of(device), or a table without words"
        )
    callback(entry, epoch)


def _wait(callback: Word | None, entries: Sequence[SliceEntry], number: int, epoch: int) -> None:
    """Wait for a slice, unless the one before it came with it."""
    entry, before = entries[number], entries[number - 1] if number else None
    if (
        before is None
        or entry.pad is not before.pad
        or (entry.index, entry.value, entry.exact) != (before.index, before.value, before.exact)
    ):
        _call(callback, entry, epoch, "wait")


def gemm_forward(
    x: torch.Tensor,
    table: SliceTable,
    y: torch.Tensor,
    *,
    row_bias: torch.Tensor | None = None,
    epoch: int = 0,
    wait: Word | None = None,
) -> None:
    """y[:, rows of s] = x @ W_s.T for every slice s, plus b_s to each row or row_bias [tokens] to each column.

    x: [tokens, columns], y: [tokens, >= table.end_row]. Raises ValueError for a row_bias that does not fit.
    """
    if row_bias is not None:
        check_row_bias(row_bias, x, table)
    for number, entry in enumerate(table.entries):
        _wait(wait, table.entries, number, epoch)
        out = y.narrow(1, entry.first_row, entry.rows)
        direct = out.dtype == x.dtype
        target = out if direct else torch.empty_like(out, dtype=x.dtype, memory_format=torch.contiguous_format)
        if row_bias is not None:  # seen transposed, where a bias is a row: BLAS adds it in its epilogue
            torch.addmm(row_bias, entry.data, x.t(), out=target.t())
        elif entry.bias is None:
            torch.mm(x, entry.data.t(), out=target)
        else:
            torch.addmm(entry.bias, x, entry.data.t(), out=target)
        if not direct:
            out.copy_(target)


def gemm_dgrad(dy: torch.Tensor, table: SliceTable, dx: torch.Tensor, *, epoch: int = 0, wait: Word | None = None) -> None:
    """dx = sum over slices s of dy[:, rows of s] @ W_s. dy: [tokens, >= table.end_row], dx: [tokens, columns], overwritten."""
    direct = dx.dtype == dy.dtype
    total = dx if direct else torch.empty_like(dx, dtype=dy.dtype)
    if not len(table):
        total.zero_()
    elif len(table) > 1 and is_narrow(dy.dtype):
        torch.mm(*_join(dy, table, epoch, wait), out=total)
    else:
        for number, entry in enumerate(table.entries):
            _wait(wait, table.entries, number, epoch)
            part = dy.narrow(1, entry.first_row, entry.rows)
            if number:
                total.addmm_(part, entry.data)
            else:
                torch.mm(part, entry.data, out=total)
    if not direct:
        dx.copy_(total)


def _join(dy: torch.Tensor, table: SliceTable, epoch: int, wait: Word | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of dy that the table has rows for, and these rows put together: [tokens, rows], [rows, columns]."""
    low = min(entry.first_row for entry in table.entries)
    dense = table.end_row - low == table.total_rows
    weight = torch.empty(table.total_rows, table.columns, dtype=table.dtype, device=table.device)
    at = 0
    for number, entry in enumerate(table.entries):
        _wait(wait, table.entries, number, epoch)
        weight.narrow(0, entry.first_row - low if dense else at, entry.rows).copy_(entry.data)
        at += entry.rows
    if dense:
        return dy.narrow(1, low, table.total_rows), weight
    return torch.cat([dy.narrow(1, entry.first_row, entry.rows) for entry in table.entries], dim=1), weight


def gemm_wgrad(dy: torch.Tensor, x: torch.Tensor, table: SliceTable, *, epoch: int = 0, signal: Word | None = None) -> None:
    """dW_s = dy[:, rows of s].T @ x for every slice s, each followed by its signal. dy: [tokens, >= table.end_row]."""
    for entry in table.entries:
        part = dy.narrow(1, entry.first_row, entry.rows).t()
        if entry.data.dtype == dy.dtype:
            torch.mm(part, x, out=entry.data)
        else:
            entry.data.copy_(torch.mm(part, x))
        _call(signal, entry, epoch, "signal")
