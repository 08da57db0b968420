"""Parameters gathered whole: for modules whose compute cannot be sliced by rows (norms, embeddings).

| pass | what happens | communicated |
| --- | --- | --- |
| forward | the whole parameters are put together from the owners' slices | every part gathered |
| backward | the gradients autograd computed are cut by owner and sent, own last | every part's gradient to its owners |

The gathered tensors are ordinary tensors of the autograd graph: whoever saves them for backward keeps them alive, and nothing
is gathered a second time. Meant for small parameters; they ride in the same stream of slices as the fused layers, so they
are prefetched and reduced without a barrier of their own.

`ShardedWeights` does the same for layers of tensor parallelism (sequence/) below data parallelism: the first product takes
each slice as it comes, and the gradients leave as the last product makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commfuse_dp.ops.compat import unseen
from commfuse_dp.ops.operands import ByOwner, Visit, call_number, check_same_parameters, operand_of
from commfuse_dp.ops.pieces import Piece


class GatheredOperand(Protocol):
    name: str
    shapes: tuple[tuple[int, ...], ...]
    anchor: torch.Tensor

    def expect_backward(self) -> None: ...

    def gather(self, consume: Visit) -> None: ...

    def exchange(self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype | None = None) -> None:
        """dtype: in which partial gradients travel; None: as those of a linear."""

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

    operand.exchange(None, produce, dtype=operand.compute_dtype)


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
    if torch.is_grad_enabled() and any(operand.trainable):
        operand.expect_backward()
    with unseen():
        return _GatherParameters.apply(operand.anchor, operand)


# ---- layers of tensor parallelism ------------------------------------------------------------------------------------
class ShardedWeights:
    """Weights [F_i, D] and biases [F_i] of one call of a sequence op, sharded by rows over other ranks than the sequence is
    (data parallelism over tensor parallelism).

    They are put together here. Whoever computes before they are `here` computes with each slice as it comes.

    Attributes:
        weights, biases: whole, as far as their slices have come; None for a layer without a bias.
        here: all slices that were asked for have come.
    """

    def __init__(self, operands: Sequence[GatheredOperand], dtype: torch.dtype, *, recorded: bool) -> None:
        """dtype: that the op computes in. recorded: autograd records the call: a `scatter` will come for its first `gather`."""
        self.operands = tuple(operands)
        self.recorded = recorded
        self.anchors = [operand.anchor for operand in self.operands]  # see [Note: Anchors] in linear.py
        self._dtype = dtype
        self._allocate()

    def _allocate(self) -> None:
        self.here = False
        device = self.anchors[0].device
        wholes = [[torch.empty(shape, dtype=self._dtype, device=device) for shape in each.shapes] for each in self.operands]
        self.weights: list[torch.Tensor] = [whole[0] for whole in wholes]
        self.biases: list[torch.Tensor | None] = [whole[1] if len(whole) > 1 else None for whole in wholes]

    @classmethod
    def again(cls, calls: Sequence[ShardedWeights]) -> ShardedWeights:
        """For one backward of several calls. Raises CommFuseError if these are other parameters by now."""
        found = cls.__new__(cls)
        found.operands = tuple(operand for call in calls for operand in call.operands)
        found.anchors = [anchor for call in calls for anchor in call.anchors]
        found._dtype = calls[0]._dtype
        found.renew()
        return found

    def release(self) -> None:
        """The end of a forward or backward: let go of the memory."""
        self.here, self.weights, self.biases = False, [], []

    def renew(self) -> None:
        """The backward begins: nothing is here again. Raises CommFuseError if these are other parameters by now."""
        for operand, anchor in zip(self.operands, self.anchors, strict=True):
            check_same_parameters(operand, anchor)
        self.recorded = False
        self._allocate()

    @property
    def trainable(self) -> list[bool]:
        """Of the weights, then of the biases."""
        kinds = [(*operand.trainable, False) for operand in self.operands]
        return [kind[0] for kind in kinds] + [kind[1] for kind in kinds]

    def gather(self, rows: Callable[[int, slice, torch.Tensor], object] | None = None, only: Sequence[int] = ()) -> None:
        """Put the weights together. rows(number of a weight, its rows, these): called as they come, the own ones of each weight
        first; the bias of these rows is here by then. only: numbers of the weights that are needed; none: all."""
        for number in only or range(len(self.operands)):
            operand = self.operands[number]
            if self.recorded:
                operand.expect_backward()
            operand.gather(_Arriving(number, self.weights[number], self.biases[number], rows))
        if self.recorded:
            self.anchors = [operand.anchor for operand in self.operands]  # a call by itself has begun a step just now
        self.here = True

    def scatter(self, produce: Callable[[int, Piece], None]) -> None:
        """Send the gradients. produce(number of a weight, piece): fills piece.tensor, rows of its gradient (part 0) or of its
        bias' (part 1); what is owed to others comes first. Every recorded call of the op comes here once, also for nothing."""
        for number, operand in enumerate(self.operands):

            def fill(item: ByOwner, pieces: Sequence[Piece], number: int = number) -> None:
                for piece in pieces:
                    produce(number, piece)

            operand.exchange(None, fill)


class _Arriving:
    """A `Visit`: puts the slices of one weight in their places, then hands them on."""

    __slots__ = ("_number", "_rows", "_wholes")

    def __init__(
        self,
        number: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Callable[[int, slice, torch.Tensor], object] | None,
    ) -> None:
        self._number, self._wholes, self._rows = number, (weight, bias), rows

    def __call__(self, item: ByOwner, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            whole = self._wholes[piece.part]
            assert whole is not None
            place = piece.of(whole)
            place.copy_(piece.tensor)
            if self._rows is not None and piece.part == 0:
                self._rows(self._number, slice(piece.row_start, piece.row_start + place.shape[0]), place)
