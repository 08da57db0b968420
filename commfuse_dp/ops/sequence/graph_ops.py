"""`column_parallel` and `row_parallel` in graphs of torch.compile: the same passes as registered ops.

To a graph an op is a function of tensors and numbers. So the ranks that a call goes over lie in a table, under a number of this
call alone, which is a constant of the graph: see [Note: Calls in graphs] in operands.py. Those of a served layer are found by
its number in a tensor: numbers that dynamo finds in a module it takes for constants, and layers would not share a graph. Which
gradients are wanted is decided while the graph is traced. Where the ranks' sizes are not given they are taken to be equal;
whether they are is compared when the op runs.

The module is imported while a graph is traced, and not before: what it decorates imports the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from commfuse_dp.ops.operands import call_number, operand_of
from commfuse_dp.ops.sequence.calls import Column, Row, column_of, keeps_gathered, row_of
from commfuse_dp.ops.sequence.column_parallel import Save, column_backward, column_forward
from commfuse_dp.ops.sequence.row_parallel import row_backward, row_forward
from commfuse_dp.ops.sequence.rows import (
    GraphPlace,
    Layout,
    Place,
    agree_on,
    beside,
    gathered,
    place_of,
    shape_with,
    tokens_among,
)

_SAVES: tuple[Save, ...] = ("shard", "gathered")
_AT = "Tensor? layer, SymInt rank, SymInt call"
_places: dict[int, Place] = {}  # of calls that no layer makes


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


@torch.compiler.assume_constant_result
def rank_of(number: int) -> int:
    return _places[number].rank


def new_place(group: dist.ProcessGroup | None, order: str, slices_per_rank: int | None, name: str) -> GraphPlace:
    """Of one call."""
    number = place_number(group, order, slices_per_rank, name)
    return GraphPlace(None, rank_of(number), world_size_of(number), number)


def _place_of_call(layer: torch.Tensor | None, call: int) -> Place:
    if layer is None:
        return _places[call]
    found: Place = operand_of(int(layer)).place
    return found


def bits_of(flags: Sequence[bool]) -> int:
    total = 0
    for at, flag in enumerate(flags):
        total += (1 << at) if flag else 0
    return total


def _flags(bits: int, count: int) -> tuple[bool, ...]:
    return tuple(bool(bits >> at & 1) for at in range(count))


def _layout(replicated: bool) -> Layout:
    return "replicated" if replicated else "sharded"


# ---- columns ---------------------------------------------------------------------------------------------------------
def column_in_graph(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    dim: int,
    sizes: Sequence[int] | None,
    save: str,
    layout: Layout,
    place: GraphPlace,
) -> tuple[torch.Tensor, ...]:
    found = list(sizes) if sizes is not None else [x.shape[dim]] * place.world_size
    recorded = torch.is_grad_enabled()
    wanted = bits_of([recorded and t is not None and t.requires_grad for t in (x, *weights, *biases)])
    present = [bias for bias in biases if bias is not None]
    has_bias = bits_of([bias is not None for bias in biases])
    outputs = torch.ops.commfuse.column_parallel(
        x,
        [*weights, *present],
        len(weights),
        has_bias,
        dim,
        found,
        _SAVES.index(save),
        layout == "replicated",
        wanted,
        place.layer,
        place.rank,
        place.call or call_number(),
    )
    return tuple(outputs[: len(weights)])


class _Columns(NamedTuple):
    """What the ops are told beside their tensors."""

    weights: int  # how many
    has_bias: int  # which of them, in bits
    dim: int
    sizes: Sequence[int]
    save: int  # in _SAVES
    replicated: bool  # x, and its gradient
    wanted: int  # gradients of x, weights, biases, in bits
    layer: torch.Tensor | None  # its number; None: the place is the call's
    rank: int
    call: int

    @property
    def place(self) -> Place:
        return _place_of_call(self.layer, self.call)

    @property
    def flags(self) -> tuple[bool, ...]:
        return _flags(self.wanted, 1 + 2 * self.weights)

    @property
    def keeps(self) -> bool:
        """The gathered input is kept for backward."""
        return keeps_gathered(_SAVES[self.save], self.layout, self.flags[1 : 1 + self.weights])

    @property
    def layout(self) -> Layout:
        return _layout(self.replicated)

    def length(self, x: torch.Tensor) -> int:
        """Positions that the layers compute with."""
        return x.shape[self.dim] if self.replicated else sum(self.sizes)

    @property
    def present(self) -> list[bool]:
        """Which gradients are wanted of x, of the weights, and of those biases that exist."""
        of_biases = zip(self.flags[1 + self.weights :], _flags(self.has_bias, self.weights), strict=True)
        return [*self.flags[: 1 + self.weights], *(flag for flag, exists in of_biases if exists)]

    def split(self, params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """(weights, biases)"""
        left = iter(params[self.weights :])
        return list(params[: self.weights]), [next(left) if flag else None for flag in _flags(self.has_bias, self.weights)]

    def column(self, x: torch.Tensor) -> Column:
        """x: of the op, or what it has saved of it."""
        place, shape = self.place, beside(x, self.dim, self.layout)
        tokens = tokens_among(x, self.dim, tuple(self.sizes), self.layout, place.world_size)
        features, save = (x.shape[-1], x.dtype), _SAVES[self.save]
        return column_of(place.name, place.how, tokens, self.dim, shape, features, save, self.flags, self.layout)


_COLUMNS = f"SymInt count, SymInt has_bias, SymInt dim, SymInt[] sizes, SymInt save, bool replicated, SymInt wanted, {_AT}"
_COLUMN_FORWARD = f"(Tensor x, Tensor[] params, {_COLUMNS}) -> Tensor[]"
_COLUMN_BACKWARD = f"(Tensor[] grads, Tensor saved, Tensor[] params, {_COLUMNS}) -> Tensor[]"


@torch.library.custom_op("commfuse::column_parallel", mutates_args=(), schema=_COLUMN_FORWARD)
def column_op(x: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    """The outputs, then the gathered input or an empty tensor."""
    told = _Columns(*how)
    weights, biases = told.split(params)
    own, more = int(x.shape[told.dim]), {"features": x.shape[-1], "save": _SAVES[told.save]}
    agree_on(told.place, x, told.dim, told.flags, told.sizes, own, told.layout, **more)
    ys, kept = column_forward(x.contiguous(), weights, biases, told.column(x), told.place.ranks)
    return [*ys, kept if kept is not None else x.new_empty(0)]


@column_op.register_fake
def _(x: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    told = _Columns(*how)
    length = told.length(x)
    ys = [x.new_empty(shape_with(x, told.dim, length, weight.shape[0])) for weight in params[: told.weights]]
    return [*ys, x.new_empty(shape_with(x, told.dim, length, x.shape[-1])) if told.keeps else x.new_empty(0)]


@torch.library.custom_op("commfuse::column_parallel_backward", mutates_args=(), schema=_COLUMN_BACKWARD)
def column_backward_op(
    grads: Sequence[torch.Tensor], saved: torch.Tensor, params: Sequence[torch.Tensor], *how: Any
) -> list[torch.Tensor]:
    """dx, dW_i, db_i; empty tensors where not wanted."""
    told = _Columns(*how)
    weights, biases = told.split(params)
    dx, dws, dbs = column_backward(grads, saved.contiguous(), weights, told.column(saved), told.place.ranks)
    found = [dx, *dws, *(db for db, bias in zip(dbs, biases, strict=True) if bias is not None)]
    return [grad if grad is not None else saved.new_empty(0) for grad in found]


@column_backward_op.register_fake
def _(grads: Sequence[torch.Tensor], saved: torch.Tensor, params: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
    told = _Columns(*how)
    want_x, *want_params = told.present
    positions = saved.shape[told.dim] if told.replicated else told.sizes[told.rank]
    own = shape_with(saved, told.dim, positions, saved.shape[-1])
    dx = saved.new_empty(own) if want_x else saved.new_empty(0)
    return [
        dx,
        *(param.new_empty(param.shape) if w else saved.new_empty(0) for w, param in zip(want_params, params, strict=True)),
    ]


def _column_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, params, *how = inputs
    told = _Columns(*how)
    ctx.told = told._replace(layer=None)
    ctx.shapes = [y.shape for y in output[: told.weights]]
    ctx.save_for_backward(output[told.weights] if told.keeps else x, told.layer, *params)


def _column_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    saved, layer, *params = ctx.saved_tensors
    told: _Columns = ctx.told._replace(layer=layer)
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
    layout: Layout,
    place: GraphPlace,
) -> torch.Tensor:
    recorded = torch.is_grad_enabled()
    wanted = bits_of([recorded and t is not None and t.requires_grad for t in (x, weight, bias)])
    replicated = layout == "replicated"
    how = dim, list(sizes), partial_dtype, replicated, wanted, place.layer, place.rank, place.call or call_number()
    return torch.ops.commfuse.row_parallel(x, weight, bias, *how)


class _Rows(NamedTuple):
    """What the ops are told beside their tensors."""

    dim: int
    sizes: Sequence[int]
    partial_dtype: torch.dtype
    replicated: bool  # the result
    wanted: int  # gradients of x, weight, bias, in bits
    layer: torch.Tensor | None  # its number; None: the place is the call's
    rank: int
    call: int

    @property
    def place(self) -> Place:
        return _place_of_call(self.layer, self.call)

    def row(self, x: torch.Tensor, weight: torch.Tensor) -> Row:
        place, shape = self.place, beside(x, self.dim, self.layout)
        tokens = tokens_among(x, self.dim, tuple(self.sizes), self.layout, place.world_size)
        features, wanted = (weight.shape[0], x.dtype), _flags(self.wanted, 3)
        return row_of(place.name, place.how, tokens, self.dim, shape, features, self.partial_dtype, wanted, self.layout)

    @property
    def layout(self) -> Layout:
        return _layout(self.replicated)


_ROWS = f"SymInt dim, SymInt[] sizes, ScalarType partial_dtype, bool replicated, SymInt wanted, {_AT}"
_ROW_FORWARD = f"(Tensor x, Tensor weight, Tensor? bias, {_ROWS}) -> Tensor"
_ROW_BACKWARD = f"(Tensor grad, Tensor x, Tensor weight, {_ROWS}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("commfuse::row_parallel", mutates_args=(), schema=_ROW_FORWARD)
def row_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    told = _Rows(*how)
    own, more = told.sizes[told.rank], {"out_features": weight.shape[0], "reduce_dtype": told.partial_dtype}
    agree_on(told.place, x, told.dim, _flags(told.wanted, 3), told.sizes, own, told.layout, **more)
    return row_forward(x.contiguous(), weight, bias, told.row(x, weight), told.place.ranks)


@row_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    told = _Rows(*how)
    positions = x.shape[told.dim] if told.replicated else told.sizes[told.rank]
    return x.new_empty(shape_with(x, told.dim, positions, weight.shape[0]))


@torch.library.custom_op("commfuse::row_parallel_backward", mutates_args=(), schema=_ROW_BACKWARD)
def row_backward_op(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dW, db; empty tensors where not wanted."""
    told = _Rows(*how)
    found = row_backward(grad, x.contiguous(), weight, x.dtype, told.row(x, weight), told.place.ranks)
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
    x, weight, _, *how = inputs
    told = _Rows(*how)
    ctx.told = told._replace(layer=None)
    ctx.save_for_backward(x, weight, told.layer)


def _row_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight, layer = ctx.saved_tensors
    told: _Rows = ctx.told._replace(layer=layer)
    found = torch.ops.commfuse.row_parallel_backward(grad, x, weight, *told)
    flags = _flags(told.wanted, 3)
    return (*(part if flag else None for part, flag in zip(found, flags, strict=True)), *(None,) * len(told))


row_op.register_autograd(_row_backward, setup_context=_row_context)


# ---- the sequence itself ---------------------------------------------------------------------------------------------
def gather_in_graph(x: torch.Tensor, dim: int, place: GraphPlace) -> torch.Tensor:
    """All positions of x, of which every rank has equally many. To ranks that compute alike from it: a gradient is the whole
    one, of which the own positions are taken. Where nobody uses it, the compiler drops it, and nothing is moved."""
    whole = torch.ops.commfuse.gather_sequence(x, dim, place.world_size, place.layer, place.rank, place.call or call_number())
    return cast(torch.Tensor, whole)


@torch.library.custom_op(
    "commfuse::gather_sequence", mutates_args=(), schema=f"(Tensor x, SymInt dim, SymInt ranks, {_AT}) -> Tensor"
)
def gather_op(x: torch.Tensor, dim: int, ranks: int, layer: torch.Tensor | None, rank: int, call: int) -> torch.Tensor:
    sited, own = _place_of_call(layer, call), int(x.shape[dim])
    tokens = agree_on(sited, x, dim, (), (own,) * ranks, own, features=x.shape[-1])
    return gathered(x, dim, tokens, sited)


@gather_op.register_fake
def _(x: torch.Tensor, dim: int, ranks: int, layer: torch.Tensor | None, rank: int, call: int) -> torch.Tensor:
    return x.new_empty(shape_with(x, dim, x.shape[dim] * ranks, x.shape[-1]))


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dim, _, _, ctx.rank, _ = inputs
    ctx.own = x.shape[ctx.dim]


def _gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad.narrow(ctx.dim, ctx.rank * ctx.own, ctx.own).contiguous(), None, None, None, None, None


gather_op.register_autograd(_gather_backward, setup_context=_gather_context)
