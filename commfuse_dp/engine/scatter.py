"""One unit's reduce-scatter under way, and what follows it over replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commfuse_dp.engine.plan import Geometry, Unit, UnitSlice
from commfuse_dp.engine.route import Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag

SEQUENCE_LIMIT = 1 << 31


class Scatter:
    """One unit's reduce-scatter under way."""

    __slots__ = (
        "divisor",
        "geometry",
        "include",
        "own",
        "own_done",
        "partials",
        "replicate",
        "route",
        "seq",
        "step",
        "summed",
        "unit",
        "unloaded",
    )

    def __init__(
        self, unit: Unit, geometry: Geometry, include: tuple[bool, ...], *, divisor: float, replicate: bool, step: int
    ) -> None:
        self.unit = unit
        self.geometry = geometry
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


class ReplicaGroup:
    """All-reduce of reduced shards over the replicas of hybrid sharding; a communicator of its own.

    [Note: Never ended] torch names a group by its ranks and by how many groups there are. After one was destroyed the next of
    the same ranks would get its name and meet the old addresses in the store; and ranks that collect garbage at different times
    would name it differently. So it stays until torch.distributed ends, as groups of the framework do.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group = group
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return dist.all_reduce(tensor, group=self.group, async_op=True)
