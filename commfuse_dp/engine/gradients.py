"""The way of a gradient: computed by slices, sent to its owner, summed there in rank order, delivered to the parameter.

    others' slices   produce into an inbox slot of the owner (or a staging buffer) -> sent at once
    own slice, last  produce into a buffer of our own                              -> stays
    later, while earlier layers still run: when the partials of all ranks are there, one pass sums them in rank order,
    divides, casts and hands the result to the parameter

[Note: Credit and deadlock]
A rank that finds no free slot in an owner's inbox must not simply wait: the owner may be waiting for a slot here. Every wait
of the engine therefore sums what has arrived (which gives slots back) before it blocks. The rank furthest behind in program
order always finds credit in the end: whatever it has in the inboxes belongs to layers that every rank has passed, or to the
layer it is in. The latter cannot be summed yet where an owner has not computed its own partial, which comes last. If all
slices of a layer do not fit into an inbox together, waiting ranks therefore also copy such partials out of it (`_unload`).

[Note: First come, first summed]
Sums are finished strictly in the order in which their layers' backward began, not in order of arrival. The order of sums
cannot change a result (each is a sum of its own), but with replicas each sum starts an all-reduce, and these must be
started in the same order on all ranks.

Replicated units (ZeRO-1/2) take another way among more than two ranks (chain.py, stream_chain.py), and so does everything in
the hierarchical order (two_level.py); here they only keep their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.collectives.summation import BLOCK_ELEMENTS, sum_in_rank_order, wide_dtype
from commfuse_dp.device.base import Word
from commfuse_dp.engine.bound import MOST_VIEWS, BoundBackward
from commfuse_dp.engine.broken import ROOM, Breakage
from commfuse_dp.engine.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.plan import UnitSlice
from commfuse_dp.engine.replicas import BROKEN, ENDED, ReplicaGroup, Replicating
from commfuse_dp.engine.reserver import Reserver
from commfuse_dp.engine.route import Route
from commfuse_dp.engine.routes import Routes
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.errors import Where
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.probe import COMPUTE, SEND, Probe, now_ns
from commfuse_dp.transport.base import NOWHERE, Sending, Tag, Transport
from commfuse_dp.transport.one_sided.ring import ALIGNMENT

# A notice of so many bytes, or fewer, waits for company: on layers of microseconds the time is in messages. It leaves with the
# next larger one to the same rank, before anything waits, and at the end of the backward.
SMALL_BYTES = 1 << 14

PARTIAL = "its partial gradient"  # what a rank waits for at the end of a backward

_NOTHING = torch.empty(0, dtype=torch.uint8)


class GradientStream:
    """All reduce-scatters of a rank, in program order."""

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool,
        probe: Probe,
        replicas: ReplicaGroup | None,
        breakage: Breakage,
        *,
        inbox_bytes: int,
        ordering: Ordering,
    ) -> None:
        self._transport = transport
        self._ordering = ordering
        self._pool = pool
        self._probe = probe
        self._replicas = replicas
        self._breakage = breakage
        self._rank = transport.rank
        self._announces = type(transport).expect is not Transport.expect  # two-sided: receives are posted early
        self._on_streams = transport.device_ordered
        self._kept_views = transport.in_place  # slots are places of shared memory: their views come again
        self._routed = False  # some unit's partials do not go straight
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._inbox_bytes = inbox_bytes
        self._queue: deque[Scatter] = deque()
        self._replicating: deque[tuple[Scatter, torch.Tensor, Replicating]] = deque()
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._released = 0  # bytes of small messages whose places the peers do not know to be free yet
        self.slots = Reserver(transport)
        self.ports = self.slots.ports
        self._routes = Routes(transport, self.slots, pool, ordering, self._scratch_for)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._replicating

    # ---- producing ---------------------------------------------------------------------------------------------------
    def begin(self, bound: BoundBackward, step: int) -> Scatter:
        """Open a unit's reduce-scatter. Every slice must then be reserved and sent once."""
        scatter = Scatter(bound, step)
        if bound.unit.replicated or self._transport.hosts is not None:
            divided = None if self._replicas is not None else bound.divisor
            scatter.route = self._routes.choose(scatter, divisor=divided)
            self._routed = self._routed or scatter.route is not None
        for item in bound.geometry.slices[self._rank] if self._announces and scatter.route is None else ():
            room = bound.rooms[item.index] or item.nbytes
            self._transport.expect_all(self._peers, scatter.tag(item), item.nbytes, room)
        self._queue.append(scatter)
        self._breakage.scatters += 1
        return scatter

    def reserve(self, scatter: Scatter, item: UnitSlice) -> torch.Tensor:
        """Bytes that the partial of `item` is to be computed into. Blocks while its owner has no free slot."""
        if self._probe.timing is not None:
            self._probe.timing.layer = scatter.unit.name
        if scatter.route is not None:
            return scatter.route.reserve(item, self._own_part(scatter, item) if item.owner == self._rank else _NOTHING)
        if item.owner == self._rank:
            return self._own_part(scatter, item)
        reserve = self._transport.try_reserve
        for port in self.ports:
            if port.under_way:
                reserve = self.slots.try_reserve
        buffer = reserve(item.owner, item.nbytes)
        if buffer is None:
            buffer = self._await_credit(scatter, item)
        return buffer

    def reserve_all(self, scatter: Scatter, items: Sequence[UnitSlice]) -> list[torch.Tensor]:
        """`reserve` for all slices of a unit, in streams."""
        fans = scatter.bound.fans if scatter.route is None else ()
        busy = False
        for port in self.ports:
            busy = busy or bool(port.under_way)
        if busy or not fans or not fans[0].room:
            return [self.reserve(scatter, item) for item in items]
        if self._probe.timing is not None:
            self._probe.timing.layer = scatter.unit.name
        found: dict[tuple[int, int], torch.Tensor] = {}
        for index, dsts, sizes, room in fans:
            for dst, buffer in zip(dsts, self._transport.reserve_all(dsts, sizes, room), strict=True):
                found[dst, index] = buffer
        for item in scatter.bound.geometry.slices[self._rank]:
            found[self._rank, item.index] = self._own_part(scatter, item)
        return [found[item.owner, item.index] for item in items]

    def pieces(self, scatter: Scatter, item: UnitSlice, buffer: torch.Tensor) -> list[Piece]:
        """Views of what `reserve` gave, one for each part."""
        if not self._kept_views or scatter.route is not None or item.owner == self._rank:
            return scatter.bound.geometry.pieces(item, buffer)
        views = scatter.bound.slot_views
        known = views.get(id(buffer))
        if known is None or known[0] is not buffer:
            if len(views) >= MOST_VIEWS:
                views.clear()
            known = views[id(buffer)] = buffer, scatter.bound.geometry.pieces(item, buffer)
        return known[1]

    def send(self, scatter: Scatter, item: UnitSlice, buffer: torch.Tensor, start_ns: int, *, when: Word | None = None) -> None:
        """The partial of `item` has been computed into `buffer`, from start_ns on (0: spans are off).

        when: it will have been, once this word is reached (device-ordered transports)."""
        if scatter.route is not None:
            scatter.own_done += item.owner == self._rank
            scatter.route.produced(item, buffer, when)
            return
        if item.owner == self._rank:
            scatter.own_done += 1
            return
        if self._on_streams:
            room = scatter.bound.rooms[item.index]
            self._transport.send_all((Sending(item.owner, scatter.tag(item), buffer, when, room),))
        else:
            self._transport.send(item.owner, scatter.tag(item), buffer, more=item.nbytes <= SMALL_BYTES)
        if start_ns and self._transport.in_place:  # the transfer is the writing itself, by the GEMM
            name = f"{scatter.unit.name} gradient (in place)"
            self._probe.span(SEND, name, start_ns, now_ns(), nbytes=item.nbytes, peer=item.owner)

    def send_nothing(self, scatter: Scatter, item: UnitSlice) -> None:
        """The step of an absent slice, on a mirrored transport: what a peer sends meanwhile is taken in."""
        self._transport.send(item.owner, scatter.tag(item), _NOTHING)

    def send_all(
        self, scatter: Scatter, items: Sequence[UnitSlice], buffers: Sequence[torch.Tensor], when: Sequence[Word | None]
    ) -> None:
        """`send` and `send_nothing` for all slices of a unit. buffers, when: of those that are not absent, in their order."""
        sendings = []
        produced = zip(buffers, when, strict=True)
        tags: dict[int, Tag] = {}  # not asked for each owner
        for item in items:
            if item.absent:
                if scatter.route is not None:
                    self.send_nothing(scatter, item)
                else:
                    sendings.append(Sending(item.owner, scatter.tag(item), _NOTHING))
                continue
            buffer, word = next(produced)
            if scatter.route is not None:
                self.send(scatter, item, buffer, 0, when=word)
            elif item.owner == self._rank:
                scatter.own_done += 1
            else:
                tag = tags.get(item.index)
                if tag is None:
                    tag = tags[item.index] = scatter.tag(item)
                sendings.append(Sending(item.owner, tag, buffer, word, scatter.bound.rooms[item.index]))
        if sendings:
            self._transport.send_all(sendings)

    def _own_part(self, scatter: Scatter, item: UnitSlice) -> torch.Tensor:
        if scatter.own is None:
            scatter.own = self._own_buffer(scatter)
        if item.nbytes == scatter.own.numel():
            return scatter.own
        return scatter.own[item.offset : item.offset + item.nbytes]

    def _own_buffer(self, scatter: Scatter) -> torch.Tensor:
        nbytes = scatter.bound.geometry.segment_bytes[self._rank]
        if scatter.bound.in_place and scatter.bound.kept:  # summed in place and handed to the parameter: memory of its own
            return torch.empty(nbytes, dtype=torch.uint8, device=self._pool.device)
        return self._pool.take(nbytes, most=self._spare(nbytes))

    def _spare(self, nbytes: int) -> int:
        """Buffers of this size that may be in use by sums under way, before compute waits for the first of them."""
        return max(2, self._inbox_bytes // max(1, nbytes))

    def _await_credit(self, scatter: Scatter, item: UnitSlice) -> torch.Tensor:
        start = now_ns()
        found: list[torch.Tensor] = []

        def ready() -> bool:
            buffer = self.slots.try_reserve(item.owner, item.nbytes)
            if buffer is None:
                self.relieve()
                buffer = self.slots.try_reserve(item.owner, item.nbytes)
            if buffer is not None:
                found.append(buffer)
            else:
                self._breakage.heed(item.owner, scatter.where(item), ROOM, lambda: False)
                self.heed_sums()  # it may wait for room here, which a sum that will never be made does not give
            return buffer is not None

        self._transport.wait_until(ready, peer=item.owner, where=scatter.where(item), doing=ROOM)
        self._probe.exposed(scatter.unit.name, start, now_ns())
        return found[0]

    # ---- summing -----------------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Finish the sums whose partials have all arrived; never blocks. True if anything was summed."""
        worked = passed_on = self._routed and self._advance_routes()
        queue = self._queue
        while queue and self._ready(queue[0]):
            worked = True
            head = queue[0]
            try:
                if not self._on_streams:
                    self._sum_next(head)
                else:
                    with self._ordering.reducing():
                        self._sum_next(head)
            except BaseException as error:  # half of a sum: wherever this was called from, the step is lost
                self._breakage.by(head.unit.name, error)
                raise
        if passed_on or self._released * 16 >= self._inbox_bytes:
            self._push()  # the credits, before a peer runs out of them
        return worked

    def _push(self) -> None:
        self._released = 0
        self._transport.push()

    def _advance_routes(self) -> bool:
        """Others wait for what is to be passed on, also that of later units. True if anything was done."""
        worked = False
        for scatter in self._queue:
            if scatter.route is not None:
                worked |= scatter.route.advance()
                if scatter.route.holds_up:
                    break
        return worked

    def relieve(self) -> None:
        """What a rank does while it waits for anything: sum, and see to it that nobody waits for room in its inbox."""
        if not self.poll() and not self._transport.device_ordered:  # there nobody waits on the host, and inboxes have room
            for scatter in self._queue:
                if scatter.route is not None:
                    continue
                # Twice, because places in the ring are contiguous: half of it may be lost to a gap at its end.
                if 2 * scatter.bound.geometry.segment_bytes[self._rank] > self._inbox_bytes:
                    self._unload(scatter)
        for port in self.ports:
            port.progress()

    def _unload(self, scatter: Scatter) -> None:
        for item in scatter.bound.geometry.slices[self._rank][scatter.summed :]:
            tag = scatter.tag(item)
            for peer in self._peers:
                if (peer, item.index) not in scatter.unloaded and self._transport.arrived(peer, tag):
                    scatter.unloaded[peer, item.index] = self._transport.receive(peer, tag, scatter.where(item)).clone()
                    self._transport.release(peer, tag)

    def _arrived(self, scatter: Scatter, item: UnitSlice, peer: int) -> bool:
        return (peer, item.index) in scatter.unloaded or self._transport.arrived(peer, scatter.tag(item))

    def _next_item(self, scatter: Scatter) -> UnitSlice | None:
        own = scatter.bound.geometry.slices[self._rank]
        return own[scatter.summed] if scatter.summed < len(own) else None

    def _ready(self, scatter: Scatter) -> bool:
        """The next slice can be summed (or there is none, and the unit has only to be completed)."""
        if scatter.route is not None:
            return scatter.route.done
        own, summed = scatter.bound.geometry.slices[self._rank], scatter.summed
        if summed == len(own):  # an empty shard
            return True
        if scatter.own_done <= summed:
            return False
        tag, unloaded, index = scatter.tag(own[summed]), scatter.unloaded, own[summed].index
        if self._transport.device_ordered and not self._transport.mirrored:  # the stream waits; raises what is wrong
            return not self._peers or self._transport.arrived(self._peers[0], tag)
        # Not all(...): the generator's frames would come on top of every look at every peer.
        for peer in self._peers:  # noqa: SIM110
            if (peer, index) not in unloaded and not self._transport.arrived(peer, tag):
                return False
        return True

    def _sum_next(self, scatter: Scatter) -> None:
        """Sum the next slice, if there is one; after the last the unit is complete. `scatter` is the first of the queue."""
        if scatter.route is None:
            own = scatter.bound.geometry.slices[self._rank]
            if scatter.summed < len(own):
                self._sum(scatter, own[scatter.summed])
                scatter.summed += 1
            if scatter.summed < len(own):
                return
        self._queue.popleft()
        self._complete(scatter)

    def _sum(self, scatter: Scatter, item: UnitSlice) -> None:
        probe, bound = self._probe, scatter.bound
        begun = probe.mark() if probe.timing is not None else None
        start = now_ns() if probe.sink is not None else 0
        dtype = bound.geometry.dtype
        assert scatter.own is not None
        flat = scatter.flat
        if flat is None:
            flat = scatter.flat = scatter.own.view(dtype)
        low, high = item.offset // dtype.itemsize, (item.offset + item.nbytes) // dtype.itemsize
        own = flat if item.nbytes == scatter.own.numel() else flat[low:high]
        if bound.in_place:
            out = own
        else:
            if scatter.partials is None:
                scatter.partials = torch.empty(flat.numel(), dtype=bound.out_dtype, device=own.device)
            out = scatter.partials[low:high]
        tag = scatter.tag(item)
        where = scatter.where(item) if self._on_streams else NOWHERE  # on a host all of it is here
        unloaded = scatter.unloaded
        peers, place = bound.sources[scatter.summed]
        held = [rank for rank in peers if (rank, item.index) not in unloaded] if unloaded else peers
        came = self._typed(bound, self._transport.receive_all(held, tag, where))
        if unloaded:
            by_rank = dict(zip(held, came, strict=True))
            came = [by_rank[rank] if rank in by_rank else unloaded.pop((rank, item.index)).view(dtype) for rank in peers]
        partials = [*came[:place], own, *came[place:]]
        if begun is not None:
            probe.tail(f"{scatter.unit.name} (tail)", begun)
        begun = probe.mark() if probe.sink is not None else None
        divisor = None if self._replicas is not None else bound.divisor
        scratch = self._scratch.get(bound.wide)
        if scratch is None:
            scratch = self._scratch_for(dtype)
        sum_in_rank_order(out, partials, own_rank=place, scale_divisor=divisor, scratch=scratch, checked=True)
        self._transport.release_all(held, tag, more=True)
        self._released += max(item.nbytes, ALIGNMENT) if item.nbytes <= SMALL_BYTES else self._inbox_bytes
        if probe.sink is not None:
            probe.span_since(COMPUTE, f"{scatter.unit.name} sum", start, begun, kind="sum")

    def _typed(self, bound: BoundBackward, came: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Partials that have come, as what they are."""
        dtype = bound.geometry.dtype
        if not self._kept_views:
            return [buffer.view(dtype) for buffer in came]
        views, found = bound.inbox_views, []
        for buffer in came:
            known = views.get(id(buffer))
            if known is None or known[0] is not buffer:
                if len(views) >= MOST_VIEWS:
                    views.clear()
                known = views[id(buffer)] = buffer, buffer.view(dtype)
            found.append(known[1])
        return found

    def _scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        wide = wide_dtype(dtype)
        scratch = self._scratch.get(wide)
        if scratch is None:
            scratch = self._scratch[wide] = torch.empty(BLOCK_ELEMENTS, dtype=wide, device=self._pool.device)
        return scratch

    # ---- completing --------------------------------------------------------------------------------------------------
    def _complete(self, scatter: Scatter) -> None:
        dtype = scatter.bound.geometry.dtype
        if scatter.own is None:  # nothing of this unit is kept here
            scatter.own = torch.empty(0, dtype=torch.uint8, device=self._pool.device)
        if scatter.route is not None:
            total = scatter.route.total(scatter.own)
        elif scatter.bound.in_place:
            total = scatter.flat if scatter.flat is not None else scatter.own.view(dtype)
        else:
            total = scatter.partials if scatter.partials is not None else scatter.own.view(dtype)
            if scatter.own.numel():
                self._pool.give(scatter.own)
        own, scatter.own, scatter.flat = scatter.own, None, None
        if self._on_streams:
            self._ordering.hold(own)
        if self._replicas is None:
            self._deliver(scatter, total)
            if own.numel() and not scatter.bound.kept and total.data_ptr() == own.data_ptr():
                self._pool.give(own)
            return
        unit = scatter.unit
        if unit.replica_partial is not None:  # reduced over the shards in earlier microbatches only
            total = total.to(unit.replica_partial.dtype).add_(unit.replica_partial)
            unit.replica_partial = None
        if not scatter.bound.replicate:
            unit.replica_partial = total
            return
        self._replicating.append((scatter, total, self._replicas.all_reduce(total, scatter.step)))

    def _deliver(self, scatter: Scatter, total: torch.Tensor) -> None:
        """Cut the flat sum (head rows, main rows) into the parameters' gradients."""
        for part, slot, offset, shape in scatter.bound.deliveries:
            numel = shape.numel()
            grad = (total if numel == total.numel() else total[offset : offset + numel]).view(shape)
            dtype = scatter.bound.out_dtype if part == 0 and self._replicas is None else slot.grad_dtype
            slot.deliver(grad if grad.dtype == dtype else grad.to(dtype))

    # ---- end of backward ---------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Block until every sum is finished and delivered; what is waited for here is the exposed tail."""
        self._push()  # notices of the last partials: peers wait for them
        while self._queue:
            if self.poll():
                continue
            head = self._queue[0]
            if head.route is not None:
                head.route.hurry()
                if not head.route.done:
                    self._await_route(head, head.route, self.relieve)
                continue
            item = self._next_item(head)
            if item is None:
                continue
            if head.own_done <= head.summed:
                raise RuntimeError(f"gradient of layer {head.unit.name!r} was opened but its own slice was never computed")
            late = [peer for peer in self._peers if not self._arrived(head, item, peer)]
            if not late:
                continue  # it came just now
            start = now_ns()

            def here(peer: int = late[0], head: Scatter = head, item: UnitSlice = item) -> bool:
                self.relieve()
                if head.summed > item.index or self._arrived(head, item, peer):
                    return True
                self.heed_sums()
                return False

            self._transport.wait_until(here, peer=late[0], where=head.where(item), doing=PARTIAL)
            self._probe.exposed(f"{head.unit.name} (tail)", start, now_ns())
        if self._released:
            self._push()
        self._send_kept()
        while self._replicating:
            scatter, total, work = self._replicating.popleft()
            start = now_ns()
            with self._ordering.reducing():
                begun = self._probe.mark()
                work.wait()
                self._probe.tail(f"{scatter.unit.name} (replicas)", begun)
                self._deliver(scatter, total.div_(scatter.bound.divisor))
            if begun is None:
                self._probe.exposed(f"{scatter.unit.name} (replicas)", start, now_ns())
        self._probe.joined()
        self._ordering.join()

    def heed_sums(self) -> None:
        """Raises BrokenStepError if the first sum that only peers hold up will never be made. To be called by whoever waits."""
        head = self._queue[0] if self._queue else None
        if head is None:
            return
        if head.route is not None:
            for item, peer, doing in head.route.late():

                def passed(late: tuple[UnitSlice, int, str] = (item, peer, doing), route: Route = head.route) -> bool:
                    route.advance()
                    return late not in route.late()

                self._breakage.heed(peer, head.where(item), doing, passed)
            return
        item_ = self._next_item(head)
        if item_ is not None and head.own_done > head.summed:
            for peer in self._peers:
                self._breakage.heed(peer, head.where(item_), PARTIAL, partial(self._arrived, head, item_, peer))

    def _send_kept(self) -> None:
        """Block until nothing is kept for others."""
        while (kept := self._routes.outbox.oldest()) is not None:
            item, dst = kept
            start = now_ns()
            where = Where("(sums for other ranks)", self._breakage.step, str(item), item.nbytes)

            def sent(dst: int = dst, where: Where = where) -> bool:
                for port in self.ports:
                    port.progress()
                if self._routes.outbox.flush():
                    return True
                self._breakage.heed(dst, where, ROOM, lambda: False)
                return False

            self._transport.wait_until(sent, peer=dst, where=where, doing=ROOM)
            self._probe.exposed("(sums for other ranks)", start, now_ns())

    def _await_route(self, scatter: Scatter, route: Route, meanwhile: Callable[[], object]) -> None:
        for item in route.uncomputed():
            raise RuntimeError(f"gradient of layer {scatter.unit.name!r} was opened but slice {item} was never computed")
        missing = route.missing()
        if missing is None:
            return
        item, peer, doing = missing
        start = now_ns()

        def here() -> bool:
            meanwhile()
            if route.missing() != missing:
                return True
            self.heed_sums()
            return False

        self._transport.wait_until(here, peer=peer, where=scatter.where(item), doing=doing)
        self._probe.exposed(f"{scatter.unit.name} (tail)", start, now_ns())

    @property
    def replicated(self) -> bool:
        return self._replicas is not None

    def meet_replicas(self) -> None:
        """Raises CommFuseError if one of them has broken the step off before it came here."""
        if self._replicas is not None:
            self._replicas.all_reduce(torch.zeros(1), self._breakage.step).wait()

    def ended(self) -> None:
        """The step went through on all ranks of this one's replica."""
        if self._replicas is not None:
            self._replicas.tell(ENDED, self._breakage.step)

    def forget_all(self) -> None:
        """The end: drop every buffer."""
        self._queue.clear()
        self._replicating.clear()
        self._scratch.clear()

    def reset(self) -> None:
        """After a step that was broken off, on a transport that recovers: forget all of it. Gradients are not delivered.

        With replicas every sum that was begun is owed an all-reduce: the other replicas count on it. What it brings is NaN, in
        case they did not lose the step."""
        queue, self._queue = self._queue, deque()
        for scatter in queue:
            if self._replicas is not None and scatter.bound.replicate:
                numel = scatter.bound.geometry.segment_bytes[self._rank] // scatter.bound.geometry.dtype.itemsize
                lost = torch.full((numel,), torch.nan, dtype=scatter.bound.out_dtype, device=self._pool.device)
                self._replicating.append((scatter, lost, self._replicas.all_reduce(lost, scatter.step)))
        if self._replicas is not None:
            step, cause = self._breakage.step, self._breakage.cause or "it was broken off on another rank of a replica"
            self._replicas.tell(BROKEN, step, cause)
        while self._replicating:
            self._replicating.popleft()[2].wait()
        if self._replicas is not None:
            self._replicas.agree(step, cause)
        self._routes = Routes(self._transport, self.slots, self._pool, self._ordering, self._scratch_for)

    def abandon(self) -> None:
        """After a step that was broken off: take in and drop what peers have sent for it. Gradients are not delivered.

        A mirrored transport's peers were broken off where this rank was, and have not sent what it has not sent."""
        for scatter in self._queue:
            if scatter.route is not None:
                scatter.route.hurry()
            while scatter.route is not None and not scatter.route.done:  # ranks further down wait for what is passed on here
                self._await_route(scatter, scatter.route, self._advance_routes)
        while self._queue:
            scatter = self._queue.popleft()
            if scatter.route is not None:
                continue
            for item in scatter.bound.geometry.slices[self._rank][scatter.summed :]:
                tag = scatter.tag(item)
                for peer in self._peers:
                    if self._transport.mirrored and not self._transport.arrived(peer, tag):
                        continue
                    if (peer, item.index) not in scatter.unloaded:
                        self._transport.receive(peer, tag, scatter.where(item))
                        self._transport.release(peer, tag)
        self._send_kept()
        while self._replicating:
            self._replicating.popleft()[2].wait()
