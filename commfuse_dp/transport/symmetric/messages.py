"""Messages of transport `symmetric`: from a staging ring into the owner's inbox ring. Timelines: see transport.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch

from commfuse_dp.device.base import Event, Span, WordLike
from commfuse_dp.errors import Where
from commfuse_dp.probe import SEND
from commfuse_dp.transport.base import NOWHERE, Sending, Tag, Transport
from commfuse_dp.transport.checks import (
    check_message,
    check_tag,
    count_message,
    expected_twice,
    not_here,
    not_reserved,
)
from commfuse_dp.transport.streams.staging import Lanes, Reservation, Staging, StagingRing
from commfuse_dp.transport.symmetric.core import CHANNELS, Core, Layout, pair_of
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS, Arrival, Inbox, Outbox
from commfuse_dp.transport.symmetric.watch import Awaited, Wait
from commfuse_dp.transport.views import MOST_VIEWS

_FIELD_LIMIT = 1 << 31
TOGETHER = 4 << 20  # bytes of messages that leave together: below, time is in calls, not in bytes


class _Fan:
    """Messages of one tag to several peers."""

    __slots__ = ("offsets", "reservations", "room", "sendings", "tag")

    def __init__(self, tag: Tag, room: int) -> None:
        self.tag, self.room = tag, room
        self.sendings: dict[int, Sending] = {}  # by destination
        self.offsets: dict[int, int] = {}  # in its staging
        self.reservations: list[tuple[StagingRing, Reservation]] = []


class Messages(Transport):
    """What this rank sends and receives."""

    _core: Core

    def _open_messages(self, layout: Layout) -> None:
        core, device = self._core, self._core.device
        self._scatter = device.side_stream("scatter")
        with torch.inference_mode(False):
            memory = {peer: torch.zeros(layout.ring, dtype=torch.uint8, device=device.torch_device) for peer in core.peers}
        self._staging = Staging(core, memory, self.message_limit)
        by_channel = [[(peer, channel) for peer in core.peers] for channel in CHANNELS]
        self._outboxes = Lanes(by_channel, lambda: Outbox(layout.ring))
        self._pairs = {(peer, channel): pair_of(peer, channel) for peer in (*core.peers, core.rank) for channel in CHANNELS}
        self._views: dict[tuple[int, int, int, int], torch.Tensor] = {}  # (peer, channel, offset, bytes): places come again
        self._inboxes = Lanes(by_channel, lambda: Inbox(layout.ring))

    # ---- sending -----------------------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        """What one call reserves for one peer before it sends must fit into inbox_bytes."""
        return self._staging.reserve(dsts, sizes, room)

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        """In their order, as far as they go to one peer. Those that follow each other leave together, up to `TOGETHER` bytes or
        a quarter of all: behind the last of them, by one batch of copies. Places in the staging are free again when all of them
        have left. `when`: written by kernels that are in the current stream already, once the buffers are complete."""
        core, scatter, staging = self._core, self._scatter, self._staging.memory
        stream = core.enter()
        runs = self._runs(sendings)  # before anything is enqueued
        device, probe = core.device, core.probe
        timing = probe.timing if probe.sink is not None else None
        conditions: list[Awaited] = []
        wait = Wait(conditions, (), "to read earlier messages, which fill its inbox")
        computed: Event | None = None
        batch = device.batch(scatter)
        try:
            for run in runs:
                for fan in run:
                    produced = [sending.when for sending in fan.sendings.values() if sending.when is not None]
                    if computed is None and len(produced) < len(fan.sendings):
                        computed = device.record(stream)
                        batch.submit()
                        device.wait_event(scatter, computed)
                    batch.wait_all(produced)
                spans: list[Span] = []
                words: list[WordLike] = []
                for fan in run:
                    tag, room = fan.tag, fan.room
                    pair, total = self._pairs[core.rank, tag.channel], 0
                    for box, names in self._outboxes.together([(dst, tag.channel) for dst in fan.sendings]):
                        number, place, behind = box.places.place(room)
                        word, value, _ = box.fingerprints.next(number, tag, room)
                        late = behind > box.credited
                        if late:
                            box.credited = behind
                            first = not conditions
                            conditions += [(name[0], core.own.credit, self._pairs[name], behind, False, 0) for name in names]
                            wait.places += [partial(_where, tag, fan.sendings[name[0]].buffer.nbytes) for name in names]
                            if first:
                                core.watch.note(scatter, wait)
                            batch.wait_all([(core.own.credit, self._pairs[name], behind) for name in names])
                        for name in names:
                            dst = name[0]
                            nbytes = fan.sendings[dst].buffer.nbytes
                            remote = core.blocks[dst]
                            spans.append((remote.rings[pair], place, staging[dst], fan.offsets[dst], nbytes))
                            words.append((remote.arrival, pair * ARRIVAL_WORDS + word, value))
                            total += nbytes
                    count_message(probe.counters, tag.channel, total, sent=True)
                if timing is not None:
                    batch.submit()
                    begun = timing.mark(scatter)
                    batch.copy_all(spans)
                    tag, dsts = run[0].tag, [dst for fan in run for dst in fan.sendings]
                    about: dict[str, object] = {"nbytes": sum(span[4] for span in spans), "key": tag.key, "seq": tag.seq}
                    about |= {"peer": dsts[0], "part": tag.part} if len(dsts) == 1 else {"peers": dsts}
                    timing.span(SEND, "message", begun, timing.mark(scatter), about)
                elif len(spans) == 1:
                    batch.copy(*spans[0])
                else:
                    batch.copy_all(spans)
                batch.write_all(words)
        finally:
            batch.submit()
        left = core.behind(scatter, (wait,))
        for run in runs:
            for fan in run:
                for ring, reservation in fan.reservations:
                    ring.sent(reservation, left)

    def _runs(self, sendings: Sequence[Sending]) -> list[list[_Fan]]:
        """What leaves together, each by messages of one tag. Raises ValueError for what cannot be sent."""
        limit = 0
        if len(sendings) > 1:
            limit = max(TOGETHER, -(-sum([sending.buffer.nbytes for sending in sendings]) // 4))
        runs: list[dict[tuple[Tag, int], _Fan]] = []
        room_left = 0
        for sending in sendings:
            dst, tag, buffer, _, room = sending
            nbytes = buffer.nbytes
            room = room or nbytes
            if not runs or nbytes > room_left:
                runs.append({})
                room_left = limit
            room_left -= nbytes
            fan = runs[-1].get((tag, room))
            if fan is None:
                if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
                    self._refuse_tag(tag)
                fan = runs[-1][tag, room] = _Fan(tag, room)
            staging = self._staging.memory.get(dst)
            if staging is None:
                self._core.check_peer(dst)
                raise AssertionError(dst)
            if dst in fan.sendings:
                raise ValueError(f"send to rank {dst}, {tag}: it is sent twice")
            fan.sendings[dst] = sending
            # An empty tensor has no address.
            at = buffer.data_ptr() - staging.data_ptr() if nbytes else int(buffer.storage_offset()) * buffer.element_size()
            fan.offsets[dst] = at
        found = [list(run.values()) for run in runs]
        for run in found:
            for fan in run:
                self._find(fan)
        return found

    def _find(self, fan: _Fan) -> None:
        """The reservations of its messages."""
        for ring, members in self._staging.rings.together(list(fan.sendings)):
            lanes = [(ring, members)]
            if len(members) > 1 and len({fan.offsets[dst] for dst in members}) > 1:
                lanes = [(self._staging.rings.alone(dst), [dst]) for dst in members]
            for lane, dsts in lanes:
                dst = dsts[0]
                reservation = lane.find(fan.offsets[dst], fan.room if len(dsts) > 1 else fan.sendings[dst].buffer.nbytes)
                if reservation is None:
                    raise not_reserved(dst, fan.tag)
                fan.reservations.append((lane, reservation))

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:
        core, room = self._core, room or nbytes
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
            self._refuse_tag(tag)
        names = [(src, tag.channel) for src in srcs]
        for name in names:
            if name not in self._inboxes:
                core.check_peer(name[0])
        for box, members in self._inboxes.together(names):
            if tag in box.expected:
                raise expected_twice(core.membership, core.rank, members[0][0], tag)
            if not 0 <= nbytes <= room <= self.message_limit:
                check_message(max(nbytes, room) if nbytes >= 0 else nbytes, self.message_limit, f"from rank {members[0][0]}")
            box.expect(tag, nbytes, room)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        core = self._core
        stream = core.enter()
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
            self._refuse_tag(tag)
        conditions: list[Awaited] = []
        names = [(src, tag.channel) for src in srcs]
        for name in names:
            if name not in self._inboxes:
                core.check_peer(name[0])
        lanes = self._inboxes.together(names)
        entries: dict[int, Arrival] = {}
        for box, members in lanes:
            entry = box.expected.get(tag)
            if entry is None:
                src = members[0][0]
                raise ValueError(
                    f"receive: {tag} of rank {src} was not announced by expect([{src}], ...), in the order in which rank {src} "
                    f"sends: transport {core.name} finds messages by it"
                )
            for name in members:
                entries[name[0]] = entry
                index = self._pairs[name] * ARRIVAL_WORDS + entry.word
                conditions.append((name[0], core.own.arrival, index, entry.value, True, entry.before))
        if not conditions:
            return []
        place = where if where is not NOWHERE else partial(_where, tag, entries[srcs[0]].nbytes)
        core.behind(stream, (core.wait_for(stream, conditions, (place,), "to send", about=tag),))
        for box, _ in lanes:
            box.received.add(tag)
        found, views = [], self._views
        if len(views) >= MOST_VIEWS:
            views.clear()
        for src in srcs:
            _, offset, nbytes, _, _, _ = entries[src]
            place_of = src, tag.channel, offset, nbytes
            view = views.get(place_of)
            if view is None:
                view = views[place_of] = core.own.rings[self._pairs[src, tag.channel]].narrow(0, offset, nbytes)
            found.append(view)
        return found

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        core = self._core
        stream = core.enter(flush=False)
        words: list[WordLike] = []
        pair = self._pairs.get((core.rank, tag.channel), 0)
        received = 0
        names = [(src, tag.channel) for src in srcs]
        for name in names:
            if name not in self._inboxes or tag not in self._inboxes[name].received:
                raise not_here(name[0], tag)
        for box, members in self._inboxes.together(names):
            box.received.discard(tag)
            entry = box.expected.pop(tag)
            received += entry.nbytes * len(members)
            if entry.number != box.released + 1:
                box.release_early(entry.number, core.device.record(stream))
                continue
            credit, events = box.release(entry.number)
            for event in events:
                core.device.wait_event(stream, event)
            for name in members:
                words.append((core.blocks[name[0]].credit, pair, credit))
        count_message(core.probe.counters, tag.channel, received, sent=False)
        if words:
            core.hold(stream, words, more=more)

    def _message_memory(self) -> list[torch.Tensor]:
        """What sums read, and what leaves for others."""
        core = self._core
        inboxes = [core.own.rings[pair_of(peer, channel)] for peer in core.peers for channel in CHANNELS]
        return inboxes + list(self._staging.memory.values())

    def _forget_messages(self) -> None:
        """Let go of all memory."""
        self._staging.clear()
        self._views.clear()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _refuse_tag(self, tag: Tag) -> NoReturn:
        check_tag(tag)
        raise ValueError(f"{tag}: transport {self._core.name} has rings for the channels {CHANNELS}")


def _where(tag: Tag, nbytes: int) -> Where:
    return Where(f"(message {tag})", tag.seq, str(tag.part), nbytes)
