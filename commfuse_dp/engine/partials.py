"""The partial gradients of one backward call of one unit, on their way out of the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from commfuse_dp.engine.bound import BoundBackward
from commfuse_dp.engine.plan import Unit, UnitSlice
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.ops.operands import other_parameters
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.probe import now_ns

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Engine

Produce = Callable[[UnitSlice, "list[Piece]"], None]


class PartialGradients:
    """Where the partial gradients of one backward call go: to their owners, or into the local accumulation."""

    __slots__ = ("_accumulated", "_computed", "_engine", "_include", "_scatter", "_unit", "geometry")

    def __init__(self, engine: Engine, unit: Unit, bound: BoundBackward, computed: torch.dtype) -> None:
        self._engine = engine
        self._unit = unit
        self._computed = computed  # dtype that `produce` computes in
        self._include = bound.include
        reduce = bound.record.reduce
        if unit.accumulated is not None and unit.accumulated_for is not unit.anchor:
            raise other_parameters(unit.name)
        unit.accumulated_for = unit.anchor
        if not reduce and unit.accumulated is None:
            dtype = bound.record.dtype
            unit.accumulated = [torch.zeros(shape, dtype=dtype, device=engine.device) for shape in unit.whole_shapes()]
        self._accumulated = unit.accumulated
        self.geometry = bound.geometry
        self._scatter = engine.gradients.begin(bound, engine.step) if reduce else None
        if reduce:
            unit.accumulated = None  # it travels with this reduction

    def produce_whole(self, wgrad: Callable[[Scatter, list[UnitSlice]], bool], order: list[UnitSlice]) -> bool:
        """All partials by one product, if nothing has to be added to them here."""
        if self._scatter is None or self._accumulated is not None:
            return False
        return wgrad(self._scatter, order)

    def fill(self, item: UnitSlice, produce: Produce) -> None:
        """Have the partial of one slice computed and send it (or add it up)."""
        gradients = self._engine.gradients
        if item.absent:
            if self._scatter is not None:
                gradients.send_nothing(self._scatter, item)
            return
        if self._scatter is None:
            self._produce_beside(item, produce, lambda earlier, new: earlier.add_(new))
            return
        buffer = gradients.reserve(self._scatter, item)
        start = now_ns() if self._engine.probe.sink is not None else 0
        target = self.geometry.pieces(item, buffer)
        if self._accumulated is None:
            produce(item, target)
        else:
            outs = iter(target)
            self._produce_beside(item, produce, lambda earlier, new: torch.add(earlier, new, out=next(outs).tensor))
        gradients.send(self._scatter, item, buffer, start)

    def _produce_beside(self, item: UnitSlice, produce: Produce, combine: Callable[..., object]) -> None:
        """Compute the partial in a buffer of its own, then combine it with what earlier microbatches accumulated."""
        assert self._accumulated is not None
        geometry = self._unit.geometry(self._computed, self._include)
        twin = geometry.slices[item.owner][item.index]
        scratch = self._engine.buffers.take(twin.nbytes)
        pieces = geometry.pieces(twin, scratch)
        produce(twin, pieces)
        for piece in pieces:
            combine(piece.of(self._accumulated[piece.part]), piece.tensor)
        self._engine.buffers.give(scratch)
