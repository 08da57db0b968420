"""One unit's reduce-scatter under way."""

from __future__ import annotations

import torch

from commfuse_dp.engine.bound import BoundBackward
from commfuse_dp.engine.plan import UnitSlice
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag

SEQUENCE_LIMIT = 1 << 31


class Scatter:
    """One unit's reduce-scatter under way."""

    __slots__ = ("bound", "flat", "own", "own_done", "partials", "route", "seq", "step", "summed", "tags", "unit", "unloaded")

    def __init__(self, bound: BoundBackward, step: int) -> None:
        unit = bound.unit
        self.bound = bound
        self.unit = unit
        self.step = step
        self.seq = unit.scatters
        unit.scatters = (unit.scatters + 1) % SEQUENCE_LIMIT
        self.tags: dict[int, Tag] = {}  # by index, as far as they were asked for
        self.own: torch.Tensor | None = None  # memory of this rank's own partial, 1-D: bytes, or in its dtype
        self.flat: torch.Tensor | None = None  # the same in its dtype
        self.own_done = 0  # own slices computed
        self.summed = 0  # own slices reduced
        self.partials: torch.Tensor | None = None
        self.route: Route | None = None
        self.unloaded: dict[tuple[int, int], torch.Tensor] = {}  # (rank, slice) -> partial that was copied out of the inbox

    def tag(self, item: UnitSlice) -> Tag:
        found = self.tags.get(item.index)
        if found is None:
            name = CHANNEL_GRAD, self.unit.index, self.seq, item.index
            found = self.tags[item.index] = tuple.__new__(Tag, name)  # without a frame in every layer
        return found

    def where(self, item: UnitSlice) -> Where:
        return Where(self.unit.name, self.step, str(item), item.nbytes)
