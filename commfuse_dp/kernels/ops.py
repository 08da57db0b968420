"""The three products as registered torch ops, for compiled graphs: commfuse::slices_forward, slices_dgrad, slices_wgrad.

A table (addresses, words) is no tensor of the graph, so the ops take a handle of it, given out by `register`, and the epoch of
the step. What a table's slices are is read when the op runs; shapes are arguments.

[Note: The destinations of wgrad]
They lie in a transport's staging memory and are no tensors of the graph. (As arguments that the op mutates they would be cloned
where a graph is made functional, and the transport would send what was there before.) The op therefore looks functional, and
what keeps it in the graph is its token: whoever calls it hands the token on to something that is used, as ops/linear.py does.

[Note: Graphs and time]
Under torch.compile an epoch that changes every step must come in as an argument that is not specialised on. A CUDA graph would
replay one epoch for ever: whoever fuses layers refuses to be captured.
"""

from __future__ import annotations

import weakref

import torch

from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.table import SliceTable


class Bound:
    """A table and who computes with it."""

    def __init__(self, table: SliceTable, gemms: Gemms) -> None:
        self.table = table
        self.gemms = gemms


_BOUND: weakref.WeakValueDictionary[int, Bound] = weakref.WeakValueDictionary()
_next_handle = 0


def register(bound: Bound) -> int:
    """A number under which the ops find it; it does not keep it alive."""
    global _next_handle
    _next_handle += 1
    _BOUND[_next_handle] = bound
    return _next_handle


def _find(handle: int) -> Bound:
    bound = _BOUND.get(handle)
    if bound is None:
        raise RuntimeError("this compiled graph uses a layer whose CommFuse integration was removed: compile the model again")
    return bound


@torch.library.custom_op("commfuse::slices_forward", mutates_args=())
def slices_forward(x: torch.Tensor, handle: int, out_features: int, epoch: int, out_dtype: torch.dtype) -> torch.Tensor:
    """x [tokens, columns] -> y [tokens, out_features]; columns that no slice has are zero."""
    bound = _find(handle)
    complete = bound.table.total_rows == out_features
    y = (torch.empty if complete else torch.zeros)(x.shape[0], out_features, dtype=out_dtype, device=x.device)
    bound.gemms.forward(x, bound.table, y, epoch=epoch)
    return y


@slices_forward.register_fake
def _(x: torch.Tensor, handle: int, out_features: int, epoch: int, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=out_dtype)


@torch.library.custom_op("commfuse::slices_dgrad", mutates_args=())
def slices_dgrad(dy: torch.Tensor, handle: int, columns: int, epoch: int, out_dtype: torch.dtype) -> torch.Tensor:
    """dy [tokens, out_features] -> dx [tokens, columns]."""
    bound = _find(handle)
    dx = torch.empty(dy.shape[0], columns, dtype=out_dtype, device=dy.device)
    bound.gemms.dgrad(dy, bound.table, dx, epoch=epoch)
    return dx


@slices_dgrad.register_fake
def _(dy: torch.Tensor, handle: int, columns: int, epoch: int, out_dtype: torch.dtype) -> torch.Tensor:
    return dy.new_empty(dy.shape[0], columns, dtype=out_dtype)


@torch.library.custom_op("commfuse::slices_wgrad", mutates_args=())
def slices_wgrad(dy: torch.Tensor, x: torch.Tensor, handle: int, epoch: int) -> torch.Tensor:
    """Writes the slices of the table, and their words behind them. Returns an empty token."""
    bound = _find(handle)
    bound.gemms.wgrad(dy, x, bound.table, epoch=epoch)
    return dy.new_empty(0)


@slices_wgrad.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, handle: int, epoch: int) -> torch.Tensor:
    return dy.new_empty(0)
