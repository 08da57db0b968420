"""`column_parallel` and `row_parallel` in graphs of torch.compile: the same passes as registered ops.

To a graph an op is a function of tensors and numbers. So the ranks that a call goes over lie in a table, under a number of this
call alone, which is a constant of the graph: see [Note: Calls in graphs] in operands.py. Which gradients are wanted is decided
while the graph is traced. Where the ranks' sizes are not given they are taken to be equal; whether they are is compared when
the op runs.

The module is imported while a graph is traced, and not before: what it decorates imports the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.ops.column_parallel import Column, Save, column_backward, column_forward
from commfuse_dp.ops.operands import call_number
from commfuse_dp.ops.row_parallel import Row, row_backward, row_forward
from commfuse_dp.ops.sequence import Place, Tokens, agree_on, place_of, shape_with

_SAVES: tuple[Save, ...] = ("shard", "gathered")
_places: dict[int, Place] = {}


# ---- while a graph is traced -----------------------------------------------------------------------------------------
@torch.compiler.assume_constant_result
def place_number(group: dist.ProcessGroup | None, order: str, slices_per_rank: int | None, name: str) -> int:
    """Of one call in a graph. The place stays for the life of the process, as compiled graphs do."""
    number = call_number()
    _places[number] = place_of(group, None, order, slices_per_rank, name)
    return number


@torch.compiler.assume_constant_result
def world_size_of(number: int) -> int:
    return _places[number].world_size


def bits_of(flags: Sequence[bool]) -> int:
    total = 0
    for at, flag in enumerate(flags):
        total += (1 << at) if flag else 0
    return total


def _flags(bits: int, count: int) -> tuple[bool, ...]:
    return tuple(bool(bits >> at & 1) for at in range(count))


def _tokens(shard: torch.Tensor, dim: int, sizes: Sequence[int]) -> Tokens:
    outer, inner = torch.Size(shard.shape[:dim]).numel(), torch.Size(shard.shape[dim + 1 : -1]).numel()
    return Tokens(int(outer), int(inner), tuple(sizes))


# ---- columns ---------------------------------------------------------------------------------------------------------
def column_in_graph(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    dim: int,
    sizes: Sequence[int] | None,
    save: str,
    number: int,
) -> tuple[torch.Tensor, ...]:
    found = list(sizes) if sizes is not None else [x.shape[dim]] * world_size_of(number)
    recorded = torch.is_grad_enabled()
    wanted = bits_of([recorded and t is not None and t.requires_grad for t in (x, *weights, *biases)])
    present = [bias for bias in biases if bias is not None]
    has_bias = bits_of([bias is not None for bias in biases])
    outputs = torch.ops.commfuse.column_parallel(
        x, [*weights, *present], len(weights), has_bias, dim, found, _SAVES.index(save), wanted, number
    )
    return tuple(outputs[: len(weights)])


class _Columns(NamedTuple):
    """What the ops are told beside their tensors."""

    weights: int  # how many
    has_bias: int  # which of them, in bits
    dim: int
    sizes: Sequence[int]
    save: int  # in _SAVES
    wanted: int  # gradients of x, weights, biases, in bits
    number: int  # of the place

    @property
    def place(self) -> Place:
        return _places[self.number]

    @property
    def flags(self) -> tuple[bool, ...]:
        return _flags(self.wanted, 1 + 2 * self.weights)

    @property
    def keeps(self) -> bool:
        """The gathered input is kept for backward."""
        return _SAVES[self.save] == "gathered" and any(self.flags[1 : 1 + self.weights])

    @property
    def present(self) -> list[bool]:
        """Which gradients are wanted of x, of the weights, and of those biases that exist."""
        of_biases = zip(self.flags[1 + self.weights :], _flags(self.has_bias, self.weights), strict=True)
        return [*self.flags[: 1 + self.weights], *(flag for flag, exists in of_biases if exists)]

    def split(self, params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """(weights, biases)"""
        left = iter(params[self.weights :])
        return list(params[: self.weights]), [next(left) if flag else None for flag in _flags(self.has_bias, self.weights)]

    def call(self, tokens: Tokens) -> Column:
        return Column(self.place, tokens, self.dim, _SAVES[self.save], self.flags)


_COLUMNS = "SymInt count, SymInt has_bias, SymInt dim, SymInt[] sizes, SymInt save, SymInt wanted, SymInt number"
_COLUMN_FORWARD = f"(Tensor x, Tensor[] params, {_COLUMNS}) -> Tensor[]"
_COLUMN_BACKWARD = f"(Tensor[] grads, Tensor saved, Tensor[] params, {_COLUMNS}) -> Tensor[]"


@torch.library.custom_op("commfuse::column_parallel", mutates_args=(), schema=_COLUMN_FORWARD)
def column_op(x: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    """The outputs, then the gathered input or an empty tensor."""
    told = _Columns(*how)
    weights, biases = told.split(params)
    own, more = int(x.shape[told.dim]), {"features": x.shape[-1], "save": _SAVES[told.save]}
    tokens = agree_on(told.place, x, told.dim, told.flags, told.sizes, own, **more)
    ys, kept = column_forward(x.contiguous(), weights, biases, told.call(tokens))
    return [*ys, kept if kept is not None else x.new_empty(0)]


@column_op.register_fake
def _(x: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    told = _Columns(*how)
    length = sum(told.sizes)
    ys = [x.new_empty(shape_with(x, told.dim, length, weight.shape[0])) for weight in params[: told.weights]]
    return [*ys, x.new_empty(shape_with(x, told.dim, length, x.shape[-1])) if told.keeps else x.new_empty(0)]


@torch.library.custom_op("commfuse::column_parallel_backward", mutates_args=(), schema=_COLUMN_BACKWARD)
def column_backward_op(
    grads: Sequence[torch.Tensor], saved: torch.Tensor, params: Sequence[torch.Tensor], *how: Any
) -> list[torch.Tensor]:
    """dx, dW_i, db_i; empty tensors where not wanted."""
    told = _Columns(*how)
    weights, biases = told.split(params)
    dx, dws, dbs = column_backward(grads, saved.contiguous(), weights, told.call(_tokens(saved, told.dim, told.sizes)))
    found = [dx, *dws, *(db for db, bias in zip(dbs, biases, strict=True) if bias is not None)]
    return [grad if grad is not None else saved.new_empty(0) for grad in found]


@column_backward_op.register_fake
def _(grads: Sequence[torch.Tensor], saved: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    told = _Columns(*how)
    want_x, *want_params = told.present
    own = shape_with(saved, told.dim, told.sizes[told.place.rank], saved.shape[-1])
    dx = saved.new_empty(own) if want_x else saved.new_empty(0)
    return [
        dx,
        *(param.new_empty(param.shape) if w else saved.new_empty(0) for w, param in zip(want_params, params, strict=True)),
    ]


def _column_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, params, *ctx.how = inputs
    told = _Columns(*ctx.how)
    ctx.shapes = [y.shape for y in output[: told.weights]]
    ctx.save_for_backward(output[told.weights] if told.keeps else x, *params)


def _column_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    saved, *params = ctx.saved_tensors
    told = _Columns(*ctx.how)
    dense = [saved.new_zeros(shape) if g is None else g for g, shape in zip(grads[: told.weights], ctx.shapes, strict=True)]
    found = torch.ops.commfuse.column_parallel_backward(dense, saved, params, *told)
    want_x, *want_params = told.present
    of_params = [grad if flag else None for grad, flag in zip(found[1:], want_params, strict=True)]
    return (found[0] if want_x else None, of_params, *(None,) * len(told))


column_op.register_autograd(_column_backward, setup_context=_column_context)


# ---- rows ------------------------------------------------------------------------------------------------------------
def row_in_graph(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    sizes: Sequence[int],
    partial_dtype: torch.dtype,
    number: int,
) -> torch.Tensor:
    recorded = torch.is_grad_enabled()
    wanted = bits_of([recorded and t is not None and t.requires_grad for t in (x, weight, bias)])
    return torch.ops.commfuse.row_parallel(x, weight, bias, dim, list(sizes), partial_dtype, wanted, number)


class _Rows(NamedTuple):
    """What the ops are told beside their tensors."""

    dim: int
    sizes: Sequence[int]
    partial_dtype: torch.dtype
    wanted: int  # gradients of x, weight, bias, in bits
    number: int  # of the place

    @property
    def place(self) -> Place:
        return _places[self.number]

    def call(self, x: torch.Tensor) -> Row:
        tokens = _tokens(x, self.dim, self.sizes)
        return Row(self.place, tokens, self.dim, self.partial_dtype, _flags(self.wanted, 3))


_ROWS = "SymInt dim, SymInt[] sizes, ScalarType partial_dtype, SymInt wanted, SymInt number"
_ROW_FORWARD = f"(Tensor x, Tensor weight, Tensor? bias, {_ROWS}) -> Tensor"
_ROW_BACKWARD = f"(Tensor grad, Tensor x, Tensor weight, {_ROWS}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("commfuse::row_parallel", mutates_args=(), schema=_ROW_FORWARD)
def row_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    told = _Rows(*how)
    own, more = told.sizes[told.place.rank], {"out_features": weight.shape[0], "reduce_dtype": told.partial_dtype}
    agree_on(told.place, x, told.dim, _flags(told.wanted, 3), told.sizes, own, **more)
    return row_forward(x.contiguous(), weight, bias, told.call(x))


@row_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    told = _Rows(*how)
    return x.new_empty(shape_with(x, told.dim, told.sizes[told.place.rank], weight.shape[0]))


@torch.library.custom_op("commfuse::row_parallel_backward", mutates_args=(), schema=_ROW_BACKWARD)
def row_backward_op(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dW, db; empty tensors where not wanted."""
    found = row_backward(grad, x.contiguous(), weight, x.dtype, _Rows(*how).call(x))
    dx, dw, db = (part if part is not None else x.new_empty(0) for part in found)
    return dx, dw, db


@row_backward_op.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    want_x, want_weight, want_bias = _flags(_Rows(*how).wanted, 3)
    return (
        x.new_empty(x.shape) if want_x else x.new_empty(0),
        weight.new_empty(weight.shape) if want_weight else x.new_empty(0),
        x.new_empty(weight.shape[0]) if want_bias else x.new_empty(0),
    )


def _row_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def _row_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    told = _Rows(*ctx.how)
    found = torch.ops.commfuse.row_parallel_backward(grad, x, weight, *told)
    flags = _flags(told.wanted, 3)
    return (*(part if flag else None for part, flag in zip(found, flags, strict=True)), *(None,) * len(told))


row_op.register_autograd(_row_backward, setup_context=_row_context)
