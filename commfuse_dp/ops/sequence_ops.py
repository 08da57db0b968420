"""`column_parallel` and `row_parallel` in graphs of torch.compile: the same passes as registered ops.

To a graph an op is a function of tensors and numbers. So the ranks that a call goes over lie in a table, under a number of this
call alone, which is a constant of the graph: see [Note: Calls in graphs] in operands.py. Which gradients are wanted is decided
while the graph is traced. Where the ranks' sizes are not given they are taken to be equal; whether they are is compared when
the op runs.

The module is imported while a graph is traced, and not before: what it decorates imports the compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.ops.column_parallel import Column, Save, column_backward, column_forward
from commfuse_dp.ops.compat import prepare_compiler
from commfuse_dp.ops.row_parallel import Row, row_backward, row_forward
from commfuse_dp.ops.sequence import Place, Tokens, agree_on, place_of, shape_with

_SAVES: tuple[Save, ...] = ("shard", "gathered")
_places: dict[int, Place] = {}
_numbers = itertools.count(1)


# ---- while a graph is traced -----------------------------------------------------------------------------------------
@torch.compiler.assume_constant_result
def place_number(group: dist.ProcessGroup | None, order: str, slices_per_rank: int | None, name: str) -> int:
    """Of one call in a graph. The place stays for the life of the process, as compiled graphs do."""
    prepare_compiler()
    number = next(_numbers)
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


def _split(params: Sequence[torch.Tensor], count: int, has_bias: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    left = iter(params[count:])
    return list(params[:count]), [next(left) if flag else None for flag in _flags(has_bias, count)]


def _column(
    x: torch.Tensor, outer: int, inner: int, count: int, dim: int, sizes: Sequence[int], save: int, wanted: int, number: int
) -> Column:
    return Column(_places[number], Tokens(outer, inner, tuple(sizes)), dim, _SAVES[save], _flags(wanted, 1 + 2 * count))


@torch.library.custom_op("commfuse::column_parallel", mutates_args=())
def column_op(
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    count: int,
    has_bias: int,
    dim: int,
    sizes: Sequence[int],
    save: int,
    wanted: int,
    number: int,
) -> list[torch.Tensor]:
    """The outputs, then the gathered input or an empty tensor."""
    weights, biases = _split(params, count, has_bias)
    place = _places[number]
    how = {"features": x.shape[-1], "save": _SAVES[save]}
    tokens = agree_on(place, x, dim, _flags(wanted, 1 + 2 * count), sizes, int(x.shape[dim]), **how)
    call = _column(x, tokens.outer, tokens.inner, count, dim, sizes, save, wanted, number)
    ys, kept = column_forward(x.contiguous(), weights, biases, call)
    return [*ys, kept if kept is not None else x.new_empty(0)]


@column_op.register_fake
def _(
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    count: int,
    has_bias: int,
    dim: int,
    sizes: Sequence[int],
    save: int,
    wanted: int,
    number: int,
) -> list[torch.Tensor]:
    length = sum(sizes)
    ys = [x.new_empty(shape_with(x, dim, length, weight.shape[0])) for weight in params[:count]]
    keeps = _SAVES[save] == "gathered" and any(_flags(wanted, 1 + count)[1:])
    return [*ys, x.new_empty(shape_with(x, dim, length, x.shape[-1])) if keeps else x.new_empty(0)]


@torch.library.custom_op("commfuse::column_parallel_backward", mutates_args=())
def column_backward_op(
    grads: Sequence[torch.Tensor],
    saved: torch.Tensor,
    params: Sequence[torch.Tensor],
    count: int,
    has_bias: int,
    dim: int,
    sizes: Sequence[int],
    save: int,
    wanted: int,
    number: int,
) -> list[torch.Tensor]:
    """dx, dW_i, db_i; empty tensors where not wanted."""
    weights, biases = _split(params, count, has_bias)
    outer = int(torch.Size(saved.shape[:dim]).numel())
    inner = int(torch.Size(saved.shape[dim + 1 : -1]).numel())
    call = _column(saved, outer, inner, count, dim, sizes, save, wanted, number)
    dx, dws, dbs = column_backward(grads, saved.contiguous(), weights, call)
    found = [dx, *dws, *(db for db, bias in zip(dbs, biases, strict=True) if bias is not None)]
    return [grad if grad is not None else saved.new_empty(0) for grad in found]


@column_backward_op.register_fake
def _(
    grads: Sequence[torch.Tensor],
    saved: torch.Tensor,
    params: Sequence[torch.Tensor],
    count: int,
    has_bias: int,
    dim: int,
    sizes: Sequence[int],
    save: int,
    wanted: int,
    number: int,
) -> list[torch.Tensor]:
    want_x, *want_params = _present(wanted, count, has_bias)
    own = shape_with(saved, dim, sizes[_places[number].rank], saved.shape[-1])
    dx = saved.new_empty(own) if want_x else saved.new_empty(0)
    return [
        dx,
        *(param.new_empty(param.shape) if w else saved.new_empty(0) for w, param in zip(want_params, params, strict=True)),
    ]


def _present(wanted: int, count: int, has_bias: int) -> list[bool]:
    """Which gradients are wanted of x, of the weights, and of those biases that exist."""
    flags = _flags(wanted, 1 + 2 * count)
    exists = _flags(has_bias, count)
    return [*flags[: 1 + count], *(flag for flag, bias in zip(flags[1 + count :], exists, strict=True) if bias)]


def _column_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, params, count, has_bias, dim, sizes, save, wanted, number = inputs
    ctx.how = count, has_bias, dim, tuple(sizes), save, wanted, number
    keeps = _SAVES[save] == "gathered" and any(_flags(wanted, 1 + count)[1:])
    ctx.shapes = [y.shape for y in output[:count]]
    ctx.save_for_backward(output[count] if keeps else x, *params)


def _column_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    saved, *params = ctx.saved_tensors
    count, has_bias, dim, sizes, save, wanted, number = ctx.how
    dense = [saved.new_zeros(shape) if g is None else g for g, shape in zip(grads[:count], ctx.shapes, strict=True)]
    found = torch.ops.commfuse.column_parallel_backward(
        dense, saved, params, count, has_bias, dim, list(sizes), save, wanted, number
    )
    want_x, *want_params = _present(wanted, count, has_bias)
    of_params = [grad if flag else None for grad, flag in zip(found[1:], want_params, strict=True)]
    return (found[0] if want_x else None, of_params, *(None,) * 7)


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


def _row(x: torch.Tensor, dim: int, sizes: Sequence[int], partial_dtype: torch.dtype, wanted: int, number: int) -> Row:
    outer, inner = int(torch.Size(x.shape[:dim]).numel()), int(torch.Size(x.shape[dim + 1 : -1]).numel())
    return Row(_places[number], Tokens(outer, inner, tuple(sizes)), dim, partial_dtype, _flags(wanted, 3))


@torch.library.custom_op("commfuse::row_parallel", mutates_args=())
def row_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    sizes: Sequence[int],
    partial_dtype: torch.dtype,
    wanted: int,
    number: int,
) -> torch.Tensor:
    place = _places[number]
    how = {"out_features": weight.shape[0], "reduce_dtype": partial_dtype}
    agree_on(place, x, dim, _flags(wanted, 3), sizes, sizes[place.rank], **how)
    return row_forward(x.contiguous(), weight, bias, _row(x, dim, sizes, partial_dtype, wanted, number))


@row_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    sizes: Sequence[int],
    partial_dtype: torch.dtype,
    wanted: int,
    number: int,
) -> torch.Tensor:
    return x.new_empty(shape_with(x, dim, sizes[_places[number].rank], weight.shape[0]))


@torch.library.custom_op("commfuse::row_parallel_backward", mutates_args=())
def row_backward_op(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    partial_dtype: torch.dtype,
    wanted: int,
    number: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dW, db; empty tensors where not wanted."""
    call = _row(x, dim, sizes, partial_dtype, wanted, number)
    found = row_backward(grad, x.contiguous(), weight, x.dtype, call)
    dx, dw, db = (part if part is not None else x.new_empty(0) for part in found)
    return dx, dw, db


@row_backward_op.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    partial_dtype: torch.dtype,
    wanted: int,
    number: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    want_x, want_weight, want_bias = _flags(wanted, 3)
    return (
        x.new_empty(x.shape) if want_x else x.new_empty(0),
        weight.new_empty(weight.shape) if want_weight else x.new_empty(0),
        x.new_empty(weight.shape[0]) if want_bias else x.new_empty(0),
    )


def _row_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, dim, sizes, partial_dtype, wanted, number = inputs
    ctx.how = dim, tuple(sizes), partial_dtype, wanted, number
    ctx.save_for_backward(x, weight)


def _row_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dim, sizes, partial_dtype, wanted, number = ctx.how
    found = torch.ops.commfuse.row_parallel_backward(grad, x, weight, dim, list(sizes), partial_dtype, wanted, number)
    flags = _flags(wanted, 3)
    return (*(part if flag else None for part, flag in zip(found, flags, strict=True)), *(None,) * 5)


row_op.register_autograd(_row_backward, setup_context=_row_context)
