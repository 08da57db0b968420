"""A unit as the ops see it: shapes, dtypes and the two callbacks, bound to the engine that moves its slices."""

from __future__ import annotations

from operator import attrgetter

import torch

from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.parameters import Consume
from commfuse_dp.engine.partials import Produce
from commfuse_dp.engine.plan import Unit

_requires_grad = attrgetter("requires_grad")


class UnitOperand:
    """Implements `ops.linear.ShardedOperand`, `ops.gathered.GatheredOperand` and `ops.on_demand.ReadOperand`."""

    def __init__(self, engine: Engine, unit: Unit, *, transposed: bool = False) -> None:
        """transposed: the unit is a linear whose weight is [in, out]; its products go by slices, on GPUs by BLAS."""
        self._engine = engine
        self._unit = unit
        self.name = unit.name
        self.anchor = unit.anchor
        unit.operands.add(self)
        self.shapes = tuple(slot.shape for slot in unit.slots)
        rows, columns = self.shapes[0][0], self.shapes[0][1] if len(self.shapes[0]) > 1 else 1
        self.out_features, self.in_features = (columns, rows) if transposed else (rows, columns)
        self.transposed = transposed
        self.has_bias = len(self.shapes) > 1
        self.whole = None if transposed else engine.whole_products(unit)

    def expect_backward(self) -> None:
        self._engine.expect_backward(self._unit)

    def gather(self, consume: Consume) -> None:
        self._engine.gather(self._unit, consume)

    def read(self, consume: Consume) -> None:
        """As `gather`, but holds nothing for the unit's backward."""
        self._engine.read(self._unit, consume)

    def expect_more(self) -> None:
        self._engine.expect_more(self._unit)

    @property
    def version(self) -> int:
        """Of the published parameters."""
        return self._engine.step

    def exchange(
        self, consume: Consume | None, produce: Produce | None, *, dtype: torch.dtype, include: tuple[bool, ...]
    ) -> None:
        self._engine.exchange(self._unit, consume, produce, dtype=dtype, include=include)

    @property
    def split_rows(self) -> tuple[int, ...]:
        return self._unit.split_rows

    @property
    def trainable(self) -> tuple[bool, ...]:
        return tuple(map(_requires_grad, self._unit.slots))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters."""
        return self._unit.dtype

    @property
    def partial_dtype(self) -> torch.dtype:
        """Dtype in which partial gradients travel: the narrower of the computed and the reduced one (they are summed wide)."""
        computed, reduced = self._unit.dtype, self._unit.policy.reduce_dtype  # not `compute_dtype`: a frame a layer
        return reduced if reduced is not None and reduced.itemsize < computed.itemsize else computed
