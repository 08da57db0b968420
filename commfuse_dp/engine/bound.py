"""A unit's backward, bound: its program over this rank's memory, and all that follows from what it depends on.

    Record    what the program depends on, read once when a backward comes to the unit
    Binder    Record -> BoundBackward: bound when it comes for the first time, replayed from then on

A record that differs in anything (another dtype, other parts that are trained, gradients that are accumulated instead of
reduced, another divisor) has a program of its own, which is kept beside the others: a loop of gradient accumulation alternates
between two of them. `CommFuseConfig(replay=False)` binds anew in every backward. Both run the same entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.engine.parameters import ParameterStream, Visit
from commfuse_dp.engine.plan import Geometry, ParamSlot, Settings, Unit, UnitSlice
from commfuse_dp.engine.programs import Entry, Programs, Reduction, bind
from commfuse_dp.engine.room import check_room
from commfuse_dp.engine.window import Key
from commfuse_dp.errors import CommFuseError
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.one_sided.ring import align

MOST_VIEWS = 1024  # of slots that a program keeps
MOST_PROGRAMS = 8  # of one unit that are kept: the loops of a training script have two or three


class Record(NamedTuple):
    """What a unit's backward depends on, besides its layout. All ranks have the same."""

    read: bool  # its parameters are consumed
    dtype: torch.dtype | None  # of the partial gradients, as they travel or are accumulated; None: none are produced
    include: tuple[bool, ...]  # parts that have one
    reduce: bool  # they are sent to their owners; else accumulated here
    delivered: torch.dtype | None  # dtype in which the main parameter wants its gradient
    divisor: float | None  # None: the number of data-parallel ranks
    replicate: bool  # with replicas: the sum goes on over them now


class Delivery(NamedTuple):
    """Where a parameter's gradient lies in the sum of a unit."""

    part: int
    slot: ParamSlot
    offset: int  # elements
    shape: torch.Size  # of this rank's shard


class Fan(NamedTuple):
    """The partials of one index (`part` of their tag), which go to all owners that have such a slice."""

    part: int
    dsts: list[int]
    sizes: list[int]  # bytes
    room: int  # see `Sending`


class BoundBackward:
    """One unit's backward on one rank. Nothing in here changes from step to step.

    Attributes:
        rooms: by index of a slice: what both ends set aside for its partial; 0: as much as it has. Only if all go straight.
        fans: likewise, who gets one.
        sources: of each own slice whose partials go straight: the peers in the order of the sum, and this rank's place in it.
        slot_views: pieces of slots in peers' inboxes, by slot (its identity; it is kept beside them) and index of the slice.
        inbox_views: likewise, what lies in a slot of this rank's inbox, in the dtype of the partials.
    """

    def __init__(
        self,
        unit: Unit,
        record: Record,
        geometry: Geometry | None,
        entries: Sequence[Entry[Visit]],
        reduction: Reduction | None,
        *,
        rank: int,
        ranks: int,
        replicas: int,
    ) -> None:
        """ranks, replicas: that gradients are summed over; replicas 0: there are none."""
        self.unit = unit
        self.record = record
        if geometry is not None:
            self.geometry: Geometry = geometry  # of the partial gradients, if there are any
            self.deliveries = _deliveries(unit, geometry, record.include, rank) if record.reduce else ()
        self.order = [entry.item for entry in entries if entry.item is not None]  # slices of gradients
        self.rooms: list[int] = []
        self.fans: list[Fan] = []
        if reduction is not None:
            self.reduction: Reduction = reduction  # if they are reduced
            if reduction.way is None and geometry is not None:
                self.rooms = _rooms(geometry)
                for index, room in enumerate(self.rooms):
                    to = [item for item in self.order if item.index == index and item.owner != rank and not item.absent]
                    self.fans.append(Fan(index, [item.owner for item in to], [item.nbytes for item in to], room))
            self.sources = [
                (tuple(source for source in added.inputs if source != rank), added.inputs.index(rank))
                for added in reduction.sums
            ]
        self.entries = tuple(entries)  # the compute lane
        reads = [entry.read for entry in entries if entry.read is not None]
        self.remote: list[Key] = list(dict.fromkeys(read.group.key for read in reads if read.item.owner != rank))
        if record.delivered is not None and record.dtype is not None:
            # With replicas the sum is rounded only after that over these.
            self.out_dtype: torch.dtype = wide_dtype(record.dtype) if replicas else record.delivered  # of the sum
            self.wide: torch.dtype = wide_dtype(self.out_dtype, record.dtype)  # what is added up in
            self.in_place = record.dtype == self.out_dtype  # the buffer of the own partial can become the gradient itself
        self.kept = bool(replicas) or any(slot.keeps_delivered for slot in unit.slots)  # whoever gets the sum keeps it
        self.divisor = float(ranks * max(1, replicas)) if record.divisor is None else float(record.divisor)
        self.replicate = bool(replicas) and record.replicate
        self.slot_views: dict[tuple[int, int], tuple[torch.Tensor, list[Piece]]] = {}
        self.inbox_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def slot_pieces(self, item: UnitSlice, slot: torch.Tensor) -> list[Piece]:
        """Views of a slot for one slice, one for each part. The slot must be of the kind that comes again."""
        name = id(slot), item.index  # slices of one size lie in one slot after another
        known = self.slot_views.get(name)
        if known is None or known[0] is not slot:
            if len(self.slot_views) >= MOST_VIEWS:
                self.slot_views.clear()
            known = self.slot_views[name] = slot, self.geometry.pieces(item, slot)
        return known[1]


def _rooms(geometry: Geometry) -> list[int]:
    """The largest slice of each index, so that what goes to different owners lies in the same places; 0 where that would be
    more than one owner gets, for which inboxes have room (engine/room.py)."""
    most = max(map(len, geometry.slices))
    rooms = [max(own[index].nbytes for own in geometry.slices if index < len(own)) for index in range(most)]
    return rooms if sum(map(align, rooms)) <= max(geometry.owed) else [0] * most


def _deliveries(unit: Unit, geometry: Geometry, include: Sequence[bool], rank: int) -> tuple[Delivery, ...]:
    own, itemsize = geometry.slices[rank], geometry.dtype.itemsize
    found = []
    for part, slot in enumerate(unit.slots):
        if include[part]:
            heads = [offset for item in own for head, offset, _, _ in item.heads if head == part]
            starts = heads if part else [item.main_offset for item in own[:1] if item.main_offset >= 0]
            found.append(Delivery(part, slot, starts[0] // itemsize if starts else 0, slot.local().shape))
    return tuple(found)


class Binder:
    """Of all units of an engine."""

    def __init__(
        self, transport: Transport, programs: Programs, parameters: ParameterStream, *, replicas: int, replay: bool
    ) -> None:
        self._transport = transport
        self._probe = transport.probe
        self._replicas = replicas
        self._programs = programs
        self._parameters = parameters
        self._replay = replay
        self._bound: dict[int, dict[Record, BoundBackward]] = {}  # by unit

    def record(
        self,
        unit: Unit,
        settings: Settings,
        computed: torch.dtype | None,
        include: tuple[bool, ...],
        delivered: torch.dtype | None,
        *,
        read: bool,
        reduce: bool,
    ) -> Record:
        """What holds for the unit now.

        computed: dtype of the products that are its partial gradients; None: there are none. include: parts that have one.
        delivered: dtype in which the main parameter wants its gradient."""
        if computed is None:
            return Record(read, None, include, False, None, None, False)
        if unit.accumulated is not None:  # in the wider of the two, from the first microbatch on
            computed = unit.accumulated_dtype or computed
            if reduce:  # also of what is not trained any more
                include = tuple(now or kept is not None for now, kept in zip(include, unit.accumulated, strict=True))
        elif not reduce:
            computed = settings.reduce_dtype or computed
        if not reduce:
            return Record(read, computed, include, False, None, None, False)
        replicate = self._replicas > 0 and settings.all_reduce_grads
        found = read, computed, include, True, delivered, settings.divide_factor, replicate
        return tuple.__new__(Record, found)  # without a frame in every layer

    def backward(self, unit: Unit, record: Record) -> BoundBackward:
        """Its program, bound. Raises CommFuseError if CommFuse has been removed from its model, ConfigError if there is no room
        for its partial gradients."""
        kept = self._bound.get(unit.index)
        if kept is None:
            kept = self._bound[unit.index] = {}
        found = kept.get(record)
        if found is not None and self._replay:
            self._probe.counters.replayed += 1
            return found
        self._probe.bound(self._reason(record, kept))
        if found is None and len(kept) >= MOST_PROGRAMS:
            kept.clear()
        found = kept[record] = self._bind(unit, record)
        return found

    def forget_all(self) -> None:
        """The end: drop every view of memory."""
        self._bound.clear()

    def _reason(self, record: Record, kept: dict[Record, BoundBackward]) -> str:
        if not self._replay:
            return "replay=False"
        if not kept:
            return "first backward of a layer"
        before = next(reversed(kept))
        return "another " + ", ".join(name for name in Record._fields if getattr(record, name) != getattr(before, name))

    def _bind(self, unit: Unit, record: Record) -> BoundBackward:
        visit = self._parameters.visitor(unit)
        if visit is None:
            raise CommFuseError(f"layer {unit.name!r}: CommFuse was removed from its model before this backward")
        geometry = unit.geometry(record.dtype, record.include) if record.dtype is not None else None
        if geometry is not None and record.reduce and record.dtype != unit.dtype:  # others were checked in the first step
            check_room(unit, geometry, self._transport)
        program = self._programs.backward(unit, geometry, read=record.read)
        reduction = self._programs.reduction(unit, geometry) if geometry is not None and record.reduce else None
        entries = bind(program, geometry, visit)
        ranks = self._transport.world_size
        return BoundBackward(
            unit, record, geometry, entries, reduction, rank=program.rank, ranks=ranks, replicas=self._replicas
        )
