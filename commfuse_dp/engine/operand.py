"""A unit as the ops see it: shapes, dtypes and the two callbacks, bound to the engine that moves its slices."""

from __future__ import annotations

from functools import partial

import torch

from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.plan import Unit


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
        # Not methods, which would be a frame in every layer.
        self.expect_backward = partial(engine.expect_backward, unit)
        self.gather = partial(engine.gather, unit)
        self.exchange = partial(engine.exchange, unit)
        self.read = partial(engine.read, unit)  # as `gather`, but holds nothing for the unit's backward
        self.expect_more = partial(engine.expect_more, unit)

    @property
    def version(self) -> int:
        """Of the published parameters."""
        return self._engine.step

    @property
    def split_rows(self) -> tuple[int, ...]:
        return self._unit.split_rows

    @property
    def trainable(self) -> tuple[bool, ...]:
        return tuple([slot.wants()[0] for slot in self._unit.slots])

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters."""
        return self._unit.dtype
