"""The fused linear: GEMM by slices of a row-sharded weight, forward, dgrad and wgrad.

N ranks, rank o keeps rows_o of the weight W [out, in] and of the bias b [out]; x is this rank's own data. T = product of the
leading dimensions of x.

| pass | for each owner o | slice GEMM | communicated | order |
| --- | --- | --- | --- | --- |
| forward | y[:, rows_o] = x @ W_o.T + b_o | [T, in] x [in, rows_o] -> columns of y | W_o, b_o gathered | own first |
| wgrad | dW_o = dy[:, rows_o].T @ x, db_o = sum of dy | [rows_o, T] x [T, in] | dW_o, db_o to their owner | own last |
| dgrad | dx += dy[:, rows_o] @ W_o | [T, rows_o] x [rows_o, in] -> dx | W_o gathered | own last |

A rank may also keep a flat range of W that begins and ends in the middle of a row (DeepSpeed): the same table with a part of a
row, [1, columns], as one more piece: y[:, row] += x[:, columns] @ piece.T, and so on.

wgrad and dgrad run in one pass: the partial owed to o is computed first and leaves at once; then W_o, which has meanwhile
arrived, is used. Saved for backward: x only. The weight is gathered again (or was kept by the engine's window).
Source: arXiv 2604.24013, Algorithms 1 and 2, instantiated for data parallelism.

[Note: Anchors]
The sharded parameters are no inputs of the autograd graph: their gradients are delivered by the engine. So that autograd
records the layer even if x needs no gradient, every operand has an `anchor`, an empty leaf that requires one. Under
torch.compile the gradient "of the anchor" is what keeps the backward op alive: a functional op whose outputs nobody uses
would be removed from the graph, and with it the weight gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commfuse_dp.ops.pieces import Piece


class ByOwner(Protocol):
    """A slice, as far as the ops look at it: whose rows they are."""

    @property
    def owner(self) -> int: ...


class WholeProducts(Protocol):
    """One kernel a product, which turns to slices as they arrive."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """False: nothing was done, go by slices."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        dx: torch.Tensor | None,
        consume: Visit | None,
        produce: Visit | None,
        *,
        dtype: torch.dtype,
        include: tuple[bool, ...],
    ) -> None:
        """As `exchange`, whose callbacks serve for what has to go by slices."""
        ...


Visit = Callable[[Any, "Sequence[Piece]"], None]  # (ByOwner, pieces)


class ShardedOperand(Protocol):
    """A row-sharded weight (and bias) whose slices somebody moves: the engine, or the plain collectives."""

    out_features: int
    in_features: int
    has_bias: bool  # a sharded one, that travels with the weight
    anchor: torch.Tensor

    @property
    def split_rows(self) -> tuple[int, ...]:
        """Rows of the weight that come in several pieces."""

    def expect_backward(self) -> None:
        """Autograd records the forward that follows: an `exchange` will come for it. (Inside an autograd Function, and in a
        compiled graph, gradients always look disabled, so that `gather` cannot tell by itself.)"""

    def gather(self, consume: Visit) -> None:
        """consume(slice, pieces) for every slice, own first."""

    def exchange(self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype, include: tuple[bool, ...]) -> None:
        """produce(slice, pieces), then consume(slice, pieces), for every slice, own last."""

    @property
    def whole(self) -> WholeProducts | None:
        """Products in one kernel each (GPUs); None: by slices only."""

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which of (weight, bias) want a gradient now."""


def linear_forward(x: torch.Tensor, operand: ShardedOperand, *, convert: bool = False) -> torch.Tensor:
    """y = x @ W.T + b, [..., in] -> [..., out], in x's dtype, slice by slice. No autograd.

    convert: cast the parameters to x's dtype (autocast); otherwise the dtypes must agree, as in torch's own linear.
    """
    shape = x.shape
    if not shape or shape[-1] != operand.in_features:
        raise RuntimeError(f"linear layer of {operand.in_features} input features got an input of shape {tuple(shape)}")
    flat = len(shape) == 2
    rows = x if flat else x.reshape(-1, operand.in_features)
    y = x.new_empty((*shape[:-1], operand.out_features))
    columns = y if flat else y.view(-1, operand.out_features)
    if operand.whole is not None and not convert and operand.whole.forward(rows, columns):
        return y
    for row in operand.split_rows:
        columns[:, row].zero_()
    dtype, has_bias = x.dtype, operand.has_bias
    bias: dict[int, tuple[int, torch.Tensor]] = {}

    def consume(item: ByOwner, pieces: Sequence[Piece]) -> None:
        for part, row, weight, column in pieces:
            if part == 1:  # comes with the owner's first slice and is needed by all of them
                bias[int(item.owner)] = (row, weight.to(dtype, copy=True))
                continue
            if weight.dtype != dtype:
                if not convert:
                    raise RuntimeError(f"linear layer with parameters of dtype {weight.dtype} got an input of dtype {dtype}")
                weight = weight.to(dtype)
            count, width = weight.shape
            out = columns.narrow(1, row, count)
            if width < operand.in_features:
                out.addmm_(rows.narrow(1, column, width), weight.t())
            elif has_bias:
                low, rows_bias = bias[int(item.owner)]
                torch.addmm(rows_bias[row - low : row - low + count], rows, weight.t(), out=out)
            else:
                torch.mm(rows, weight.t(), out=out)

    operand.gather(consume)
    return y


def linear_backward(
    grad: torch.Tensor, x: torch.Tensor, operand: ShardedOperand, needs_input_grad: bool, partial_dtype: torch.dtype
) -> torch.Tensor | None:
    """dx [..., in] (None if not needed); the gradients of weight and bias leave through `operand`."""
    grads = grad if grad.dim() == 2 else grad.reshape(-1, operand.out_features)
    rows = x if x.dim() == 2 else x.reshape(-1, operand.in_features)
    dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_input_grad else None
    started = False

    def produce(item: ByOwner, pieces: Sequence[Piece]) -> None:
        for part, row, out, column in pieces:
            span = grads.narrow(1, row, out.shape[0])
            if part == 1:
                torch.sum(span, dim=0, out=out, dtype=out.dtype)
                continue
            width = out.shape[1]
            inputs = rows if width == rows.shape[1] else rows.narrow(1, column, width)
            if out.dtype == grads.dtype:
                torch.mm(span.t(), inputs, out=out)
            else:  # autocast: computed in the low precision, handed on in the parameter's
                out.copy_(torch.mm(span.t(), inputs))

    def consume(item: ByOwner, pieces: Sequence[Piece]) -> None:
        nonlocal started
        assert dx is not None
        for part, row, weight, column in pieces:
            if part != 0:
                continue
            if weight.dtype != grads.dtype:
                weight = weight.to(grads.dtype)
            count, width = weight.shape
            span = grads.narrow(1, row, count)
            if width < dx.shape[1]:
                if not started:
                    dx.zero_()
                dx.narrow(1, column, width).addmm_(span, weight)
            elif started:
                dx.addmm_(span, weight)
            else:
                torch.mm(span, weight, out=dx)
            started = True

    include, products = operand.trainable, operand.whole
    callbacks = consume if needs_input_grad else None, produce if any(include) else None
    if products is None:
        operand.exchange(*callbacks, dtype=partial_dtype, include=include)
    else:
        grads = grads if grads.stride(-1) == 1 else grads.contiguous()
        products.backward(grads, rows, dx, *callbacks, dtype=partial_dtype, include=include)
    if dx is None:
        return None
    return dx if dx.shape == x.shape else dx.view(x.shape)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, operand: ShardedOperand, partial_dtype: torch.dtype, convert: bool
    ) -> torch.Tensor:
        ctx.operand = operand
        ctx.partial_dtype = partial_dtype
        ctx.save_for_backward(x)
        return linear_forward(x, operand, convert=convert)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        dx = linear_backward(grad, x, ctx.operand, ctx.needs_input_grad[0], ctx.partial_dtype)
        return dx, None, None, None, None


class _ReplicatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: torch.Tensor,
        operand: ShardedOperand,
        partial_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.operand = operand
        ctx.partial_dtype = partial_dtype
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        linear_backward(grad, x, ctx.operand, False, ctx.partial_dtype)
        return (torch.matmul(grad, weight) if ctx.needs_input_grad[0] else None), None, None, None, None


def replicated_linear(
    x: torch.Tensor, weight: torch.Tensor, operand: ShardedOperand, partial_dtype: torch.dtype
) -> torch.Tensor:
    """y = x @ W.T, [..., in] -> [..., out], with W whole on every rank: only its gradient is sharded (ZeRO-1/2).

    The wgrad is computed slice by slice, own slice last, and leaves through `operand`; W gets no gradient from autograd.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled():
        operand.expect_backward()
    return _ReplicatedLinear.apply(x, operand.anchor, weight.detach(), operand, partial_dtype)


# ---- torch.compile: the same two functions as registered ops ---------------------------------------------------------
_OPERANDS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_next_handle = 0


def register_operand(operand: ShardedOperand) -> int:
    """A number under which the registered ops find the operand again; it does not keep it alive."""
    global _next_handle
    _next_handle += 1
    _OPERANDS[_next_handle] = operand
    return _next_handle


def operand_of(handle: int) -> Any:
    """The operand registered under `handle`."""
    operand = _OPERANDS.get(handle)
    if operand is None:
        raise RuntimeError("this compiled graph uses a layer whose CommFuse integration was removed: compile the model again")
    return operand


@torch.library.custom_op("commfuse::linear", mutates_args=())
def linear_op(x: torch.Tensor, anchor: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    return linear_forward(x, operand_of(handle))


@linear_op.register_fake
def _(x: torch.Tensor, anchor: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("commfuse::linear_backward", mutates_args=())
def linear_backward_op(
    grad: torch.Tensor, x: torch.Tensor, handle: int, needs_input_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    operand = operand_of(handle)
    dx = linear_backward(grad, x, operand, needs_input_grad, operand.partial_dtype)
    return (dx if dx is not None else x.new_empty(0)), torch.zeros_like(operand.anchor)


@linear_backward_op.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, handle: int, needs_input_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_input_grad else x.new_empty(0)
    return dx, torch.empty(0, dtype=torch.float32, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, handle, _ = inputs
    ctx.handle = handle
    ctx.save_for_backward(x)


def _op_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
    (x,) = ctx.saved_tensors
    dx, token = torch.ops.commfuse.linear_backward(grad, x, ctx.handle, ctx.needs_input_grad[0])
    return (dx if ctx.needs_input_grad[0] else None), token, None, None


linear_op.register_autograd(_op_backward, setup_context=_setup_context)


def fused_linear(x: torch.Tensor, operand: ShardedOperand, handle: int, partial_dtype: torch.dtype) -> torch.Tensor:
    """What a fused module's forward calls. x: [..., in] in the compute dtype (or any, under autocast)."""
    if torch.compiler.is_compiling():
        return torch.ops.commfuse.linear(x, operand.anchor, handle, operand.out_features)
    device = x.device.type
    convert = torch.is_autocast_enabled(device)
    if convert:
        x = x.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled():
        operand.expect_backward()
    return _FusedLinear.apply(x, operand.anchor, operand, partial_dtype, convert)
