"""Messages of transport `symmetric`: from a staging ring into the owner's inbox ring. Timelines: see transport.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NoReturn

import torch

from commfuse_dp.device.base import Event, Span, Stream, WordLike
from commfuse_dp.errors import Where
from commfuse_dp.probe import SEND
from commfuse_dp.transport.base import NOWHERE, Sending, Tag
from commfuse_dp.transport.checks import (
    check_message,
    check_tag,
    count_message,
    expected_twice,
    not_here,
    not_reserved,
)
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.streams.growth import GrowingRings
from commfuse_dp.transport.streams.staging import Lanes, Reservation, Staging, StagingRing
from commfuse_dp.transport.streams.words import WordTransport
from commfuse_dp.transport.symmetric.core import CHANNELS, Core, Layout, pair_of
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS, Inbox, Outbox
from commfuse_dp.transport.symmetric.watch import Awaited, Wait
from commfuse_dp.transport.views import MOST_VIEWS, Shaped

_FIELD_LIMIT = 1 << 31
TOGETHER = 4 << 20  # bytes of messages that leave together: below, time is in calls, not in bytes


class _Fan:
    """Messages of one tag to several peers."""

    __slots__ = ("apart", "at", "number", "offsets", "plain", "reservations", "room", "sizes", "tag", "words")

    def __init__(self, tag: Tag, room: int, number: int) -> None:
        self.tag, self.room = tag, room
        self.number = number  # among those of its run
        self.sizes: dict[int, int] = {}  # bytes, by destination
        self.offsets: dict[int, int] = {}  # in its staging
        self.at = 0  # the first of these
        self.apart = False  # not all of them are equal
        self.words: list[WordLike] = []  # behind which some of them are complete
        self.plain = False  # some are behind what is in the current stream
        self.reservations: list[tuple[StagingRing, Reservation]] = []


class Messages(GrowingRings, WordTransport):
    """What this rank sends and receives."""

    _core: Core
    _words: dict[tuple[Stream, int], torch.Tensor]  # of `own_words`: tables of kernels know them, whatever becomes of the rings

    def _open_messages(self, layout: Layout, limit: int) -> None:
        core, device = self._core, self._core.device
        self._scatter = device.side_stream("scatter")
        self._leaving = device.batch(self._scatter)
        with torch.inference_mode(False):
            memory = {peer: torch.zeros(align(limit), dtype=torch.uint8, device=device.torch_device) for peer in core.peers}
        self._staging = Staging(core, memory, limit)
        self._outboxes = {channel: Lanes(core.peers, partial(Outbox, ring)) for channel, ring in layout.capacity.items()}
        self._inboxes = {channel: Lanes(core.peers, partial(Inbox, ring)) for channel, ring in layout.capacity.items()}
        ranks = (*core.peers, core.rank)
        self._pairs = {channel: {peer: pair_of(peer, channel) for peer in ranks} for channel in CHANNELS}
        self._views: dict[Hashable, list[torch.Tensor]] = {}  # of messages that lie alike: places come again
        self.shaped = self._numbers = Shaped()
        self._standing: dict[Hashable, Wait] = {}  # from `arriving` to `release`

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
        device, probe, batch = core.device, core.probe, self._leaving
        timing = probe.timing if probe.sink is not None else None
        conditions: list[Awaited] = []
        wait: Wait | None = None
        computed: Event | None = None
        credit = core.own.credit
        try:
            for run in runs:
                for fan in run.values():
                    if computed is None and fan.plain:
                        computed = device.record(stream)
                        batch.submit()
                        device.wait_event(scatter, computed)
                    if fan.words:
                        batch.wait_all(fan.words)
                spans: list[Span] = []
                words: list[WordLike] = []
                for (tag, room), fan in run.items():
                    channel, sizes, offsets, total = tag[0], fan.sizes, fan.offsets, 0
                    pairs = self._pairs[channel]
                    pair = pairs[core.rank]
                    for box, dsts in self._outboxes[channel][tuple(sizes)]:
                        _, place, behind, word, value, _ = box.next(tag, room)
                        word += pair * ARRIVAL_WORDS
                        if behind > box.credited:
                            box.credited = behind
                            first, late = wait is None, list[WordLike]()
                            wait = wait or Wait(conditions, (), "to read earlier messages, which fill its inbox")
                            for dst in dsts:
                                wait.places.append(partial(_where, tag, sizes[dst]))
                                conditions.append((dst, credit, pairs[dst], behind, False, 0))
                                late.append((credit, pairs[dst], behind))
                            if first:
                                core.watch.note(scatter, wait)
                            batch.wait_all(late)
                        for dst in dsts:
                            remote, nbytes = core.blocks[dst], sizes[dst]
                            spans.append((remote.rings[pair], place, staging[dst], offsets[dst], nbytes))
                            words.append((remote.arrival, word, value))
                            total += nbytes
                    count_message(probe.counters, channel, total, sent=True)
                if timing is not None:
                    batch.submit()
                    begun = timing.mark(scatter)
                    batch.copy_all(spans)
                    (tag, _), peers = next(iter(run)), [dst for fan in run.values() for dst in fan.sizes]
                    about: dict[str, object] = {"nbytes": sum(span[4] for span in spans), "key": tag.key, "seq": tag.seq}
                    about |= {"peer": peers[0], "part": tag.part} if len(peers) == 1 else {"peers": peers}
                    timing.span(SEND, "message", begun, timing.mark(scatter), about)
                elif len(spans) == 1:
                    batch.copy(*spans[0])
                else:
                    batch.copy_all(spans)
                batch.write_all(words)
        finally:
            batch.submit()
        left = core.behind(scatter, wait)
        for run in runs:
            for fan in run.values():
                for ring, reservation in fan.reservations:
                    ring.sent(reservation, left)

    def _runs(self, sendings: Sequence[Sending]) -> list[dict[tuple[Tag, int], _Fan]]:
        """What leaves together, by tag and room. Raises ValueError for what cannot be sent."""
        limit = 0
        if len(sendings) > 1:
            for sending in sendings:
                limit += sending[2].nbytes
            limit = max(TOGETHER, -(-limit // 4))
        addresses = self._staging.addresses
        runs: list[dict[tuple[Tag, int], _Fan]] = []
        latest: dict[int, int] = {}  # number of the last fan of this run, by destination
        room_left = 0
        for dst, tag, buffer, when, room in sendings:
            nbytes = buffer.nbytes
            room = room or nbytes
            fan = runs[-1].get((tag, room)) if runs and nbytes <= room_left else None
            behind = fan is not None and fan.number < latest.get(dst, 0)  # it would overtake a message to the same peer
            if not runs or nbytes > room_left or behind:
                runs.append({})
                latest.clear()
                room_left, fan = limit, None
            room_left -= nbytes
            if fan is None:
                if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag[0] not in CHANNELS:
                    self._refuse_tag(tag)
                fan = runs[-1][tag, room] = _Fan(tag, room, len(runs[-1]))
            latest[dst] = fan.number
            address = addresses.get(dst)
            if address is None:
                self._core.check_peer(dst)
                raise AssertionError(dst)
            if dst in fan.sizes:
                raise ValueError(f"send to rank {dst}, {tag}: it is sent twice")
            # An empty tensor has no address.
            at = buffer.data_ptr() - address if nbytes else int(buffer.storage_offset()) * buffer.element_size()
            if not fan.sizes:
                fan.at = at
            fan.apart = fan.apart or at != fan.at
            fan.sizes[dst], fan.offsets[dst] = nbytes, at
            if when:
                fan.words += when
            else:
                fan.plain = True
        rings = self._staging.rings
        for run in runs:
            for fan in run.values():  # the reservations of its messages
                for ring, members in rings[tuple(fan.sizes)]:
                    lanes: list[tuple[StagingRing, Sequence[int]]] = [(ring, members)]
                    if fan.apart and len({fan.offsets[dst] for dst in members}) > 1:
                        lanes = [(rings.alone(dst), [dst]) for dst in members]
                    for lane, dsts in lanes:
                        dst = dsts[0]
                        reservation = lane.find(fan.offsets[dst], fan.room if len(dsts) > 1 else fan.sizes[dst])
                        if reservation is None:
                            raise not_reserved(dst, fan.tag)
                        fan.reservations.append((lane, reservation))
        return runs

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:
        core, room = self._core, room or nbytes
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag[0] not in CHANNELS:
            self._refuse_tag(tag)
        inboxes = self._inboxes[tag[0]]
        for src in srcs:
            if src not in inboxes.of:
                core.check_peer(src)
        for box, members in inboxes[tuple(srcs)]:
            if tag in box.expected:
                raise expected_twice(core.membership, core.rank, members[0], tag)
            if not 0 <= nbytes <= room <= self.message_limit:
                check_message(max(nbytes, room) if nbytes >= 0 else nbytes, self.message_limit, f"from rank {members[0]}")
            box.expected[tag] = box.next(tag, room), nbytes

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        core = self._core
        stream = core.enter()
        found, conditions, place = self._find(srcs, tag)
        if conditions:
            core.wait_for(stream, conditions, (where if where is not NOWHERE else place,), "to send", about=tag)
        return found

    def arriving(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE) -> tuple[list[torch.Tensor], list[WordLike]]:
        core = self._core
        stream = core.enter()
        found, conditions, place = self._find(srcs, tag)
        if not conditions:
            return found, []
        self._standing[(*srcs, tag)] = wait = Wait(conditions, (where if where is not NOWHERE else place,), "to send", tag)
        core.watch.note(stream, wait)
        words = {condition[0]: condition[1:4] for condition in conditions}
        return found, [words[src] for src in srcs]

    def _find(self, srcs: Sequence[int], tag: Tag) -> tuple[list[torch.Tensor], list[Awaited], Callable[[], Where]]:
        """Messages that are received now, what says that they are here, and where in the step they belong."""
        core = self._core
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag[0] not in CHANNELS:
            self._refuse_tag(tag)
        channel = tag[0]
        inboxes, pairs, arrival = self._inboxes[channel], self._pairs[channel], core.own.arrival
        for src in srcs:
            if src not in inboxes.of:
                core.check_peer(src)
        conditions: list[Awaited] = []
        places: list[
            tuple[tuple[int, ...], int, int]
        ] = []  # peers, and where it lies in the rings of all of them: offset, bytes
        for box, members in inboxes[tuple(srcs)]:
            entry = box.expected.get(tag)
            if entry is None:
                src = members[0]
                raise ValueError(
                    f"receive: {tag} of rank {src} was not announced by expect([{src}], ...), in the order in which rank {src} "
                    f"sends: transport {core.name} finds messages by it"
                )
            (_, offset, _, word, value, before), nbytes = entry
            places.append((members, offset, nbytes))
            for src in members:
                conditions.append((src, arrival, pairs[src] * ARRIVAL_WORDS + word, value, True, before))
            box.received.add(tag)
        name = *srcs, channel, *places
        found = self._views.get(name)
        if found is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            rings, spans = core.own.rings, {src: span for members, *span in places for src in members}
            found = self._views[name] = [rings[pairs[src]].narrow(0, *spans[src]) for src in srcs]
        return found.copy(), conditions, partial(_where, tag, places[0][2] if places else 0)

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        core, channel = self._core, tag[0]
        stream = core.enter(flush=False)
        inboxes = self._inboxes.get(channel)
        for src in srcs:
            if inboxes is None or src not in inboxes.of or tag not in inboxes.of[src].received:
                raise not_here(src, tag)
        if inboxes is None:
            return
        words: list[WordLike] = []
        pair = self._pairs[channel][core.rank]
        received = 0
        for box, members in inboxes[tuple(srcs)]:
            box.received.discard(tag)
            message, nbytes = box.expected.pop(tag)
            received += nbytes * len(members)
            if message[0] != box.released + 1:
                box.release_early(message[0], core.device.record(stream))
                continue
            credit, events = box.release(message[0])
            for event in events:
                core.device.wait_event(stream, event)
            for src in members:
                words.append((core.blocks[src].credit, pair, credit))
        count_message(core.probe.counters, channel, received, sent=False)
        if self._standing and (wait := self._standing.pop((*srcs, tag), None)) is not None:
            core.behind(stream, wait)
        if words:
            core.hold(stream, words, more=more)

    def own_words(self, count: int) -> torch.Tensor:
        device = self._core.device
        name = device.current_stream(), count
        found = self._words.get(name)
        if found is None:
            with torch.inference_mode(False):
                found = self._words[name] = torch.zeros(count, dtype=torch.int32, device=device.torch_device)
            device.wait_event(self._scatter, device.record(device.current_stream()))  # it must see the zeros
        return found

    def _message_memory(self) -> list[torch.Tensor]:
        """What sums read, and what leaves for others."""
        core = self._core
        inboxes = [core.own.rings[pair_of(peer, channel)] for peer in core.peers for channel in CHANNELS]
        return inboxes + list(self._staging.memory.values())

    def _forget_messages(self) -> None:
        """Let go of all memory."""
        self._staging.clear()
        self._views.clear()
        self._numbers.clear()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _refuse_tag(self, tag: Tag) -> NoReturn:
        check_tag(tag)
        raise ValueError(f"{tag}: transport {self._core.name} has rings for the channels {CHANNELS}")


def _where(tag: Tag, nbytes: int) -> Where:
    return Where(f"(message {tag})", tag.seq, str(tag.part), nbytes)
