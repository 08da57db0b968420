"""One unit's reduce-scatter under way."""

from __future__ import annotations

import torch

from commfuse_dp.engine.plan import Geometry, Unit, UnitSlice
from commfuse_dp.engine.programs import Reduction
from commfuse_dp.engine.route import Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag

SEQUENCE_LIMIT = 1 << 31


class Scatter:
    """One unit's reduce-scatter under way."""

    __slots__ = (
        "divisor",
        "geometry",
        "in_place",
        "include",
        "kept",
        "out_dtype",
        "own",
        "own_done",
        "partials",
        "reduction",
        "replicate",
        "route",
        "seq",
        "step",
        "summed",
        "unit",
        "unloaded",
    )

    def __init__(
        self,
        unit: Unit,
        geometry: Geometry,
        reduction: Reduction,
        include: tuple[bool, ...],
        *,
        out_dtype: torch.dtype,
        kept: bool,
        divisor: float,
        replicate: bool,
        step: int,
    ) -> None:
        self.unit = unit
        self.geometry = geometry
        self.reduction = reduction
        self.out_dtype = out_dtype  # of what is delivered; with replicas: summed on over these before it is rounded
        self.in_place = geometry.dtype == out_dtype  # the buffer of the own partial can become the gradient itself
        self.kept = kept  # whoever gets the sum keeps it
        self.include = include
        self.divisor = divisor
        self.replicate = replicate
        self.step = step
        self.seq = unit.scatters
        unit.scatters = (unit.scatters + 1) % SEQUENCE_LIMIT
        self.own: torch.Tensor | None = None  # bytes of this rank's own partial
        self.own_done = 0  # own slices computed
        self.summed = 0  # own slices reduced
        self.partials: torch.Tensor | None = None
        self.route: Route | None = None
        self.unloaded: dict[tuple[int, int], torch.Tensor] = {}  # (rank, slice) -> partial that was copied out of the inbox

    def tag(self, item: UnitSlice) -> Tag:
        return Tag(CHANNEL_GRAD, self.unit.index, self.seq, item.index)

    def where(self, item: UnitSlice) -> Where:
        return Where(self.unit.name, self.step, str(item), item.nbytes)
