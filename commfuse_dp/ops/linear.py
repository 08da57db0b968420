"""The fused linear: GEMM by slices of a row-sharded weight, forward, dgrad and wgrad.

N ranks, rank o keeps rows_o of the weight W [out, in] and of the bias b [out]; x is this rank's own data. T = product of the
leading dimensions of x.

| pass | for each owner o | slice GEMM | communicated | order |
| --- | --- | --- | --- | --- |
| forward | y[:, rows_o] = x @ W_o.T + b_o | [T, in] x [in, rows_o] -> columns of y | W_o, b_o gathered | own first |
| wgrad | dW_o = dy[:, rows_o].T @ x, db_o = sum of dy | [rows_o, T] x [T, in] | dW_o, db_o to their owner | own last |
| dgrad | dx += dy[:, rows_o] @ W_o | [T, rows_o] x [rows_o, in] -> dx | W_o gathered | own last |

A weight [in, out] that is sharded along `in` (Conv1D of Hugging Face), and pieces of rows, go through the same products with
their operands changed over: products.py has the GEMMs, and how sums of slices are rounded.

wgrad and dgrad run in one pass: the partial owed to o is computed first and leaves at once; then W_o, which has meanwhile
arrived, is used. Saved for backward: x only. The weight is gathered again (or was kept by the engine's window).
Source: arXiv 2604.24013, Algorithms 1 and 2, instantiated for data parallelism.

[Note: Anchors]
The sharded parameters are no inputs of the autograd graph: their gradients are delivered by the engine. So that autograd
records the layer even if x needs no gradient, every operand has an `anchor`, a leaf that requires one. Under torch.compile
the gradient "of the anchor" is what keeps the backward op alive: a functional op whose outputs nobody uses would be removed
from the graph, and with it the weight gradient. It has one element: inductor removes sums of tensors that have none, and what
computes their terms. A layer that is given other parameters gets another anchor, too: so a backward sees that it has come too
late for those of its forward (`check_same_parameters`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import forward_ad

from commfuse_dp.ops import announced
from commfuse_dp.ops.compat import hides_inside, in_dual_level, modes_active, saved_tensors_hooks, transforms_active
from commfuse_dp.ops.gathered import gather_parameters, replicated_parameter
from commfuse_dp.ops.operands import ShardedOperand, call_number, check_same_parameters, operand_of, register_operand
from commfuse_dp.ops.products import linear_backward, linear_forward
from commfuse_dp.ops.saved import save, saved


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor | None,
        bias: torch.Tensor | None,
        operand: ShardedOperand,
        convert: bool,
    ) -> torch.Tensor:
        ctx.operand = operand
        if saved_tensors_hooks() is None:
            ctx.save_for_backward(x)
        else:
            save(ctx, x)
        compute = announced_linear if modes_active() and hides_inside() else linear_forward
        y = compute(x, operand, convert=convert, bias=bias)
        ctx.anchor = operand.anchor  # of the step that a layer called by itself has begun just now
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: what is differentiated a second time raises
            return _backward_once(ctx, grad)
        (x,) = ctx.saved_tensors or saved(ctx)
        operand = ctx.operand
        if ctx.anchor is not operand.anchor:  # asked here, too: a call costs a frame per layer
            check_same_parameters(operand, ctx.anchor)
        compute = announced_linear_backward if modes_active() and hides_inside() else linear_backward
        dx = compute(grad, x, operand, ctx.needs_input_grad[0])
        return dx, None, _summed(grad) if ctx.needs_input_grad[2] else None, None, None


def announced_linear(
    x: torch.Tensor, operand: ShardedOperand, *, convert: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear_forward`, which modes see as one product."""
    if x.shape[-1:] != (operand.in_features,):
        return linear_forward(x, operand, convert=convert, bias=bias)  # which says what is wrong
    rows = x.reshape(-1, operand.in_features)

    def answer() -> torch.Tensor:
        return linear_forward(rows, operand, convert=convert, bias=bias)

    weight = announced.absent((operand.in_features, operand.out_features), x, answer)
    added = announced.absent((operand.out_features,), x) if operand.has_bias or bias is not None else None
    return announced.product(rows, weight, added).view(*x.shape[:-1], operand.out_features)


def announced_linear_backward(
    grad: torch.Tensor, x: torch.Tensor, operand: ShardedOperand, needs_input_grad: bool
) -> torch.Tensor | None:
    """`linear_backward`, which modes see as one product for each gradient."""
    tokens, features, inputs = math.prod(x.shape[:-1]), operand.out_features, operand.in_features
    of_weight = [(features, tokens, inputs)] * operand.trainable[0]
    with announced.products(x, of_weight + [(tokens, features, inputs)] * needs_input_grad):
        return linear_backward(grad, x, operand, needs_input_grad)


# Only where it is asked for: its wrapper is a dozen frames a layer. It calls the function again, without gradients.
_backward_once: Any = torch.autograd.function.once_differentiable(_FusedLinear.backward)  # type: ignore[no-untyped-call]


def _summed(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias."""
    return grad.sum_to_size(grad.shape[-1])  # sum(dim=()) of an input without a batch would be over all of it


class _ReplicatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        operand: ShardedOperand,
    ) -> torch.Tensor:
        ctx.operand = operand
        save(ctx, x, weight)
        return torch.nn.functional.linear(x, weight.t() if operand.transposed else weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, torch.Tensor | None, None]:
        x, weight = saved(ctx)
        linear_backward(grad, x, ctx.operand, False)
        summed = _summed(grad) if ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[0]:
            return None, None, None, summed, None
        return torch.matmul(grad, weight.t() if ctx.operand.transposed else weight), None, None, summed, None


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the dtype in which autocast runs a linear: a differentiable cast; float64 stays, as in torch's own linear."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _is_transformed(x: torch.Tensor) -> bool:
    """Forward-mode differentiation, or a transform of torch.func, wants to see every operation on x."""
    return transforms_active() or (in_dual_level() and forward_ad.unpack_dual(x).tangent is not None)


def _plain(x: torch.Tensor, operand: ShardedOperand, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.t() if operand.transposed else weight, bias)


def replicated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    operand: ShardedOperand,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ W.T + b (transposed: x @ W + b), [..., in] -> [..., out], with W whole on every rank: only its gradient is
    sharded.

    For ZeRO-1/2. The wgrad is computed slice by slice, own slice last, and leaves through `operand`; W gets no gradient from
    autograd. bias: [out], whole, with a gradient of autograd's.
    """
    if _is_transformed(x):
        return _plain(x, operand, replicated_parameter(weight, operand), bias)  # type: ignore[arg-type]
    x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    if torch.is_grad_enabled():
        operand.expect_backward()
    return _ReplicatedLinear.apply(x, operand.anchor, weight.detach(), bias, operand)


# ---- torch.compile: the same two functions as registered ops ---------------------------------------------------------
@torch.library.custom_op("commfuse::linear", mutates_args=())
def linear_op(
    x: torch.Tensor, anchor: torch.Tensor, bias: torch.Tensor | None, handle: int, out_features: int, convert: bool, call: int
) -> torch.Tensor:
    return linear_forward(x, operand_of(handle), convert=convert, bias=bias)


@linear_op.register_fake
def _(
    x: torch.Tensor, anchor: torch.Tensor, bias: torch.Tensor | None, handle: int, out_features: int, convert: bool, call: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.custom_op("commfuse::linear_backward", mutates_args=())
def linear_backward_op(
    grad: torch.Tensor, x: torch.Tensor, anchor: torch.Tensor, handle: int, needs_input_grad: bool, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    operand = operand_of(handle)
    check_same_parameters(operand, anchor)
    dx = linear_backward(grad, x, operand, needs_input_grad)
    return (dx if dx is not None else x.new_empty(0)), torch.zeros_like(operand.anchor)


@linear_backward_op.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, anchor: torch.Tensor, handle: int, needs_input_grad: bool, call: int
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_input_grad else x.new_empty(0)
    return dx, torch.empty(1, dtype=torch.float32, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, anchor, _, ctx.handle, _, _, ctx.call = inputs
    ctx.save_for_backward(x, anchor)


def _op_backward(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, None, None, None, None]:
    x, anchor = ctx.saved_tensors
    dx, token = torch.ops.commfuse.linear_backward(grad, x, anchor, ctx.handle, ctx.needs_input_grad[0], ctx.call)
    summed = _summed(grad) if ctx.needs_input_grad[2] else None
    return (dx if ctx.needs_input_grad[0] else None), token, summed, None, None, None, None


linear_op.register_autograd(_op_backward, setup_context=_setup_context)


def fused_linear(x: torch.Tensor, operand: ShardedOperand, handle: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What a fused module's forward calls. x: [..., in] in the compute dtype (or any, under autocast). bias: [out], whole, with
    a gradient of autograd's; for a unit that has none (DeepSpeed's).

    Forward-mode differentiation, and the transforms of torch.func, get a plain linear over parameters gathered whole."""
    convert = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    if convert:
        x = autocast(x)
        bias = None if bias is None else autocast(bias)
    if torch.compiler.is_compiling():
        return torch.ops.commfuse.linear(x, operand.anchor, bias, handle, operand.out_features, convert, call_number())
    if _is_transformed(x):
        weight, *own = gather_parameters(operand, handle)  # type: ignore[arg-type]
        return _plain(x, operand, weight, own[0] if own else bias)
    anchor: torch.Tensor | None = operand.anchor
    if torch.is_grad_enabled():
        if x.requires_grad or any(operand.trainable) or (bias is not None and bias.requires_grad):
            operand.expect_backward()
        else:
            anchor = None  # frozen, and so is all before it: the output wants no gradient, as torch's own
    return _FusedLinear.apply(x, anchor, bias, operand, convert)


__all__ = [
    "announced_linear",
    "autocast",
    "fused_linear",
    "linear_backward",
    "linear_forward",
    "register_operand",
    "replicated_linear",
]
