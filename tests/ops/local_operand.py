"""All ranks' operands in one process and one thread, without a transport: what the ops compute, apart from how it moves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from commfuse_dp.ops.linear import Visit
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.schedule.layout import RowLayout


class Rows(NamedTuple):
    owner: int
    start: int
    stop: int


class LocalOperand:
    """Rank `rank`'s view of whole parameters that are cut by FSDP2's rule; notes the order of visits and keeps its partials.

    Slices are laid out as the engine's are: the biases of an owner come with its first slice.
    """

    def __init__(
        self,
        params: list[torch.Tensor],
        rank: int,
        world_size: int,
        slices: int,
        *,
        trainable: tuple[bool, ...] | None = None,
        partial_dtype: torch.dtype | None = None,
    ) -> None:
        self.params = params
        self.rank, self.world_size = rank, world_size
        self.shapes = tuple(tuple(p.shape) for p in params)
        self.out_features, self.in_features = self.shapes[0][0], self.shapes[0][-1]
        self.has_bias = len(params) > 1
        self.split_rows = ()
        self.whole = None
        self.anchor = torch.empty(0, requires_grad=True)
        self.trainable = trainable if trainable is not None else (True,) * len(params)
        self.compute_dtype = params[0].dtype
        self.partial_dtype = partial_dtype if partial_dtype is not None else params[0].dtype
        self.layout = RowLayout(self.out_features, world_size, slices)
        self.partials = [torch.full(p.shape, float("nan"), dtype=self.partial_dtype) for p in params]
        self.expected = 0
        self.visits: list[tuple[str, int]] = []
        self.exchanges = 0

    def expect_backward(self) -> None:
        self.expected += 1

    def _visit(self, visit: Visit, tensors: list[torch.Tensor], owner: int, include: tuple[bool, ...]) -> None:
        low, high = self.layout.bounds(owner)
        heads = [Piece(i, low, tensors[i][low:high]) for i in range(1, len(tensors)) if include[i]]
        for number, piece in enumerate(self.layout.slices(owner)):
            parts = heads if number == 0 else []
            if include[0]:
                parts = [*parts, Piece(0, piece.start, tensors[0][piece.start : piece.stop])]
            if parts:
                visit(Rows(owner, piece.start, piece.stop) if include[0] else Rows(owner, low, low), parts)

    def gather(self, consume: Visit) -> None:
        for distance in range(self.world_size):
            owner = (self.rank + distance) % self.world_size
            self.visits.append(("gather", owner))
            self._visit(consume, [p.clone() for p in self.params], owner, (True,) * len(self.params))

    def exchange(self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype, include: tuple[bool, ...]) -> None:
        self.exchanges += 1
        assert dtype == self.partial_dtype and include == self.trainable
        for distance in range(1, self.world_size + 1):
            owner = (self.rank + distance) % self.world_size
            if produce is not None:
                self.visits.append(("produce", owner))
                self._visit(produce, self.partials, owner, include)
            if consume is not None:
                self.visits.append(("consume", owner))
                self._visit(consume, self.params, owner, (True,) * len(self.params))
