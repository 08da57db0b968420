"""two_level.py on a device: everything is enqueued at once, in program order, and streams stand for what has not come.

    compute   partials of the unit ... | next unit ...
    scatter        send those of other gateways (inside the host)
    reduce                    |compute  |partials of the host  sums for every host  | next unit's ...  |event  sum over hosts
    across                                                              { exchange of sums }  (event)

[Note: One unit behind]
The sum over hosts of a unit is enqueued behind the sums inside the host of the next one: the stream "reduce" would otherwise
stand for the exchange of every unit before it could make the sums that the next exchange needs, and the link between hosts
would idle meanwhile. `flush` says that no unit follows.

[Note: What must fit]
Sums are enqueued once the unit's own partials are all computed, so until then nothing leaves the inboxes: all that a unit owes
to one gateway (its rows and those of its rail) must fit into `inbox_bytes`, twice, as places are contiguous. The engine checks
it in the first step (parameters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.device.base import Event, Word
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.plan import Geometry, UnitSlice
from commfuse_dp.engine.programs import Reduction
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Sending, Tag
from commfuse_dp.transport.hierarchical.device import StreamHierarchicalTransport


class Turn:
    """Whose sum over hosts is still held back. One for all units."""

    def __init__(self) -> None:
        self._latest: StreamTwoLevel | None = None

    def take(self, route: StreamTwoLevel) -> None:
        if self._latest is not None:
            self._latest.flush()
        self._latest = route


class StreamTwoLevel(Route):
    """One unit's gradient on this rank. Arguments: as of two_level.TwoLevel.

    ordering: of the engine; its stream "reduce" makes the sums.
    """

    def __init__(
        self,
        transport: StreamHierarchicalTransport,
        pool: BufferPool,
        ordering: Ordering,
        turn: Turn,
        partials: Geometry,
        reduction: Reduction,
        sums: torch.dtype,
        *,
        unit: int,
        seq: int,
        where: Where,
        out_dtype: torch.dtype,
        divisor: float | None,
        scratch: Callable[[torch.dtype], torch.Tensor],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._ordering = ordering
        self._turn = turn
        self._partials = partials
        self._sum_dtype = sums
        self._where = where
        self._out_dtype = out_dtype
        self._divisor = divisor
        self._scratch = scratch
        hosts, rank = transport.hosts, transport.rank
        self._rank = rank
        self._siblings, self._rail = hosts.siblings(rank), hosts.rail(rank)
        self._gateways = reduction.partials_to
        self._tags: dict[tuple[int, int], Tag] = {}
        self._own: dict[tuple[int, int], torch.Tensor] = {}  # partials for this rank's rail
        items = [item for own in partials.slices for item in own]
        for number, item in enumerate(items):
            key = item.owner, item.index
            self._tags[key] = Tag(CHANNEL_GRAD, unit, seq, number)
        sums_of = reduction.sums
        self._duties = [partials.slices[reduce.slice.owner][reduce.slice.index] for reduce in sums_of]
        for item in self._duties:
            for peer in self._siblings:
                if peer != rank:
                    transport.expect((peer,), self._tags[item.owner, item.index], item.nbytes)
        self._uncomputed = {(item.owner, item.index): item for item in items}
        self._added = self._may_finish = False
        self._sums: dict[int, torch.Tensor] = {}  # by rank of the rail
        self._landings: dict[int, torch.Tensor] = {}
        self._crossed: Event | None = None

    # ---- producing ---------------------------------------------------------------------------------------------------
    def reserve(self, item: UnitSlice, own: torch.Tensor) -> torch.Tensor:
        if item.owner == self._rank:
            return own
        gateway = self._gateways.get((item.owner, item.index))
        return self._pool.take(item.nbytes) if gateway is None else self._transport.reserve((gateway,), (item.nbytes,))[0]

    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Word | None = None) -> None:
        key = item.owner, item.index
        del self._uncomputed[key]
        gateway = self._gateways.get(key)
        if gateway is None:
            self._own[key] = buffer
        else:
            self._transport.send((Sending(gateway, self._tags[key], buffer, when),))

    # ---- summing -----------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        if self._added or self._uncomputed:
            return False
        self._added = True
        with self._ordering.reducing():
            self._add()
        self._turn.take(self)
        return True

    def _add(self) -> None:
        """The host's sums, for all hosts, and their exchange."""
        itemsize = self._sum_dtype.itemsize
        elements = {owner: self._partials.segment_bytes[owner] // self._partials.dtype.itemsize for owner in self._rail}
        for owner in self._rail:
            self._sums[owner] = self._pool.take(elements[owner] * itemsize)
        for item in self._duties:
            start = item.offset // self._partials.dtype.itemsize
            numel = item.nbytes // self._partials.dtype.itemsize
            out = self._sums[item.owner].view(self._sum_dtype)[start : start + numel]
            key = item.owner, item.index
            own, tag, dtype = self._own.pop(key), self._tags[key], self._partials.dtype
            self._ordering.hold(own)
            own_place = self._siblings.index(self._rank)
            peers = [peer for peer in self._siblings if peer != self._rank]
            parts = self._transport.receive(peers, tag, self._where)
            parts.insert(own_place, own)
            sum_in_rank_order(out, [part.view(dtype) for part in parts], own_rank=own_place, scratch=self._scratch(dtype))
            self._transport.release(peers, tag, more=True)
            if item.owner != self._rank:
                self._pool.give(own)
        self._transport.progress()
        others = [owner for owner in self._rail if owner != self._rank]
        self._landings = {owner: self._pool.take(elements[self._rank] * itemsize) for owner in others}
        self._crossed = self._transport.cross(self._where, {owner: self._sums[owner] for owner in others}, self._landings)

    @property
    def holds_up(self) -> bool:
        return not self._added

    @property
    def done(self) -> bool:
        return self._added and self._may_finish

    def flush(self) -> None:
        self._may_finish = True

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """In the stream "reduce"."""
        dtype, final = self._partials.dtype, self._partials.dtype == self._out_dtype
        self._ordering.after(self._crossed)
        numel = own.numel() // dtype.itemsize
        out = own.view(dtype) if final else torch.empty(numel, dtype=self._out_dtype, device=own.device)
        self._ordering.hold(out)
        self._landings[self._rank] = self._sums[self._rank]
        parts = [self._landings[owner].view(self._sum_dtype) for owner in self._rail]
        sum_in_rank_order(
            out,
            parts,
            own_rank=self._rail.index(self._rank),
            scale_divisor=self._divisor,
            scratch=self._scratch(self._sum_dtype),
        )
        for owner in self._rail:
            self._pool.give(self._landings[owner])
            if owner != self._rank:
                self._pool.give(self._sums[owner])
        if numel and not final:
            self._pool.give(own)
        return out

    def missing(self) -> tuple[UnitSlice, int, str] | None:
        return None  # streams stand, not the host

    def uncomputed(self) -> Iterator[UnitSlice]:
        return iter(self._uncomputed.values())
