"""The programs of a unit, as this rank runs them: what is computed on which slice and when, and what ranks send each other.

    Programs.forward / backward     geometry -> Program (program/layer.py): what verify.py proves and simulate.py times
    bind                            Program -> entries of the compute lane, with what they are computed on

The engine runs the entries; who sends what to whom for them is the affair of window, gradient stream and routes. Tests compare
what these send with the program's sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.plan import Geometry, Unit, UnitSlice, absent_slice
from commfuse_dp.engine.room import in_chain
from commfuse_dp.engine.routes.steps import Way, way_of
from commfuse_dp.program import layer
from commfuse_dp.program.layout import Slice, Tensor
from commfuse_dp.program.operations import Collective, Consume, Problem, Produce, Program, Reduce
from commfuse_dp.program.scatter import SUMS
from commfuse_dp.transport.base import Transport

Read = TypeVar("Read")


def flat_order(config: CommFuseConfig) -> str:
    """The order where every rank turns to every other."""
    return "ring" if config.order == "ring" else "pairwise"


class Reduction(NamedTuple):
    """What this rank adds up, and passes on, of a unit's gradient."""

    sums: tuple[Reduce, ...]  # of its own slices, whose partials come straight from all ranks
    way: Way | None  # else: the steps of all slices


class Programs:
    """Of all units of an engine."""

    def __init__(self, transport: Transport, config: CommFuseConfig) -> None:
        self.rank = transport.rank
        self._world_size = transport.world_size
        self._hosts = transport.hosts
        self._lockstep = transport.lockstep
        self._order = "hierarchical" if transport.hosts is not None else flat_order(config)

    def forward(self, unit: Unit) -> Program:
        """The unit's parameters are consumed, own first."""
        return layer.forward(self._parameters(unit, unit.name), self.rank)

    def backward(self, unit: Unit, gradients: Geometry | None, *, read: bool) -> Program:
        """gradients: layout of the partials that are produced, None: of none. read: the parameters are consumed beside them."""
        parameters = self._parameters(unit, f"{unit.name}, backward") if read else None
        reduced = self._gradients(unit, gradients) if gradients is not None else None
        return layer.backward(parameters, reduced, self.rank)

    def reduction(self, unit: Unit, gradients: Geometry) -> Reduction:
        program = self.backward(unit, gradients, read=False)
        way = way_of(program, gradients, lockstep=self._lockstep)
        return Reduction(program.reduce_lanes.get(SUMS, ()) if way is None else (), way)

    def _parameters(self, unit: Unit, name: str) -> Problem:
        way = "hosts" if self._hosts is not None else "direct"
        tensor = Tensor(name, "parameters")
        return self._problem("all_gather", unit.params, tensor, self._order, way, padded=self._lockstep)

    def _gradients(self, unit: Unit, geometry: Geometry) -> Problem:
        tensor = Tensor(f"gradient of {unit.name}", "gradients")
        if in_chain(unit, self._world_size):  # in the order in which the links of the chain follow each other
            return self._problem("reduce_scatter", geometry, tensor, "ring", "ring")
        if self._hosts is not None:
            return self._problem("reduce_scatter", geometry, tensor, self._order, "hosts")
        return self._problem("reduce_scatter", geometry, tensor, self._order, "direct", padded=self._lockstep)

    def _problem(
        self, collective: Collective, geometry: Geometry, tensor: Tensor, order: str, way: str, *, padded: bool = False
    ) -> Problem:
        """padded: every owner gets as many slices as the one that has most: ranks of a lockstep transport take equal steps."""
        most = max(map(len, geometry.slices))
        cut = []
        for owner, own in enumerate(geometry.slices):
            parts = [Slice(owner, item.index, item.start, item.stop) for item in own]
            if padded:
                at = parts[-1].stop if parts else 0
                parts += [Slice(owner, index, at, at) for index in range(len(own), most)]
            cut.append(parts)
        return Problem.of(collective, cut, order=order, way=way, hosts=self._hosts, tensor=tensor)


class Entry(NamedTuple, Generic[Read]):
    """One operation of the compute lane: the partial of `item` is produced, or what `read` stands for is consumed."""

    item: UnitSlice | None
    read: Read | None


def bind(program: Program, gradients: Geometry | None, reads: Callable[[Slice], Read | None]) -> tuple[Entry[Read], ...]:
    """The program's compute lane over the slices of `gradients`, and over what `reads` has for a slice of the parameters."""
    entries: list[Entry[Read]] = []
    for op in program.compute_lane:
        if isinstance(op, Consume):
            read = reads(op.piece.slice)
            if read is not None:
                entries.append(Entry(None, read))
        elif isinstance(op, Produce) and gradients is not None:
            item = _item(gradients.slices, op.slice, program.rank)
            if item is not None:
                entries.append(Entry(item, None))
    return tuple(entries)


def _item(slices: Sequence[Sequence[UnitSlice]], part: Slice, rank: int) -> UnitSlice | None:
    """The slice itself; an absent one in a lockstep step that its owner has none for, if one comes to this rank meanwhile."""
    own = slices[part.owner]
    if part.index < len(own):
        return own[part.index]
    return absent_slice(part.owner, part.index) if part.owner != rank and part.index < len(slices[rank]) else None
