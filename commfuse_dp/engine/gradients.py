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
slices of a layer do not fit into an inbox together, waiting ranks therefore also copy such partials out of it (`Sums.unload`).

[Note: First come, first summed]
Sums are finished strictly in the order in which their layers' backward began, not in order of arrival. The order of sums
cannot change a result (each is a sum of its own), but with replicas each sum starts an all-reduce, and these must be
started in the same order on all ranks.

Replicated units (ZeRO-1/2) take another way among more than two ranks, and so does everything in the hierarchical order
(routes/steps.py); here they only keep their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.device.base import WordLike
from commfuse_dp.engine.bound import BoundBackward
from commfuse_dp.engine.broken import ROOM, Breakage
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.partials import Produce
from commfuse_dp.engine.plan import UnitSlice
from commfuse_dp.engine.replicas import ReplicaGroup, Replicating
from commfuse_dp.engine.routes.outbox import Outbox, Reserver
from commfuse_dp.engine.routes.route import Means, Missing, Route
from commfuse_dp.engine.routes.stream import StreamRoute
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.engine.sums import SMALL_BYTES, Sums
from commfuse_dp.errors import Where
from commfuse_dp.probe import SEND, now_ns
from commfuse_dp.transport.base import Sending, Transport
from commfuse_dp.transport.waiting import wait_until

PARTIAL = "its partial gradient"  # what a rank waits for at the end of a backward

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_AT_ONCE: Sequence[WordLike] = ()  # behind the current stream


class GradientStream:
    """All reduce-scatters of a rank, in program order."""

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool,
        replicas: ReplicaGroup | None,
        breakage: Breakage,
        ordering: Ordering,
    ) -> None:
        self._transport, self._probe, self._inbox_bytes = transport, transport.probe, transport.message_limit
        self._ordering = ordering
        self._pool = pool
        self._replicas = replicas
        self._breakage = breakage
        self._rank = transport.rank
        self._on_streams = transport.device is not None
        self._kept_views = transport.in_place  # slots are places of shared memory: their views come again
        self._routed = False  # some unit's partials do not go straight
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._queue: deque[Scatter] = deque()
        self._replicating: deque[tuple[Scatter, torch.Tensor, Replicating]] = deque()
        self._settled = 0  # step whose end the replicas have been told of, and have told
        self._sums = Sums(transport, pool.device, divides=replicas is None)
        self.slots = Reserver(transport)
        self.ports = self.slots.ports
        self._means = self._new_means()

    def _new_means(self) -> Means:
        transport, pool = self._transport, self._pool
        return Means(transport, pool, self._ordering, Outbox(transport, self.slots, pool), self._sums.scratch_for)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._replicating

    # ---- producing ---------------------------------------------------------------------------------------------------
    def begin(self, bound: BoundBackward, step: int) -> Scatter:
        """Open a unit's reduce-scatter. Every slice must then be reserved and sent once."""
        scatter = Scatter(bound, step)
        if bound.reduction.way is not None:
            kind, divisor = StreamRoute if self._on_streams else Route, None if self._replicas is not None else bound.divisor
            scatter.route = kind(self._means, bound, bound.reduction.way, seq=scatter.seq, number=step, divisor=divisor)
            self._routed = True
        elif self._on_streams:
            for item in bound.geometry.slices[self._rank]:
                room = bound.rooms[item.index] or item.nbytes
                self._transport.expect(self._peers, scatter.tag(item), item.nbytes, room)
        self._queue.append(scatter)
        self._breakage.scatters += 1
        return scatter

    def reserve(self, scatter: Scatter, item: UnitSlice) -> torch.Tensor:
        """Memory that the partial of `item` is to be computed into: bytes, or in its dtype. Blocks while its owner has no free
        slot."""
        if self._probe.timing is not None:
            self._probe.timing.layer = scatter.unit.name
        if item.owner == self._rank:
            own = scatter.own
            if own is None:
                own = scatter.own = self._own_buffer(scatter)
            if item.nbytes == own.nbytes:
                return own
            size = own.element_size()
            return own[item.offset // size : (item.offset + item.nbytes) // size]
        if scatter.route is not None:
            return scatter.route.reserve(item)
        for port in self.ports:
            if port.under_way:
                buffer = self.slots.try_reserve(item.owner, item.nbytes)
                return buffer if buffer is not None else self._await_credit(scatter, item)
        found = self._transport.reserve((item.owner,), (item.nbytes,))
        return found[0] if found else self._await_credit(scatter, item)

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
            for dst, buffer in zip(dsts, self._transport.reserve(dsts, sizes, room), strict=True):
                found[dst, index] = buffer
        for item in scatter.bound.geometry.slices[self._rank]:
            found[self._rank, item.index] = self.reserve(scatter, item)
        return [found[item.owner, item.index] for item in items]

    def produce(self, scatter: Scatter, item: UnitSlice, produce: Produce) -> None:
        """Have the partial of one slice computed where it belongs, and send it. Blocks while its owner has no free slot."""
        if item.absent:
            self.send(scatter, (item,), ())
            return
        own, bound = item.owner == self._rank, scatter.bound
        buffer = self.reserve(scatter, item)
        start = now_ns() if self._probe.sink is not None else 0
        if own or not self._kept_views or scatter.route is not None:
            pieces = bound.geometry.pieces(item, buffer)
        else:
            pieces = bound.slot_pieces(item, buffer)
        produce(item, pieces)
        if own and scatter.route is None:
            scatter.own_done += 1
        else:
            self.send(scatter, (item,), (buffer,), start)

    def send(
        self,
        scatter: Scatter,
        items: Sequence[UnitSlice],
        buffers: Sequence[torch.Tensor],
        start_ns: int = 0,
        *,
        when: Sequence[Sequence[WordLike]] = (),
    ) -> None:
        """The partials of `items` have been computed into `buffers`, from start_ns on (0: spans are off).

        buffers: of items that are not absent, in their order. Those that are absent are steps of a lockstep transport, in which
        what a peer sends is taken in. when: stream-ordered transports: a buffer is complete once its words are reached."""
        sendings, large, number = [], False, 0
        for item in items:
            buffer, words = _NOTHING, _AT_ONCE
            if not item.absent:
                buffer, words = buffers[number], when[number] if when else _AT_ONCE
                number += 1
                if scatter.route is not None:
                    scatter.own_done += item.owner == self._rank
                    if scatter.route.produced(item, buffer, words):
                        self._sums.released = self._inbox_bytes  # some at least: it is told after this layer
                    continue
                if item.owner == self._rank:
                    scatter.own_done += 1
                    continue
                large = large or item.nbytes > SMALL_BYTES
            tag = scatter.tags.get(item.index) or scatter.tag(item)
            room = scatter.bound.rooms[item.index] if self._on_streams and not item.absent else 0
            sendings.append(tuple.__new__(Sending, (item.owner, tag, buffer, words, room)))  # without a frame for each
        if not sendings:
            return
        self._transport.send(sendings, more=not large)
        if start_ns and self._transport.in_place:  # the transfer is the writing itself, by the GEMM
            name, item = f"{scatter.unit.name} gradient (in place)", items[0]
            self._probe.span(SEND, name, start_ns, now_ns(), nbytes=item.nbytes, peer=item.owner)

    def _own_buffer(self, scatter: Scatter) -> torch.Tensor:
        nbytes = scatter.bound.geometry.segment_bytes[self._rank]
        if scatter.bound.in_place and scatter.bound.kept:  # summed in place and handed to the parameter: memory of its own
            dtype = torch.uint8 if self._on_streams or scatter.route is not None else scatter.bound.geometry.dtype
            return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=self._pool.device)
        # So many may be in use by sums under way, before compute waits for the first of them.
        return self._pool.take(nbytes, most=max(2, self._inbox_bytes // max(1, nbytes)))

    def _await_credit(self, scatter: Scatter, item: UnitSlice) -> torch.Tensor:
        start = now_ns()
        found: list[torch.Tensor] = []

        def ready() -> bool:
            buffer = self.slots.try_reserve(item.owner, item.nbytes)
            if buffer is None:
                self.make_progress()
                buffer = self.slots.try_reserve(item.owner, item.nbytes)
            if buffer is not None:
                found.append(buffer)
            else:
                self._breakage.heed(item.owner, scatter.where(item), ROOM, lambda: False)
                self.heed_sums()  # it may wait for room here, which a sum that will never be made does not give
            return buffer is not None

        wait_until(self._transport, ready, peer=item.owner, where=scatter.where(item), doing=ROOM)
        self._probe.exposed(scatter.unit.name, start, now_ns())
        return found[0]

    # ---- summing -----------------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Finish the sums whose partials have all arrived; never blocks. True if anything was summed."""
        worked = passed_on = self._routed and self._advance_routes()
        queue = self._queue
        while queue:
            head = queue[0]
            came = self._sums.ready(head)
            if came is None:
                break
            worked = True
            try:
                if not self._on_streams:
                    self._sum_next(head, came)
                else:
                    with self._ordering.reducing():
                        self._sum_next(head, came)
            except BaseException as error:  # half of a sum: wherever this was called from, the step is lost
                self._breakage.by(head.unit.name, error)
                raise
        if passed_on or self._sums.released * 16 >= self._inbox_bytes:
            self._push()  # the credits, before a peer runs out of them
        return worked

    def _push(self) -> None:
        self._sums.released = 0
        self._transport.progress()

    def _advance_routes(self) -> bool:
        """Others wait for what is to be passed on, also that of later units. True if anything was done."""
        worked = bool(self._means.outbox.kept) and self._means.outbox.flush()
        for scatter in self._queue:
            if scatter.route is not None:
                worked |= scatter.route.advance()
                if scatter.route.holds_up:
                    break
        return worked

    def make_progress(self) -> None:
        """What a rank does while it waits for anything: sum, and see to it that nobody waits for room in its inbox."""
        if not self.poll() and not self._on_streams:  # there nobody waits on the host, and inboxes have room
            for scatter in self._queue:
                if scatter.route is not None:
                    continue
                # Twice, because places in the ring are contiguous: half of it may be lost to a gap at its end.
                if 2 * scatter.bound.geometry.segment_bytes[self._rank] > self._inbox_bytes:
                    self._sums.unload(scatter)
        for port in self.ports:
            port.progress()

    def _sum_next(self, scatter: Scatter, came: Sequence[torch.Tensor]) -> None:
        """Sum the next slice, if there is one; after the last the unit is complete. `scatter` is the first of the queue."""
        if scatter.route is None:
            own = scatter.bound.geometry.slices[self._rank]
            if scatter.summed < len(own):
                self._sums.add(scatter, own[scatter.summed], came)
                scatter.summed += 1
            if scatter.summed < len(own):
                return
        self._queue.popleft()
        self._complete(scatter)

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
        if self._breakage.cause:  # the user may have cleared gradients since, and would find a part of one in the next step's
            return
        for part, slot, offset, shape in scatter.bound.deliveries:
            numel = shape.numel()
            grad = (total if numel == total.numel() else total[offset : offset + numel]).view(shape)
            dtype = scatter.bound.out_dtype if part == 0 and self._replicas is None else slot.wants()[1]
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
                head.route.flush()
                if not head.route.done:
                    self._await_route(head, head.route, self.make_progress)
                continue
            item = self._sums.next_item(head)
            if item is None:
                continue
            if head.own_done <= head.summed:
                raise RuntimeError(f"gradient of layer {head.unit.name!r} was opened but its own slice was never computed")
            late = [peer for peer in self._peers if not self._sums.arrived(head, item, peer)]
            if not late:
                continue  # it came just now
            start = now_ns()

            def here(peer: int = late[0], head: Scatter = head, item: UnitSlice = item) -> bool:
                self.make_progress()
                if head.summed > item.index or self._sums.arrived(head, item, peer):
                    return True
                self.heed_sums()
                return False

            wait_until(self._transport, here, peer=late[0], where=head.where(item), doing=PARTIAL)
            self._probe.exposed(f"{head.unit.name} (tail)", start, now_ns())
        if self._sums.released:
            self._push()
        self._send_kept()
        while self._replicating:
            scatter, total, work = self._replicating[0]
            start = now_ns()
            with self._ordering.reducing():
                begun = self._probe.mark()
                work.wait(interruptible=True)
                self._replicating.popleft()  # not before: what breaks the wait off leaves it under way, and its memory in use
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
            for missing in list(head.route.missing()):

                def passed(missing: Missing = missing, route: Route = head.route) -> bool:
                    route.advance()
                    return missing not in route.missing()

                item, peer, doing = missing
                self._breakage.heed(peer, head.where(item), doing, passed)
            return
        item_ = self._sums.next_item(head)
        if item_ is not None and head.own_done > head.summed:
            for peer in self._peers:
                self._breakage.heed(peer, head.where(item_), PARTIAL, partial(self._sums.arrived, head, item_, peer))

    def _send_kept(self) -> None:
        """Block until nothing is kept for others."""
        outbox = self._means.outbox
        while (kept := outbox.oldest()) is not None:
            (where, dst), start = kept, now_ns()

            def sent(dst: int = dst, where: Where = where) -> bool:
                for port in self.ports:
                    port.progress()
                if not (flushed := outbox.flush()):
                    self._breakage.heed(dst, where, ROOM, lambda: False)
                return flushed

            wait_until(self._transport, sent, peer=dst, where=where, doing=ROOM)
            self._probe.exposed(f"{where.layer} (tail)", start, now_ns())

    def _await_route(self, scatter: Scatter, route: Route, meanwhile: Callable[[], object]) -> None:
        for item in route.uncomputed():
            raise RuntimeError(f"gradient of layer {scatter.unit.name!r} was opened but slice {item} was never computed")
        missing = next(route.missing(), None)
        if missing is None:
            return
        item, peer, doing = missing
        start = now_ns()

        def here() -> bool:
            meanwhile()
            if next(route.missing(), None) != missing:
                return True
            self.heed_sums()
            return False

        wait_until(self._transport, here, peer=peer, where=scatter.where(item), doing=doing)
        self._probe.exposed(f"{scatter.unit.name} (tail)", start, now_ns())

    @property
    def replicated(self) -> bool:
        return self._replicas is not None

    def meet_replicas(self) -> None:
        """Raises CommFuseError if one of them has broken the step off before it came here."""
        if self._replicas is not None:
            self._replicas.all_reduce(torch.zeros(1, device="cpu"), self._breakage.step).wait(interruptible=True)

    def forget_all(self) -> None:
        """The end: drop every buffer, and give the replicas' communicator back."""
        if self._replicas is not None:
            self._replicas.close()
        self._queue.clear()
        self._replicating.clear()
        self._sums.clear()

    def reset(self, *, evaluating: bool) -> None:
        """After a step that was broken off, on a transport that recovers: forget all of it. Gradients are not delivered.

        With replicas every sum that was begun is owed an all-reduce: the other replicas count on it. What it brings is NaN, in
        case they did not lose the step. evaluating: it had no gradients, and is no concern of theirs. They hear of it once,
        also if this is called again after an exception in a later part of the recovery."""
        queue, self._queue = self._queue, deque()
        self._means = self._new_means()
        if self._replicas is None or evaluating or self._settled == self._breakage.step:
            return
        for scatter in queue:
            if scatter.bound.replicate:
                numel = scatter.bound.geometry.segment_bytes[self._rank] // scatter.bound.geometry.dtype.itemsize
                lost = torch.full((numel,), torch.nan, dtype=scatter.bound.out_dtype, device=self._pool.device)
                self._replicating.append((scatter, lost, self._replicas.all_reduce(lost, scatter.step)))
        cause = self._breakage.cause or "it was broken off on another rank of a replica"
        self._replicas.tell_broken(cause)
        while self._replicating:
            self._replicating.popleft()[2].wait()
        self._replicas.agree(self._breakage.step, cause)
        self._settled = self._breakage.step

    def discard(self) -> None:
        """After a step that was broken off: take in and drop what peers have sent for it. Gradients are not delivered.

        A lockstep transport's peers were broken off where this rank was, and have not sent what it has not sent."""
        for scatter in self._queue:
            if scatter.route is not None:
                scatter.route.flush()
                while not scatter.route.done:  # ranks further down wait for what is passed on here
                    self._await_route(scatter, scatter.route, self._advance_routes)
        while self._queue:
            scatter = self._queue.popleft()
            if scatter.route is not None:
                continue
            for item in scatter.bound.geometry.slices[self._rank][scatter.summed :]:
                tag = scatter.tag(item)
                for peer in self._peers:
                    if (peer, item.index) in scatter.unloaded:
                        continue
                    if self._transport.receive((peer,), tag, scatter.where(item), wait=not self._transport.lockstep):
                        self._transport.release((peer,), tag)
        self._send_kept()
        while self._replicating:
            self._replicating.popleft()[2].wait()
