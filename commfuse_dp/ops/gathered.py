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

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from commfuse_dp.ops.linear import PieceInfo, SliceInfo, Visit


class GatheredOperand(Protocol):
    shapes: tuple[tuple[int, ...], ...]
    anchor: torch.Tensor

    def gather(self, consume: Visit) -> None: ...

    def exchange(
        self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype, include: tuple[bool, ...]
    ) -> None: ...

    @property
    def trainable(self) -> tuple[bool, ...]: ...

    @property
    def compute_dtype(self) -> torch.dtype: ...


class _GatherParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, operand: GatheredOperand) -> tuple[torch.Tensor, ...]:
        ctx.operand = operand
        wholes = tuple(torch.empty(shape, dtype=operand.compute_dtype, device=anchor.device) for shape in operand.shapes)

        def consume(item: SliceInfo, pieces: Sequence[PieceInfo]) -> None:
            for piece in pieces:
                wholes[piece.part][piece.row_start : piece.row_start + piece.tensor.shape[0]].copy_(piece.tensor)

        operand.gather(consume)
        trainable = operand.trainable
        ctx.mark_non_differentiable(*[whole for whole, wanted in zip(wholes, trainable, strict=True) if not wanted])
        return wholes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        operand = ctx.operand

        def produce(item: SliceInfo, pieces: Sequence[PieceInfo]) -> None:
            for piece in pieces:
                piece.tensor.copy_(grads[piece.part][piece.row_start : piece.row_start + piece.tensor.shape[0]])

        include = operand.trainable
        operand.exchange(None, produce if any(include) else None, dtype=operand.compute_dtype, include=include)
        return None, None


def gather_parameters(operand: GatheredOperand) -> tuple[torch.Tensor, ...]:
    """The operand's whole parameters, differentiable: their gradients are reduced to the owners' shards."""
    return _GatherParameters.apply(operand.anchor, operand)
