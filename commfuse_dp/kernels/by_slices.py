"""The three products slice by slice, each slice one GEMM of torch (cuBLAS on a GPU): the baseline, and what runs where the
kernels cannot. Same arguments as in gemm_forward, gemm_dgrad and gemm_wgrad; any device, any dtype.

What a kernel does inside itself is done here between the GEMMs, by a callback that the caller gives:

    wait(entry, epoch)      the current stream stands until the slice has come
    signal(entry, epoch)    the slice's word is written behind what is in the current stream

`words_of(device)` makes both from a device layer. Differences from the kernels, all of them in rounding: dgrad adds up in dx's
dtype, slice after slice (N roundings instead of one), and a product in another dtype than its operands' is first rounded to
theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Device, as_int32
from commfuse_dp.kernels.table import SliceEntry, SliceTable

Word = Callable[[SliceEntry, int], None]  # (entry, epoch); called for entries that have a word only


class Words(NamedTuple):
    """None: only tables without words can be served."""

    wait: Word | None = None
    signal: Word | None = None


def words_of(device: Device) -> Words:
    """Waits and signals in the current stream, by stream memory operations: no multiprocessor is occupied."""

    def wait(entry: SliceEntry, epoch: int) -> None:
        assert entry.pad is not None
        device.wait_value(device.current_stream(), entry.pad, entry.index, as_int32(entry.value + epoch))

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


def gemm_forward(x: torch.Tensor, table: SliceTable, y: torch.Tensor, *, epoch: int = 0, wait: Word | None = None) -> None:
    """y[:, rows of s] = x @ W_s.T (+ b_s) for every slice s. x: [tokens, columns], y: [tokens, >= table.end_row]."""
    for entry in table.entries:
        _call(wait, entry, epoch, "wait")
        out = y.narrow(1, entry.first_row, entry.rows)
        direct = out.dtype == x.dtype
        target = out if direct else torch.empty_like(out, dtype=x.dtype, memory_format=torch.contiguous_format)
        if entry.bias is None:
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
    for number, entry in enumerate(table.entries):
        _call(wait, entry, epoch, "wait")
        part = dy.narrow(1, entry.first_row, entry.rows)
        if number:
            total.addmm_(part, entry.data)
        else:
            torch.mm(part, entry.data, out=total)
    if not direct:
        dx.copy_(total)


def gemm_wgrad(dy: torch.Tensor, x: torch.Tensor, table: SliceTable, *, epoch: int = 0, signal: Word | None = None) -> None:
    """dW_s = dy[:, rows of s].T @ x for every slice s, each followed by its signal. dy: [tokens, >= table.end_row]."""
    for entry in table.entries:
        part = dy.narrow(1, entry.first_row, entry.rows).t()
        if entry.data.dtype == dy.dtype:
            torch.mm(part, x, out=entry.data)
        else:
            entry.data.copy_(torch.mm(part, x))
        _call(signal, entry, epoch, "signal")
