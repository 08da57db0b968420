"""A gradient's way to its owner over several hosts: added up inside every host first, so that it crosses once per host.

    rank 0..3 of host 0   partial of rank 5's rows   -> rank 1, the gateway: adds up four partials, in rank order
    rank 1                the host's sum             -> rank 5, the owner: adds up one sum per host, in the order of hosts

Which rank does what is said by the unit's program (program/scatter.py). A rank is the owner of its own rows and the gateway of
those of its *rail*, the ranks at its place on other hosts; both are *duties* here: partials of all ranks of the host come in
and are added up.

The sum is nested (over a host's ranks, then over hosts), which does not depend on who owns a row: the same bits in every run.
Each of the two sums is made in the wide type and rounded once; what crosses hosts does so in the dtype that the user reduces in
(`sums`), where a ring all-reduce of that dtype rounds at every hop.

[Note: No credit is waited for]
As in chain.py: what finds no room at the next rank stays in a buffer of its own and leaves later, so nobody waits for a rank
behind him. What is kept is at most the gradient itself.

[Note: One order on every way]
Here several ranks' messages meet in a sum, and each comes through a ring of its own. If one rank's ring were full of a slice
for which the other's has no room, and the other way round, the sum would wait for ever. So everything goes in program order:
what leaves for a rank queues behind what has not left yet (`Outbox`), sums are made in the order of units and slices, and all
ranks of a host produce for one gateway in the same order (program/orders.py: the hosts that follow, own last). The earliest
slice that is not summed then always finds its way: all before it have left the rings. What this rank keeps for others never
holds up what it can finish itself, or two ranks would wait for each other: `GradientStream.drain` sends the rest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.device.base import Word
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.plan import Geometry, UnitSlice
from commfuse_dp.engine.programs import Reduction
from commfuse_dp.engine.reserver import Reserver
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.program.operations import partial_sum
from commfuse_dp.transport.base import CHANNEL_GRAD, Sending, Tag, Transport

Scratch = Callable[[torch.dtype], torch.Tensor]


class _Outgoing(NamedTuple):
    item: UnitSlice
    tag: Tag
    buffer: torch.Tensor


class Outbox:
    """What has found no place at the transport yet, of all units, by destination, in program order."""

    def __init__(self, transport: Transport, slots: Reserver, pool: BufferPool) -> None:
        self._transport = transport
        self._slots = slots
        self._pool = pool
        self._kept: dict[int, deque[_Outgoing]] = defaultdict(deque)

    def slot(self, dst: int, nbytes: int) -> torch.Tensor | None:
        """A place for a message that is sent next; None: it has to be kept."""
        return None if self._kept[dst] else self._slots.try_reserve(dst, nbytes)

    def keep(self, dst: int, item: UnitSlice, tag: Tag, buffer: torch.Tensor) -> None:
        self._kept[dst].append(_Outgoing(item, tag, buffer))

    def flush(self) -> bool:
        """Send what there is room for. True if anything was sent."""
        worked = False
        for dst, kept in self._kept.items():
            while kept:
                _, tag, buffer = kept[0]
                slot = self._slots.try_reserve(dst, buffer.numel())
                if slot is None:
                    break
                slot.copy_(buffer)
                self._transport.send((Sending(dst, tag, slot),))
                self._pool.give(buffer)
                kept.popleft()
                worked = True
        return worked

    def oldest(self) -> tuple[UnitSlice, int] | None:
        """(slice, destination) of something that is kept."""
        return next(((kept[0].item, dst) for dst, kept in self._kept.items() if kept), None)


class _Passing:
    """A partial that this rank computes for another gateway of its host."""

    __slots__ = ("dst", "reserved", "tag")

    def __init__(self, dst: int, tag: Tag) -> None:
        self.dst = dst
        self.tag = tag
        self.reserved = False  # the buffer is a place at the transport


class _Duty:
    """A slice whose partials this rank adds up, of its own host, and if it is the owner, of all hosts."""

    __slots__ = ("hosts", "item", "numel", "own", "ranks", "sums", "tag")

    def __init__(self, item: UnitSlice, tag: Tag, numel: int, ranks: tuple[int, ...]) -> None:
        self.item = item
        self.tag = tag
        self.numel = numel
        self.ranks = ranks  # of the host, in the order in which their partials are added up
        self.hosts: tuple[int, ...] = ()  # likewise the ranks that have the hosts' sums, if this rank is the owner
        self.own: torch.Tensor | None = None  # bytes of the own partial
        self.sums: torch.Tensor | None = None  # bytes of the host's sum, if this rank is the owner


class TwoLevel(Route):
    """One unit's gradient on this rank.

    Args:
        partials: geometry of what the ranks of a host send each other.
        reduction: says who adds up what, and who sends it whom.
        sums: dtype of what hosts send each other: the same elements, in the same order.
        outbox: one for all units.
        out_dtype, divisor: of the result, which is divided if that is not None.
        scratch: a block of a wide dtype, for sums (summation.py).
    """

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool,
        outbox: Outbox,
        partials: Geometry,
        reduction: Reduction,
        sums: torch.dtype,
        *,
        unit: int,
        seq: int,
        out_dtype: torch.dtype,
        divisor: float | None,
        scratch: Scratch,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._partials = partials
        self._sums = sums
        self._out_dtype = out_dtype
        self._divisor = divisor
        self._scratch = scratch
        rank = self._rank = transport.rank
        self._outbox = outbox
        tags, items = {}, {}
        for number, item in enumerate(item for own in partials.slices for item in own):
            key = item.owner, item.index
            tags[key], items[key] = Tag(CHANNEL_GRAD, unit, seq, number), item
        self._passing = {key: _Passing(to, tags[key]) for key, to in reduction.partials_to.items()}  # for other gateways
        self._duties: dict[tuple[int, int], _Duty] = {}
        for reduce in reduction.sums:
            key = reduce.slice.owner, reduce.slice.index
            duty = _Duty(items[key], tags[key], items[key].nbytes // partials.dtype.itemsize, reduce.inputs)
            self._duties[key] = duty
            for peer in duty.ranks:
                if peer != rank:
                    transport.expect((peer,), duty.tag, duty.item.nbytes)
        self._to_add = deque(self._duties.values())
        self._to_finish: deque[_Duty] = deque()
        for reduce in reduction.host_sums:
            duty = self._duties[reduce.slice.owner, reduce.slice.index]
            duty.hosts = tuple(map(partial_sum, reduce.inputs))
            self._to_finish.append(duty)
            for peer in duty.hosts:
                if peer != rank:
                    transport.expect((peer,), duty.tag, self._sum_bytes(duty))
        self._own_bytes = partials.segment_bytes[rank]
        self._out: torch.Tensor | None = None

    def _sum_bytes(self, duty: _Duty) -> int:
        return duty.numel * self._sums.itemsize

    # ---- producing ---------------------------------------------------------------------------------------------------
    def reserve(self, item: UnitSlice, own: torch.Tensor) -> torch.Tensor:
        if item.owner == self._rank:
            return own
        passing = self._passing.get((item.owner, item.index))
        slot = self._outbox.slot(passing.dst, item.nbytes) if passing is not None else None
        if slot is None:
            return self._pool.take(item.nbytes)
        assert passing is not None
        passing.reserved = True
        return slot

    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Word | None = None) -> None:
        key = item.owner, item.index
        passing = self._passing.pop(key, None)
        if passing is None:
            self._duties[key].own = buffer
        elif passing.reserved:
            self._transport.send((Sending(passing.dst, passing.tag, buffer),))
        else:
            self._outbox.keep(passing.dst, item, passing.tag, buffer)

    # ---- passing on --------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        worked = self._outbox.flush()
        while self._to_add and (duty := self._to_add[0]).own is not None and self._all_here(duty, duty.ranks):
            self._add(self._to_add.popleft())
            worked = True
        while self._to_finish and (duty := self._to_finish[0]).sums is not None and self._all_here(duty, duty.hosts):
            self._finish(self._to_finish.popleft())
            worked = True
        return worked

    @property
    def holds_up(self) -> bool:
        return bool(self._to_add)

    def _all_here(self, duty: _Duty, ranks: Sequence[int]) -> bool:
        return all(peer == self._rank or self._transport.receive((peer,), duty.tag, wait=False) for peer in ranks)

    def _add(self, duty: _Duty) -> None:
        """The host's sum of one slice: kept if the slice is this rank's own, else sent to its owner."""
        own, owner = duty.own, duty.item.owner
        assert own is not None
        if owner == self._rank:
            duty.sums = own if self._sums == self._partials.dtype else self._pool.take(self._sum_bytes(duty))
            self._fold(duty, duty.ranks, own, self._partials.dtype, duty.sums.view(self._sums), None)
            return
        slot = self._outbox.slot(owner, self._sum_bytes(duty))
        target = slot if slot is not None else self._pool.take(self._sum_bytes(duty))
        self._fold(duty, duty.ranks, own, self._partials.dtype, target.view(self._sums), None)
        self._pool.give(own)
        if slot is not None:
            self._transport.send((Sending(owner, duty.tag, slot),))
        else:
            self._outbox.keep(owner, duty.item, duty.tag, target)

    def _fold(
        self,
        duty: _Duty,
        ranks: Sequence[int],
        own: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        divisor: float | None,
    ) -> None:
        """out = what `ranks` have sent, and this rank's `own` bytes at its place among them, added up in that order."""
        transport, tag = self._transport, duty.tag
        parts = [(own if peer == self._rank else transport.receive((peer,), tag)[0]).view(dtype) for peer in ranks]
        scratch = self._scratch(dtype)
        sum_in_rank_order(out, parts, own_rank=ranks.index(self._rank), scale_divisor=divisor, scratch=scratch)
        for peer in ranks:
            if peer != self._rank:
                transport.release((peer,), tag, more=True)

    # ---- the end -----------------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        return not (self._passing or self._to_add or self._to_finish)

    def _finish(self, duty: _Duty) -> None:
        """The sum over hosts of one own slice."""
        sums, dtype = duty.sums, self._partials.dtype
        assert sums is not None and duty.own is not None
        start = duty.item.offset // dtype.itemsize
        if dtype == self._out_dtype:  # the own partial's memory becomes the result
            out = duty.own.view(dtype)
        else:
            if self._out is None:
                self._out = torch.empty(self._own_bytes // dtype.itemsize, dtype=self._out_dtype, device=sums.device)
            out = self._out[start : start + duty.numel]
        self._fold(duty, duty.hosts, sums, self._sums, out, self._divisor)
        if sums is not duty.own:
            self._pool.give(sums)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        if self._partials.dtype == self._out_dtype or not own.numel():
            return own.view(self._out_dtype)
        assert self._out is not None
        self._pool.give(own)
        return self._out

    def missing(self) -> tuple[UnitSlice, int, str] | None:
        return next(self._missing(), None)

    def late(self) -> list[tuple[UnitSlice, int, str]]:
        return list(self._missing())

    def _missing(self) -> Iterator[tuple[UnitSlice, int, str]]:
        for duty in self._to_add:
            if duty.own is not None:
                for peer in duty.ranks:
                    if peer != self._rank and not self._transport.receive((peer,), duty.tag, wait=False):
                        yield duty.item, peer, "its partial gradient"
        for duty in self._to_finish:
            for peer in duty.hosts:
                if peer != self._rank and not self._transport.receive((peer,), duty.tag, wait=False):
                    yield duty.item, peer, "its host's sum of partial gradients"

    def uncomputed(self) -> Iterator[UnitSlice]:
        yield from (duty.item for duty in self._to_add if duty.own is None)
        yield from (self._partials.slices[owner][index] for owner, index in self._passing)
