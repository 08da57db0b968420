"""Parameters gathered whole: for modules whose compute cannot be sliced by rows (norms, embeddings).

| pass | what happens | communicated |
| --- | --- | --- |
| forward | the whole parameters are put together from the owners' slices | every part gathered |
| backward | the gradients autograd computed are cut by owner and sent, own last | every part's gradient to its owners |

The gathered tensors are ordinary tensors of the autograd graph: whoever saves them for backward keeps them alive, and nothing
is gathered a second time. Meant for small parameters; they ride in the same stream of slices as the fused layers, so they
are prefetched and reduced without a barrier of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commfuse_dp.ops.operands import ByOwner, Visit, call_number, check_same_parameters, operand_of
from commfuse_dp.ops.pieces import Piece


class GatheredOperand(Protocol):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    anchor: torch.Tensor

    def expect_backward(self) -> None: ...

    def gather(self, consume: Visit) -> None: ...

    def exchange(
        self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype, include: tuple[bool, ...]
    ) -> None: ...

    @property
    def trainable(self) -> tuple[bool, ...]: ...

    @property
    def compute_dtype(self) -> torch.dtype: ...


def gather_forward(operand: GatheredOperand, visit: Callable[[Visit], None] | None = None) -> list[torch.Tensor]:
    """The whole parameters, [rows, *rest] each, in the compute dtype. No autograd. visit: instead of `operand.gather`."""
    device = operand.anchor.device
    wholes = [torch.empty(shape, dtype=operand.compute_dtype, device=device) for shape in operand.shapes]

    def consume(item: ByOwner, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.of(wholes[piece.part]).copy_(piece.tensor)

    (visit or operand.gather)(consume)
    return wholes


def gather_backward(grads: Sequence[torch.Tensor], operand: GatheredOperand) -> None:
    """Reduce the gradients of the whole parameters to their owners' shards."""

    def produce(item: ByOwner, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.tensor.copy_(piece.of(grads[piece.part]))

    include = operand.trainable
    operand.exchange(None, produce if any(include) else None, dtype=operand.compute_dtype, include=include)


class _GatherParameters(torch.autograd.Function):
    """To the transforms of torch.func, too: they find a function of the anchor, which none of them concerns."""

    @staticmethod
    def forward(anchor: torch.Tensor, operand: GatheredOperand) -> tuple[torch.Tensor, ...]:
        return tuple(gather_forward(operand))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, GatheredOperand], output: tuple[torch.Tensor, ...]) -> None:
        _, ctx.operand = inputs
        ctx.anchor = ctx.operand.anchor
        trainable = ctx.operand.trainable
        ctx.mark_non_differentiable(*[whole for whole, wanted in zip(output, trainable, strict=True) if not wanted])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[None, None], anchor: torch.Tensor, operand: GatheredOperand
    ) -> tuple[tuple[torch.Tensor, ...], tuple[None, ...]]:
        wholes = _GatherParameters.apply(anchor, operand)
        return wholes, (None,) * len(wholes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        check_same_parameters(ctx.operand, ctx.anchor)
        gather_backward(grads, ctx.operand)
        return None, None


class _Replicated(torch.autograd.Function):
    """A copy of a weight that is whole here, whose gradient is reduced."""

    @staticmethod
    def forward(anchor: torch.Tensor, weight: torch.Tensor, operand: GatheredOperand) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, GatheredOperand], output: torch.Tensor) -> None:
        ctx.operand = inputs[2]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        gather_backward((grad,), ctx.operand)
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[None, None, None], anchor: torch.Tensor, weight: torch.Tensor, operand: GatheredOperand
    ) -> tuple[torch.Tensor, None]:
        return _Replicated.apply(anchor, weight, operand), None


def replicated_parameter(weight: torch.Tensor, operand: GatheredOperand) -> torch.Tensor:
    """A copy of a weight that every rank has, differentiable: its gradient is reduced to the owners' shards (ZeRO-1/2)."""
    if torch.is_grad_enabled():
        operand.expect_backward()
    return _Replicated.apply(operand.anchor, weight.detach(), operand)


# ---- torch.compile: the same two functions as registered ops ---------------------------------------------------------
# Sizes and dtype are arguments, not looked up: blocks that differ only in their handles then share one compiled graph.
@torch.library.custom_op("commfuse::gather", mutates_args=())
def gather_op(
    anchor: torch.Tensor, handle: int, ranks: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, call: int
) -> list[torch.Tensor]:
    """ranks[i]: number of dimensions of parameter i; sizes: the sizes of all parameters, one after the other."""
    return gather_forward(operand_of(handle))


@gather_op.register_fake
def _(
    anchor: torch.Tensor, handle: int, ranks: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, call: int
) -> list[torch.Tensor]:
    left = iter(sizes)
    return [torch.empty([next(left) for _ in range(rank)], dtype=dtype, device=anchor.device) for rank in ranks]


@torch.library.custom_op("commfuse::gather_backward", mutates_args=())
def gather_backward_op(grads: Sequence[torch.Tensor], anchor: torch.Tensor, handle: int, call: int) -> torch.Tensor:
    operand = operand_of(handle)
    check_same_parameters(operand, anchor)
    gather_backward(grads, operand)
    return torch.zeros_like(operand.anchor)


@gather_backward_op.register_fake
def _(grads: Sequence[torch.Tensor], anchor: torch.Tensor, handle: int, call: int) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=grads[0].device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.handle, ctx.call = inputs[1], inputs[5]
    ctx.save_for_backward(inputs[0])


def _op_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[torch.Tensor, None, None, None, None, None]:
    (anchor,) = ctx.saved_tensors
    return torch.ops.commfuse.gather_backward(grads, anchor, ctx.handle, ctx.call), None, None, None, None, None


gather_op.register_autograd(_op_backward, setup_context=_setup_context)


def gather_parameters(operand: GatheredOperand, handle: int) -> tuple[torch.Tensor, ...]:
    """The operand's whole parameters, differentiable: their gradients are reduced to the owners' shards."""
    if torch.compiler.is_compiling():
        ranks = [len(shape) for shape in operand.shapes]
        sizes = [size for shape in operand.shapes for size in shape]
        return tuple(torch.ops.commfuse.gather(operand.anchor, handle, ranks, sizes, operand.compute_dtype, call_number()))
    if torch.is_grad_enabled():
        operand.expect_backward()
    return _GatherParameters.apply(operand.anchor, operand)
