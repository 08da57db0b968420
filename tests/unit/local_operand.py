"""All ranks' operands in one process and one thread, without a transport: what the ops compute, apart from how it moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commfuse_dp.ops.operands import Visit
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.program.layout import FlatLayout, chunk_bounds, rectangles, row_slices


class Rows(NamedTuple):
    owner: int
    start: int
    stop: int


class LocalOperand:
    """Rank `rank`'s view of whole parameters that are cut by FSDP2's rule; notes the order of visits and keeps its partials.

    Slices are laid out as the engine's are: the biases of an owner come with its first slice. flat_bounds: flat ranges instead
    of rows, as DeepSpeed cuts them. transposed: the weight is [in, out].
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
        transposed: bool = False,
        flat_bounds: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.name = "local"
        self.params = params
        self.rank, self.world_size = rank, world_size
        self.shapes = tuple(tuple(p.shape) for p in params)
        self.out_features, self.in_features = self.shapes[0][0], self.shapes[0][-1]
        self.transposed = transposed
        if transposed:
            self.out_features, self.in_features = self.in_features, self.out_features
        self.has_bias = len(params) > 1
        self.flat = FlatLayout(flat_bounds, self.shapes[0][-1], slices) if flat_bounds is not None else None
        self.split_rows = self.flat.split_rows if self.flat is not None else ()
        self.whole = None
        self.anchor = torch.zeros(1, requires_grad=True)
        self.trainable = trainable if trainable is not None else (True,) * len(params)
        self.compute_dtype = params[0].dtype
        self.partial_dtype = partial_dtype if partial_dtype is not None else params[0].dtype
        self.bounds = [chunk_bounds(shape[0], world_size) for shape in self.shapes]
        self.main = row_slices(self.shapes[0][0], world_size, slices)
        self.partials = [torch.full(p.shape, float("nan"), dtype=self.partial_dtype) for p in params]
        self.expected = 0
        self.visits: list[tuple[str, int]] = []
        self.exchanges = 0
        self.gather_copies = True  # what is gathered is valid during the call only: in memory of its own
        self.reads = 0

    def expect_backward(self) -> None:
        self.expected += 1

    def _visit(self, visit: Visit, tensors: list[torch.Tensor], owner: int, include: tuple[bool, ...]) -> None:
        if self.flat is not None:
            for cut in self.flat.slices(owner) if include[0] else ():
                spans = rectangles(cut.start, cut.stop, self.shapes[0][-1])
                visit(
                    Rows(owner, cut.start, cut.stop),
                    [
                        Piece(
                            0, s.row_start, tensors[0][s.row_start : s.row_stop, s.column_start : s.column_stop], s.column_start
                        )
                        for s in spans
                    ],
                )
            return
        heads = []
        for part in range(1, len(tensors)):
            low, high = self.bounds[part][owner]
            if include[part] and high > low:
                heads.append(Piece(part, low, tensors[part][low:high]))
        pieces = [Piece(0, cut.start, tensors[0][cut.start : cut.stop]) for cut in self.main[owner]]
        if not include[0] or not pieces:
            if heads:
                visit(Rows(owner, 0, 0), heads)
            return
        for number, piece in enumerate(pieces):
            stop = piece.row_start + piece.tensor.shape[0]
            visit(Rows(owner, piece.row_start, stop), [*heads, piece] if number == 0 else [piece])

    def gather(self, consume: Visit) -> None:
        for distance in range(self.world_size):
            owner = (self.rank + distance) % self.world_size
            self.visits.append(("gather", owner))
            params = [p.clone() for p in self.params] if self.gather_copies else self.params
            self._visit(consume, params, owner, (True,) * len(self.params))

    version = 1

    def read(self, consume: Visit) -> None:
        self.reads += 1
        self.gather(consume)

    expect_more = expect_backward

    def exchange(self, consume: Visit | None, produce: Visit | None, *, dtype: torch.dtype | None = None) -> None:
        self.exchanges += 1
        assert dtype in (None, self.partial_dtype)
        include = self.trainable
        produce = produce if any(include) else None
        for distance in range(1, self.world_size + 1):
            owner = (self.rank + distance) % self.world_size
            if produce is not None:
                self.visits.append(("produce", owner))
                self._visit(produce, self.partials, owner, include)
            if consume is not None:
                self.visits.append(("consume", owner))
                self._visit(consume, self.params, owner, (True,) * len(self.params))
