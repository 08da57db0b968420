"""Partial gradients that are added up here over several microbatches, or calls of a module, before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from commfuse_dp.engine.bound import BoundBackward
from commfuse_dp.engine.plan import Unit, UnitSlice
from commfuse_dp.ops.operands import other_parameters
from commfuse_dp.ops.pieces import Piece

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Engine

Produce = Callable[[UnitSlice, "list[Piece]"], None]


class PartialGradients:
    """Those of one backward call of one unit: they go into the local accumulation, or with it to their owners."""

    __slots__ = ("_accumulated", "_computed", "_engine", "_include", "_scatter", "_unit", "geometry")

    def __init__(
        self, engine: Engine, unit: Unit, bound: BoundBackward, computed: torch.dtype, include: tuple[bool, ...]
    ) -> None:
        """include: parts that `produce` computes, in the dtype `computed`."""
        self._engine = engine
        self._unit = unit
        self._computed = computed
        self._include = include
        reduce = bound.record.reduce
        if unit.accumulated is not None and unit.accumulated_for is not unit.anchor:
            raise other_parameters(unit.name)
        unit.accumulated_for = unit.anchor
        if not reduce:
            kept: list[torch.Tensor | None] = unit.accumulated if unit.accumulated is not None else [None] * len(unit.slots)
            for part, shape in enumerate(unit.whole_shapes()):
                if include[part] and kept[part] is None:
                    kept[part] = torch.zeros(shape, dtype=bound.record.dtype, device=engine.device)
            unit.accumulated = kept
        self._accumulated = unit.accumulated
        self.geometry = bound.geometry
        self._scatter = engine.gradients.begin(bound, engine.step) if reduce else None
        if reduce:
            unit.accumulated = None  # it travels with this reduction

    def fill(self, item: UnitSlice, produce: Produce) -> None:
        """Have the partial of one slice computed and send it (or add it up)."""
        gradients = self._engine.gradients
        if item.absent:
            if self._scatter is not None:
                gradients.send(self._scatter, (item,), ())
            return
        if self._scatter is None:
            with self._beside(item, produce) as pieces:
                for piece in pieces:
                    self._earlier(piece).add_(piece.tensor)  # type: ignore[union-attr]
            return
        gradients.produce(self._scatter, item, partial(self._produce_joined, produce))

    def _produce_joined(self, produce: Produce, item: UnitSlice, target: Sequence[Piece]) -> None:
        """target = what earlier microbatches have accumulated + what is produced now."""
        with self._beside(item, produce) as produced:
            new = {(piece.part, piece.row_start, piece.column_start): piece.tensor for piece in produced}
            for piece in target:
                earlier, now = self._earlier(piece), new.get((piece.part, piece.row_start, piece.column_start))
                if earlier is None or now is None:  # a part that is trained only now, or no more
                    found = earlier if earlier is not None else now
                    assert found is not None
                    piece.tensor.copy_(found)
                else:
                    torch.add(earlier, now, out=piece.tensor)

    def _earlier(self, piece: Piece) -> torch.Tensor | None:
        assert self._accumulated is not None
        whole = self._accumulated[piece.part]
        return piece.of(whole) if whole is not None else None

    @contextmanager
    def _beside(self, item: UnitSlice, produce: Produce) -> Iterator[list[Piece]]:
        """The partial of a slice in a buffer of its own."""
        geometry = self._unit.geometry(self._computed, self._include)
        own = geometry.slices[item.owner]
        if item.index >= len(own):  # all of it comes from earlier microbatches
            yield []
            return
        twin = own[item.index]
        scratch = self._engine.buffers.take(twin.nbytes)
        pieces = geometry.pieces(twin, scratch)
        produce(twin, pieces)
        yield pieces
        self._engine.buffers.give(scratch)
