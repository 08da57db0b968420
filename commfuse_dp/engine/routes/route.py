"""One unit's partial gradients on their way, on one rank: the steps of steps.py, as far as they can be run.

A step is written once (`Route._run`). On a host it is run by whoever waits, once its terms are here; in streams all steps of
a unit are enqueued at once, and the stream waits (stream.py). On a host the steps are in several queues, and the first one of
each is tried: the slices of a chain overtake each other; through hosts there is one queue for the sums inside the host and
one for those over hosts.

The order of every sum is the program's, whatever comes first: the same bits in every run and on every transport. A chain adds
up in the dtype that travels, as a ring all-reduce does it, and rounds at every hop if that is a narrow one. Through hosts
each of the two sums is made in the wide type and rounded once; what crosses hosts does so in the dtype that the user reduces
in, where a ring all-reduce of that dtype rounds at every hop.

[Note: No credit is waited for]
On a host, a rank that gets no room at the next one keeps its sum in a buffer of its own (`Outbox`) and goes on computing; a sum
that has arrived is added to the own partial and leaves the inbox as soon as that partial exists. So nobody waits for a rank
behind him, and what is kept is at most the gradient itself, as in stock ZeRO-1.

[Note: One order on every way]
Through hosts several ranks' messages meet in a sum, and each comes through a ring of its own. If one rank's ring were full of
a slice for which the other's has no room, and the other way round, the sum would wait for ever. So everything goes in program
order: what leaves for a rank queues behind what has not left yet, sums are made in the order of units and slices, and all
ranks of a host produce for one gateway in the same order (program/orders.py: the hosts that follow, own last). The earliest
slice that is not summed then always finds its way: all before it have left the rings. What this rank keeps for others never
holds up what it can finish itself, or two ranks would wait for each other: `GradientStream.drain` sends the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from commfuse_dp.collectives.summation import sum_in_rank_order, wide_dtype
from commfuse_dp.device.base import WordLike
from commfuse_dp.engine.bound import BoundBackward
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.plan import Geometry, UnitSlice
from commfuse_dp.engine.routes.outbox import Outbox
from commfuse_dp.engine.routes.steps import Key, Step, Way
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, NOWHERE, Sending, Tag, Transport

if TYPE_CHECKING:
    from commfuse_dp.engine.routes.stream import Crossing

Missing = tuple[UnitSlice, int, str]  # slice, peer, what the peer is to do


@dataclass
class Means:
    """What the routes of all units share.

    scratch: a block of a wide dtype, for sums.
    held_back: whose sums over hosts a stream has still to make (stream.py).
    """

    transport: Transport
    pool: BufferPool
    ordering: Ordering
    outbox: Outbox
    scratch: Callable[[torch.dtype], torch.Tensor]
    held_back: Route | None = None


class Route:
    """One unit's reduce-scatter, on this rank. Nothing in it blocks; the gradient stream calls `advance` whenever it can.

    Args:
        means: what it shares with the routes of all units.
        seq, number: of this reduce-scatter among the unit's, and of the step.
        divisor: the sum is divided by it, if that is not None.
    """

    def __init__(
        self,
        means: Means,
        bound: BoundBackward,
        way: Way,
        *,
        seq: int,
        number: int,
        divisor: float | None,
    ) -> None:
        self._means, self._transport, self._pool, self._outbox = means, means.transport, means.pool, means.outbox
        self._rank = self._transport.rank
        self._way, self._unit, self._number = way, bound.unit, number
        self._name = CHANNEL_GRAD, bound.unit.index, seq  # of tags
        self._dtype, self._out_dtype, self._divisor = bound.geometry.dtype, bound.out_dtype, divisor
        # Sums of a chain travel like the partials, those between hosts in the dtype that the user reduces in, if it is wider.
        self._wire, reduced = self._dtype, bound.unit.policy.reduce_dtype
        if not way.chained and reduced is not None and reduced.itemsize > self._dtype.itemsize:
            self._wire = reduced
        self._own_bytes = bound.geometry.segment_bytes[self._rank]
        self._on_streams = self._transport.device is not None
        self._hold_heads = self._on_streams and way.chained  # [Note: Two layers of partials] in stream.py
        self._uncomputed = way.items.copy()
        self._own: dict[Key, torch.Tensor] = {}  # terms that are computed, by the step's key
        self._slots: set[Key] = set()  # partials that are computed where they leave
        self._parts: dict[Key, torch.Tensor] = {}  # of the own gradient: where sums over hosts go, in their dtype
        self._out: torch.Tensor | None = None  # all of it, if it cannot be where the own partial is
        # In streams nothing is tried.
        self._queues = [deque(queue) for queue in way.queues] if not self._on_streams else []
        self._inside = self._queues[0] if self._queues and not way.chained else ()
        self._hosts, self._onward = self._between_hosts(bound.geometry)
        self._tags: dict[Key, Tag] = {}  # of what comes
        for step in way.sums:
            tag = self._tags[step.key] = Tag(*self._name, step.came)
            messages = self._hosts if step.over_hosts else self._transport
            nbytes = self._bytes(step.item.nbytes) if step.over_hosts else step.item.nbytes
            if step.sources:
                messages.expect(step.sources, tag, nbytes)

    def _between_hosts(self, geometry: Geometry) -> tuple[Transport | Crossing, Outbox]:
        """(what brings the sums of other hosts, what takes this rank's sums for others)."""
        return self._transport, self._outbox

    def _where(self, item: UnitSlice) -> Where:
        return Where(self._unit.name, self._number, str(item), item.nbytes)

    def _bytes(self, nbytes: int) -> int:
        """Of a sum, where the partial has so many."""
        return nbytes // self._dtype.itemsize * self._wire.itemsize

    # ---- producing ---------------------------------------------------------------------------------------------------
    def reserve(self, item: UnitSlice) -> torch.Tensor:
        """Bytes for this rank's partial of `item`, which another rank owns."""
        key = item.owner, item.index
        step = self._way.steps[key]
        if not step.sources and not self._hold_heads:
            assert step.to is not None
            slot = self._outbox.slot(step.to, item.nbytes)
            if slot is not None:
                self._slots.add(key)
                return slot
        return self._pool.take(item.nbytes, most=2 * len(self._way.items) if self._hold_heads else 0)

    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Sequence[WordLike] = ()) -> bool:
        """The partial of `item` has been computed into what `reserve` gave, or into the own part of the gradient; on a device
        perhaps: will have been, once the words `when` are reached. True if messages were taken in and released."""
        key = item.owner, item.index
        del self._uncomputed[key]
        step = self._way.steps[key]
        if key in self._slots:
            assert step.to is not None
            self._transport.send((Sending(step.to, Tag(*self._name, step.goes), buffer, when),))
            return False
        if step.sources or self._hold_heads:
            self._own[key] = buffer
        else:
            assert step.to is not None
            self._outbox.keep(step.to, self._where(item), Tag(*self._name, step.goes), buffer)
        if self._hold_heads or not self._way.chained:
            return False
        if self._outbox.kept:  # the next rank may be waiting
            self._outbox.flush()
        return self.advance()

    # ---- summing -----------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        """Run the steps whose terms are here. Never blocks. True if anything was done."""
        worked, own, tags, receive = False, self._own, self._tags, self._transport.receive
        for queue in self._queues:
            while queue and queue[0].key in own:
                step = queue[0]
                if step.sources and not receive(step.sources, tags[step.key], wait=False):
                    break
                self._run(queue.popleft())
                worked = True
        if worked:
            self._queues = [queue for queue in self._queues if queue]
        return worked

    def _run(self, step: Step) -> None:
        """Add up what has come, or what the current stream waits for, and hand the sum on."""
        own = self._own.pop(step.key)
        if step.over_hosts:
            self._add(self._hosts, step, own, self._wire, self._part(step), self._divisor)
            if self._wire != self._dtype:
                self._pool.give(own)
            return
        nbytes = own.numel() if self._wire == self._dtype else self._bytes(own.numel())
        slot = self._onward.slot(step.to, nbytes) if step.to is not None else None
        if slot is not None:
            out = slot
        else:
            assert not self._on_streams or step.to is None, "stream-ordered transports always have room"
            out = own if self._wire == self._dtype else self._pool.take(nbytes)
        self._add(self._transport, step, own, self._dtype, out.view(self._wire), None)
        if step.to is None:
            if step.then is not None:
                self._own[step.then] = out
                if self._dtype == self._out_dtype:
                    self._parts[step.then] = own.view(self._dtype)
            return
        if out is not own:
            self._pool.give(own)
        if slot is not None:
            self._onward.sender.send((Sending(step.to, Tag(*self._name, step.goes), slot),))
        else:
            self._onward.keep(step.to, self._where(step.item), Tag(*self._name, step.goes), out)

    def _add(
        self,
        messages: Transport | Crossing,
        step: Step,
        own: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor,
        divisor: float | None,
    ) -> None:
        """out = the terms, which are of `dtype`, added up in the order of the step. own: bytes of this rank's; may be out's."""
        mine = own.view(dtype)
        if not step.sources:
            out.copy_(mine)
            return
        tag, probe = self._tags[step.key], self._transport.probe
        where = self._where(step.item) if self._on_streams else NOWHERE  # on a host all of it is here
        begun = probe.mark() if probe.timing is not None else None
        came = iter(messages.receive(step.sources, tag, where))
        terms = []
        for rank in step.ranks:
            terms.append(mine if rank == self._rank else next(came).view(dtype))
        if begun is not None:
            probe.tail(f"{self._unit.name} (tail)", begun)
        if self._way.chained:
            torch.add(*terms, out=out)
        else:
            place, scratch, wide = step.ranks.index(self._rank), self._means.scratch(dtype), wide_dtype(out.dtype, dtype)
            sum_in_rank_order(out, terms, own_rank=place, scale_divisor=divisor, scratch=scratch, wide=wide)
        messages.release(step.sources, tag, more=True)

    def _part(self, step: Step) -> torch.Tensor:
        part = self._parts.get(step.key)
        if part is not None:
            return part
        size = self._dtype.itemsize
        if self._out is None:
            self._out = torch.empty(self._own_bytes // size, dtype=self._out_dtype, device=self._pool.device)
        return self._out[step.item.offset // size : (step.item.offset + step.item.nbytes) // size]

    # ---- the end -----------------------------------------------------------------------------------------------------
    @property
    def holds_up(self) -> bool:
        """Routes of later units must not advance yet."""
        return bool(self._inside)

    def flush(self) -> None:
        """Nothing more is coming: what was kept back for the sake of later units may be done."""
        return

    @property
    def done(self) -> bool:
        """Nothing is left for this rank to do."""
        return not self._queues and not self._uncomputed

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of what this rank owns, flat; once, when `done`. own: the bytes of its own partial."""
        total = own.view(self._dtype)
        if self._dtype != self._out_dtype:
            total = total.to(self._out_dtype) if self._way.chained or self._out is None else self._out
            if own.numel():
                self._pool.give(own)
        return total.div_(self._divisor) if self._way.chained and self._divisor is not None else total

    def missing(self) -> Iterator[Missing]:
        """What this rank's part waits for, computed as it is."""
        for step in (step for queue in self._queues for step in queue):
            if step.over_hosts or step.key in self._own:
                for source in step.sources:
                    if not self._transport.receive((source,), self._tags[step.key], wait=False):
                        yield step.item, source, step.doing

    def uncomputed(self) -> Iterator[UnitSlice]:
        """Slices whose own partial has not been computed."""
        return iter(self._uncomputed.values())
