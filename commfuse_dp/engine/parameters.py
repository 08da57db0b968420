"""The way of a parameter: published by its owner once a step, fetched slice by slice, read by the layers' GEMMs.

    owner     shard -> segment (one copy, cast to the compute dtype) -> publish
    reader    own slices: from the own segment; others' slices: in place (shm), or through the window into a pooled buffer

What does not change from step to step (byte ranges, views of segments that stay where they are) is worked out once per unit:
on small layers the time is in Python, not in the GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.memory.arena import Arena
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import ordering_of
from commfuse_dp.engine.plan import Unit, UnitSlice, absent_slice
from commfuse_dp.engine.programs import Programs, bind
from commfuse_dp.engine.room import check_room
from commfuse_dp.engine.window import Held, Key, Located, Mirror, Window, group
from commfuse_dp.errors import CommFuseError, ConfigError, Where
from commfuse_dp.kernels.publish import PublishPlan
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.probe import RECEIVE, now_ns
from commfuse_dp.program.layout import Slice
from commfuse_dp.transport.base import Outcome, Part, PullRequest, Transfer, Transport
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.waiting import wait_until

Consume = Callable[[UnitSlice, "list[Piece]"], None]

PUSH_BYTES = 1 << 20
SLICE = "a parameter slice"  # what is waited for


def _window_memory(transport: Transport, budget: int, device: torch.device) -> BufferPool | Arena:
    if device.type == "cpu" and transport.device is None:
        return Arena(budget)
    return BufferPool(device, ordering_of(transport.device), transport.probe, limit=budget)


class Group:
    """Slices that come into one buffer. (It does not refer to its visits: they go without the help of a collection.)"""

    __slots__ = ("data", "key", "located", "size", "waiting")

    def __init__(self, visits: list[Visit]) -> None:
        self.size = len(visits)
        first = visits[0]
        self.key = first.key
        at, others = align(first.item.nbytes), []
        for visit in visits[1:]:
            visit.at = at
            others.append(Part(visit.item.owner, self.key[0], visit.item.offset, visit.item.nbytes, at))
            at += align(visit.item.nbytes)
        last = visits[-1]
        self.located = Located(first.item.offset, first.item.nbytes, last.at + last.item.nbytes, tuple(others))
        for visit in visits:
            visit.group = self
        self.data: torch.Tensor | None = None  # while it is read slice by slice
        self.waiting = 0  # slices of it that are still to be read


class Visit:
    """One slice of one unit, as this rank reads it in every step."""

    __slots__ = ("at", "data", "group", "item", "key", "mirror", "pieces", "pull")

    def __init__(self, item: UnitSlice, key: Key, mirror: Mirror) -> None:
        self.item = item
        self.key = key
        self.mirror = mirror  # of a slice of another rank
        self.pull = PullRequest(item.owner, key[0], item.offset, item.nbytes)  # in place
        self.at = 0  # byte of the group's buffer
        self.group: Group  # of a slice of another rank
        self.data: torch.Tensor | None = None  # bytes that `pieces` are views of
        self.pieces: list[Piece] = []


class _Reading:
    """How this rank reads and publishes one unit."""

    def __init__(self, unit: Unit, rank: int, programs: Programs, together: int) -> None:
        """together: bytes of the window, if slices may come together; else 0."""
        self._rank = rank
        slices = unit.params.slices
        count = max(len(own) for own in slices)
        self.by_owner = [
            [
                Visit(item, (unit.index, owner, item.index), _mirror(slices, rank, item.index))
                for item in (*own, *(absent_slice(owner, index) for index in range(len(own), count)))
            ]
            for owner, own in enumerate(slices)
        ]
        """[owner][index]; those that an owner lacks are read on lockstep transports only."""
        lane = () if unit.replicated else bind(programs.forward(unit), None, self.visit)
        self.forward = [entry.read for entry in lane if entry.read is not None]
        remote = [visit for visit in self.forward if visit.item.owner != rank]
        read_at = 0
        self.groups: dict[Key, Group] = {}
        for count in group([align(visit.item.nbytes) for visit in remote], together) if together else [1] * len(remote):
            found = Group(remote[read_at : read_at + count])
            self.groups[found.key] = found
            read_at += count
        self.remote_forward = list(self.groups)  # keys
        self.pulls = [visit.pull for visit in remote]
        self.viewed = False  # in place: all visits have their pieces
        self.remote_bytes = sum(visit.item.nbytes for visit in remote)
        self.seen = 0  # epoch of which all owners are known to have published
        self.shards: list[tuple[torch.Tensor, int, int]] = []  # (view of the own segment, part, first row in the local shard)

    def visit(self, part: Slice) -> Visit | None:
        """How a slice is read; None: an own one that there is not."""
        visit = self.by_owner[part.owner][part.index]
        return None if visit.item.absent and part.owner == self._rank else visit


def _mirror(slices: Sequence[Sequence[UnitSlice]], rank: int, index: int) -> Mirror:
    """slices: of every owner. See [Note: Same walk on all ranks] in window.py."""
    give = (slices[rank][index].offset, slices[rank][index].nbytes) if index < len(slices[rank]) else (0, 0)
    return Mirror(max(own[index].nbytes for own in slices if index < len(own)), give)


class ParameterStream:
    """Published parameters of all ranks of one group. Layouts are fixed by `expose`, in the first step."""

    def __init__(
        self, transport: Transport, units: Sequence[Unit], config: CommFuseConfig, programs: Programs, device: torch.device
    ) -> None:
        self._transport = transport
        self._units = units
        self._programs = programs
        self._published = [unit for unit in units if not unit.replicated]
        # In streams nobody waits for the readers of what nobody publishes (ZeRO-1, 2).
        self.shared = bool(self._published) or transport.device is None
        self._config = config
        self.memory = _window_memory(transport, config.prefetch_bytes, device)
        self._probe = transport.probe
        self._rank = transport.rank
        self._world_size = transport.world_size
        self._window: Window | None = None
        self._readings: list[_Reading] = []
        self._open: list[Group] = []  # are being read slice by slice
        self._plans: dict[int, PublishPlan] = {}  # first unit of a batch -> its copies, on a device
        self._epoch = 0
        self._finished = 0  # epoch that the peers know to be over here
        self.exposed = False
        self.while_waiting: Callable[[], object] = lambda: None  # useful work to do while a slice is late
        self.heed: Callable[[int, Where, str, Callable[[], bool]], None] = lambda *_: None  # of an owner that has not begun

    # ---- layout ------------------------------------------------------------------------------------------------------
    def require_values(self, vote: Callable[[bool], bool]) -> None:
        """Before the first step, while nothing has been fixed that materialising would change: it can be made up for.

        vote: whether something is true on any rank. Raises CommFuseError on all ranks if parameters of one are still on the
        meta device."""
        if self.exposed:
            return
        slots = [slot for unit in self._units if not unit.replicated for slot in unit.slots]
        missing = [slot.name for slot in slots if slot.local().is_meta]
        if not vote(bool(missing)):
            return
        names = f"{missing[:8]}{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}"
        raise CommFuseError(
            "parameters should be materialized from meta device before training, but the following were still on meta device: "
            f"{names if missing else 'those of other ranks'}. Call model.to_empty(device=...) and initialise or load the "
            "values, on all ranks, before the first forward."
        )

    def require_room(self) -> None:
        """Lay the units out in the dtypes of now. Raises ConfigError if a slice fits no budget."""
        config = self._config
        limit = min(config.prefetch_bytes, config.inbox_bytes, self._transport.message_limit)
        for unit in self._units:
            unit.bind(self._world_size, comfortable=max(1, limit // 2))
            reduced = unit.policy.reduce_dtype or unit.dtype
            # Partials may travel in the wider of the two.
            largest = unit.largest_slice(reduced if reduced.itemsize > unit.dtype.itemsize else unit.dtype)
            if largest > limit and self._world_size > 1:
                need = -(-largest * unit.slices_per_rank // limit)
                raise ConfigError(
                    f"a slice of layer {unit.name!r} has {largest} bytes, but prefetch_bytes={config.prefetch_bytes} and "
                    f"inbox_bytes={config.inbox_bytes} allow at most {limit}. Set slices_per_rank to {need} or more "
                    f"(now {unit.slices_per_rank}), or raise prefetch_bytes and inbox_bytes to {largest} or more."
                )
            check_room(unit, unit.geometry(unit.dtype, (True,) * len(unit.slots)), self._transport)

    def expose(self) -> None:
        """Collective. Called when dtypes are final and meta parameters have been materialised."""
        config = self._config
        self.require_room()
        self._transport.expose([unit.params.segment_bytes for unit in self._units])
        lockstep = self._transport.lockstep
        together = config.prefetch_bytes if self._transport.device is not None and not lockstep else 0
        self._readings = [_Reading(unit, self._rank, self._programs, together) for unit in self._units]
        for unit, reading in zip(self._units, self._readings, strict=True):
            self._bind_own(unit, reading)
        if not self._transport.in_place and self._world_size > 1:
            mirror = self._mirror if lockstep else None
            self.memory.reserve(sum(align(v.item.nbytes) for r in self._readings for own in r.by_owner for v in own))
            self._window = Window(self._transport, self.memory, config.prefetch_bytes, self._probe, self._locate, mirror)
        self._transport.describe = self._describe
        self.exposed = True

    def _bind_own(self, unit: Unit, reading: _Reading) -> None:
        segment = self._transport.segments[unit.index]
        for visit in reading.by_owner[self._rank]:
            visit.data = segment[visit.item.offset : visit.item.offset + visit.item.nbytes]
            visit.pieces = unit.params.pieces(visit.item, visit.data)
        reading.shards = unit.params.shards(unit.params.slices[self._rank], segment)

    def _locate(self, key: Key) -> Located:
        return self._readings[key[0]].groups[key].located

    def _mirror(self, key: Key) -> Mirror:
        return self._readings[key[0]].by_owner[key[1]][key[2]].mirror

    def _describe(self, owner: int, key: int, epoch: int, start: int, nbytes: int) -> Where:
        items = [visit.item for visit in self._readings[key].by_owner[owner]] if self._readings else []
        found = next((item for item in items if item.offset == start), None)
        return Where(self._units[key].name, epoch, str(found) if found is not None else f"bytes {start}", nbytes)

    # ---- epochs ------------------------------------------------------------------------------------------------------
    def start(self, epoch: int, sequence: list[Key]) -> None:
        """Publish this rank's parameters as version `epoch`, and begin to fetch the others' along a recording."""
        self._epoch = epoch
        self.memory.settle()
        early = self._transport.device is None  # else see [Note: The host may stand] in device/base.py
        if self._window is not None and early:
            self._window.start(epoch, sequence)  # asked for now, served as soon as the owners have published
        with torch.no_grad():
            batches = list(self._batches(sequence))
            for batch in batches:
                self._pack(batch)
                self._transport.publish([unit.index for unit in batch], epoch, last=batch is batches[-1])
        if self._window is not None and not early:
            self._window.start(epoch, sequence)

    def stop(self, where: Where, outcome: Outcome) -> list[Key]:
        """This rank reads no more of the epoch; returns the order in which it fetched slices. May be called again.

        outcome: of the step, for the peers."""
        record = self._window.stop(where) if self._window is not None else []
        for found in self._open:
            found.waiting, found.data = 0, None
        self._open.clear()
        if self._epoch > self._finished:
            self._finished = self._epoch  # first: to a dead peer it can be said only once, too
            self._transport.finish(self._epoch, outcome)
        return record

    def _publication_order(self, sequence: list[Key]) -> Sequence[Unit]:
        if not sequence:
            return self._published
        first_used = list(dict.fromkeys(key[0] for key in sequence))
        rest = {unit.index for unit in self._published}.difference(first_used)
        return [self._units[index] for index in (*first_used, *sorted(rest))]

    def _batches(self, sequence: list[Key]) -> Iterator[list[Unit]]:
        """Units to be published together: peers can start on what is out, and the notices of many small units travel together.

        On a device every batch is a launch: they double in size, so that the first is out soon and there are few of them.
        """
        batch: list[Unit] = []
        size, limit = 0, PUSH_BYTES
        for unit in self._publication_order(sequence):
            batch.append(unit)
            size += unit.params.segment_bytes[self._rank]
            if size >= limit:
                yield batch
                batch, size = [], 0
                if self._transport.device is not None:
                    limit *= 2
        yield batch

    def _pack(self, units: Sequence[Unit]) -> None:
        """Copy (and cast) this rank's shards into the published segments; own slices are read from there too."""
        sources, targets = [], []
        for unit in units:
            for source, target in self._shards_of(unit):
                if target.is_cuda:
                    sources.append(source if source.is_contiguous() else source.contiguous())
                    targets.append(target)
                else:
                    target.copy_(source)
        if not targets:
            return
        key = units[0].index  # in a model of a steady order the batches are the same in every step
        plan = self._plans.get(key)
        if plan is None or len(plan) != len(targets) or not plan.fits(sources, targets):
            plan = self._plans[key] = PublishPlan(sources, targets)
        plan.run()

    def _shards_of(self, unit: Unit) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of a local shard, where it goes in the segment)"""
        found = []
        for target, part, first in self._readings[unit.index].shards:
            local = unit.slots[part].local()
            rows = target.shape[0]
            if local.shape[0] != rows:
                local = local[first : first + rows]
            if local.shape != target.shape:
                raise CommFuseError(
                    f"parameter {unit.slots[part].name!r} has a local shard of {tuple(unit.slots[part].local().shape)}, in "
                    f"which rows {first}:{first + rows} of shape {tuple(target.shape)} were expected: its sharding changed "
                    "after apply(). Call commfuse_dp.remove(model) before changing it and apply() again afterwards."
                )
            if local.dtype != target.dtype and unit.policy.compute_dtype is None:
                raise CommFuseError(
                    f"parameter {unit.slots[part].name!r} is {local.dtype} now, but was {target.dtype} in the first step. "
                    "Call commfuse_dp.remove(model) before converting it and apply() again afterwards."
                )
            found.append((local, target))
        return found

    def differs(self, unit: Unit) -> bool:
        """Whether this rank's shards of a unit hold other values now, bit by bit, than those that were published."""
        with torch.no_grad():
            return any(
                not torch.equal(local.to(published.dtype).contiguous().view(torch.uint8), published.view(torch.uint8))
                for local, published in self._shards_of(unit)
            )

    # ---- reading -----------------------------------------------------------------------------------------------------
    def gather(self, unit: Unit, consume: Consume, *, keep: bool) -> None:
        """consume(slice, pieces) for every slice of the unit, own first. `keep`: hold remote slices for the backward."""
        reading = self._readings[unit.index]
        if self.in_view(unit):
            for visit in reading.forward:
                consume(visit.item, visit.pieces)
            return
        self.announce(reading.remote_forward)
        for visit in reading.forward:
            self.read(unit, visit, consume, keep=keep)
        reading.viewed = self._window is None and all(visit.data is not None for visit in reading.forward)

    def in_view(self, unit: Unit) -> bool:
        """All slices of the unit may be read where their owners published them, through the pieces of its visits: nothing is to
        be waited for, or done afterwards. They count as read."""
        reading = self._readings[unit.index]
        if not reading.viewed or self._probe.sink is not None:
            return False
        if reading.seen == self._epoch > self._finished:  # in the forward, say, and a pull would find the same
            self._probe.counters.param_bytes_received += reading.remote_bytes
            return True
        for transfer in self._transport.pull(self._epoch, reading.pulls):
            if transfer.data is None:
                return False
        reading.seen = self._epoch
        return True

    def visitor(self, unit: Unit) -> Callable[[Slice], Visit | None] | None:
        """How the unit's slices are read; None: no more."""
        return self._readings[unit.index].visit if self._readings else None

    def announce(self, keys: list[Key]) -> None:
        """The slices are about to be read, in this order."""
        if self._window is not None:
            if self._open:  # an exception has left some of them
                left, self._open = self._open, []
                for found in left:
                    found.waiting, found.data = 0, None
                    self._window.done(found.key)
            self._window.announce(keys)

    def coming(self, unit: Unit) -> tuple[list[Visit], list[Key]]:
        """All slices in the order in which they come, own first; and what of it comes from others, in this order."""
        reading = self._readings[unit.index]
        return reading.forward, reading.remote_forward

    def take_whole(self, unit: Unit) -> list[Held] | None:
        """All slices of others at once, as they come together (`coming`), without waiting where they have a word of
        arrival (`transfer.arrival`); None if they do not fit into the window together."""
        window = self._window
        if window is None:
            return []
        taken = window.take_all(self._readings[unit.index].remote_forward)
        if taken is None:
            return None
        start, landed = None, []
        for held in taken:
            transfer = held.transfer
            if transfer.arrival is None:
                start = start if start is not None else self._probe.mark()
                transfer.wait()
                landed.append(transfer.landed)
        if landed:
            self._probe.waited(unit.name, start, landed)
        return taken

    def done_whole(self, unit: Unit, *, keep: bool) -> None:
        """The current stream has been given the last that reads the slices that were taken, and that waits for them."""
        if self._window is not None:
            self._window.done_all(self._readings[unit.index].remote_forward, pin=keep)

    def forget(self, unit: Unit) -> None:
        """The unit's backward is over: what was held for it may go."""
        window = self._window
        if window is not None and unit.index in window.pins:
            window.unpin(unit.index)

    def recover(self) -> None:
        """After `stop`, in a step that was broken off: an exception may have lost buffers."""
        self.memory.forget_taken()

    def forget_all(self) -> None:
        """The end: drop every view of memory."""
        self.memory.clear()
        self._readings, self._window = [], None
        self._plans.clear()

    def read(self, unit: Unit, visit: Visit, consume: Consume, *, keep: bool = False) -> None:
        """consume(slice, pieces), after waiting for the slice if need be."""
        item = visit.item
        if item.owner == self._rank:
            consume(item, visit.pieces)
        elif self._window is not None:
            found = visit.group
            if not found.waiting:
                found.waiting = found.size
                transfer = self._window.take(found.key)
                self._open.append(found)
                found.data = self._await(unit, item, transfer) if not item.absent else None
            if found.data is not None:
                consume(item, unit.params.pieces(item, found.data[visit.at : visit.at + item.nbytes]))
            found.waiting -= 1
            if not found.waiting:
                found.data = None
                self._open.remove(found)
                self._window.done(found.key, pin=keep)
        else:
            self._read_in_place(unit, visit, consume)

    def _read_in_place(self, unit: Unit, visit: Visit, consume: Consume) -> None:
        item = visit.item
        owner, nbytes = item.owner, item.nbytes
        transfer = self._transport.pull(self._epoch, (visit.pull,))[0]
        data = transfer.data if transfer.data is not None else self._await(unit, item, transfer)
        if data is not visit.data:  # segments stay where they are: the same bytes in every step
            visit.data = data
            visit.pieces = unit.params.pieces(item, data)
        if self._probe.sink is None:
            consume(item, visit.pieces)
            return
        start = now_ns()  # the transfer is the reading itself, by the GEMM
        consume(item, visit.pieces)
        self._probe.span(RECEIVE, f"{unit.name} (in place)", start, now_ns(), nbytes=nbytes, peer=owner)

    def _await(self, unit: Unit, item: UnitSlice, transfer: Transfer) -> torch.Tensor:
        if not transfer.done():
            start = now_ns()

            def ready() -> bool:
                if transfer.done():
                    return True
                self.while_waiting()
                if transfer.done():
                    return True
                self.heed(item.owner, where, SLICE, transfer.done)
                return False

            where = Where(unit.name, self._epoch, str(item), item.nbytes)
            wait_until(self._transport, ready, peer=item.owner, where=where, doing=SLICE)
            self._probe.exposed(unit.name, start, now_ns())
        if self._probe.timing is not None:
            self._probe.waited(unit.name, self._probe.mark(), (transfer.landed,))
        return transfer.wait()
