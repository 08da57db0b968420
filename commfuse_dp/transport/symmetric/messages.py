"""Messages of transport `symmetric`: from a staging ring into the owner's inbox ring. Timelines: see transport.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch

from commfuse_dp.device.base import Event, Stream, Word
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import SEND
from commfuse_dp.transport.base import NOWHERE, Sending, Tag
from commfuse_dp.transport.one_sided.accounts import count_message
from commfuse_dp.transport.symmetric.core import CHANNELS, Core, Layout, pair_of
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS, Arrival, Inbox, Outbox, Reservation, StagingRing
from commfuse_dp.transport.symmetric.watch import Condition, Wait

_FIELD_LIMIT = 1 << 31
MOST_VIEWS = 4096  # that are kept


class Messages:
    """What this rank sends and receives."""

    def __init__(self, core: Core, layout: Layout, limit: int) -> None:
        self._core = core
        self.limit = limit  # bytes of the largest message
        device = core.device
        self._scatter = device.side_stream("scatter")
        with torch.inference_mode(False):
            self._staging = {
                peer: torch.zeros(layout.ring, dtype=torch.uint8, device=device.torch_device) for peer in core.peers
            }
        device.wait_event(self._scatter, device.record(device.current_stream()))  # it is zeroed there
        self._reserved = {peer: StagingRing(layout.ring, peer) for peer in core.peers}
        self._outboxes = {(peer, channel): Outbox(layout.ring) for peer in core.peers for channel in CHANNELS}
        self._pairs = {(peer, channel): pair_of(peer, channel) for peer in (*core.peers, core.rank) for channel in CHANNELS}
        self._views: dict[tuple[int, int, int, int], torch.Tensor] = {}  # (peer, channel or -1: staging, offset, bytes)
        self._behind: tuple[Stream, Event] | None = None  # the last wait for something to leave the staging
        self._inboxes = {(peer, channel): Inbox(layout.ring) for peer in core.peers for channel in CHANNELS}

    # ---- sending -----------------------------------------------------------------------------------------------------
    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor:
        core = self._core
        stream = core.enter()
        if dst not in self._staging:
            core.check_peer(dst)
        if not 0 <= nbytes <= self.limit:
            raise ValueError(
                f"a message of {nbytes} bytes to rank {dst}: 0 .. {self.limit} fit; "
                "send smaller slices (more slices_per_rank) or raise inbox_bytes"
            )
        reservation, behind = self._reserved[dst].reserve(nbytes)
        if behind is not None and (self._behind is None or self._behind[0] != stream or self._behind[1] is not behind):
            self._behind = stream, behind
            if core.probe.timing is not None and core.probe.timing.layer:
                core.probe.stood(core.probe.timing.layer, core.probe.mark(), (behind,))
            core.device.wait_event(stream, behind)
        return self._view(self._staging[dst], dst, -1, reservation.offset, nbytes)

    def rewind(self) -> None:
        """An epoch is over: see [Note: Steps begin at the start] in ring.py."""
        for ring in self._reserved.values():
            ring.rewind()

    def send(self, sendings: Sequence[Sending]) -> None:
        """In their order. Places in the staging are free again when all of them have left."""
        core, scatter = self._core, self._scatter
        stream = core.enter()
        found = [self._reservation(sending) for sending in sendings]  # before anything is enqueued
        device, probe = core.device, core.probe
        timing = probe.timing if probe.sink is not None else None
        conditions: list[Condition] = []
        wait = Wait(conditions, (), "to read earlier messages, which fill its inbox")
        computed: Event | None = None
        batch = device.batch(scatter)
        try:
            for (dst, tag, buffer, when), reservation in zip(sendings, found, strict=True):
                nbytes = buffer.nbytes
                if when is not None:
                    batch.wait(*when)
                elif computed is None:
                    computed = device.record(stream)
                    batch.submit()
                    device.wait_event(scatter, computed)
                box, pair, remote = self._outboxes[dst, tag.channel], self._pairs[core.rank, tag.channel], core.blocks[dst]
                number, place, behind = box.places.place(nbytes)
                word, value, _ = box.fingerprints.next(number, tag, nbytes)
                if behind > box.credited:
                    box.credited = behind
                    wait.places.append(partial(_where, tag, nbytes))
                    conditions.append(Condition(dst, core.own.credit, self._pairs[dst, tag.channel], behind))
                    if len(conditions) == 1:
                        core.watch.note(scatter, wait)
                    batch.wait(*conditions[-1][1:4])
                begun = None
                if timing is not None:
                    batch.submit()
                    begun = timing.mark(scatter)
                batch.copy(remote.rings[pair], place, self._staging[dst], reservation.offset, nbytes)
                if timing is not None and begun is not None:
                    about: dict[str, object] = {"nbytes": nbytes, "peer": dst, "key": tag.key, "seq": tag.seq, "part": tag.part}
                    timing.span(SEND, "message", begun, timing.mark(scatter), about)
                batch.write(remote.arrival, pair * ARRIVAL_WORDS + word, value)
                count_message(probe.counters, tag.channel, nbytes, sent=True)
        finally:
            batch.submit()
        left = core.behind(scatter, (wait,))
        for sending, reservation in zip(sendings, found, strict=True):
            self._reserved[sending.dst].sent(reservation, left)

    def _reservation(self, sending: Sending) -> Reservation:
        dst, tag, buffer, _ = sending
        if (dst, tag.channel) not in self._outboxes:
            self._core.check_peer(dst)
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
            self._refuse_tag(tag)
        staging, nbytes = self._staging[dst], buffer.nbytes
        # An empty tensor has no address.
        offset = buffer.data_ptr() - staging.data_ptr() if nbytes else int(buffer.storage_offset()) * buffer.element_size()
        reservation = self._reserved[dst].find(offset, nbytes)
        if reservation is None:
            raise ValueError(
                f"send to rank {dst}, {tag}: the buffer was not reserved by try_reserve({dst}, ...), or was sent before"
            )
        return reservation

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, src: int, tag: Tag, nbytes: int) -> None:
        core = self._core
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
            self._refuse_tag(tag)
        if (src, tag.channel) not in self._inboxes:
            core.check_peer(src)
        box = self._inboxes[src, tag.channel]
        if tag in box.expected:
            raise TransportError(
                f"rank {core.rank} expects two messages {tag} of rank {src}: tags must be unique among messages in flight"
            )
        if not 0 <= nbytes <= self.limit:
            raise ValueError(f"a message of {nbytes} bytes from rank {src}: 0 .. {self.limit} fit")
        box.expect(tag, nbytes)

    def arrived(self, src: int, tag: Tag) -> bool:
        self._core.check()
        self._core.check_peer(src)
        return True

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where) -> list[torch.Tensor]:
        core = self._core
        stream = core.enter()
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT or tag.channel not in CHANNELS:
            self._refuse_tag(tag)
        entries: list[Arrival] = []
        conditions: list[Condition] = []
        for src in srcs:
            if (src, tag.channel) not in self._inboxes:
                core.check_peer(src)
            entry = self._inboxes[src, tag.channel].expected.get(tag)
            if entry is None:
                raise ValueError(
                    f"receive: {tag} of rank {src} was not announced by expect({src}, ...), in the order in which rank {src} "
                    f"sends: transport {core.name} finds messages by it"
                )
            entries.append(entry)
            index = self._pairs[src, tag.channel] * ARRIVAL_WORDS + entry.word
            conditions.append(Condition(src, core.own.arrival, index, entry.value, exact=True, before=entry.before))
        if not conditions:
            return []
        place = where if where is not NOWHERE else partial(_where, tag, entries[0].nbytes)
        core.behind(stream, (core.stand(stream, conditions, (place,), "to send", about=tag),))
        found = []
        for src, entry in zip(srcs, entries, strict=True):
            self._inboxes[src, tag.channel].received.add(tag)
            ring = core.own.rings[self._pairs[src, tag.channel]]
            found.append(self._view(ring, src, tag.channel, entry.offset, entry.nbytes))
        return found

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool) -> None:
        core = self._core
        stream = core.enter(flush=False)
        words: list[Word] = []
        pair = self._pairs.get((core.rank, tag.channel), 0)
        received = 0
        for src in srcs:
            box = self._inboxes.get((src, tag.channel))
            if box is None or tag not in box.received:
                raise ValueError(f"release: no message {tag} of rank {src} is here (released twice, or not yet received)")
            box.received.discard(tag)
            entry = box.expected.pop(tag)
            received += entry.nbytes
            if entry.number != box.released + 1:
                box.release_early(entry.number, core.device.record(stream))
                continue
            credit, events = box.release(entry.number)
            for event in events:
                core.device.wait_event(stream, event)
            words.append(Word(core.blocks[src].credit, pair, credit))
        count_message(core.probe.counters, tag.channel, received, sent=False)
        if words:
            core.hold(stream, words, more=more)

    def memory(self) -> list[torch.Tensor]:
        """What sums read, and what leaves for others."""
        core = self._core
        inboxes = [core.own.rings[pair_of(peer, channel)] for peer in core.peers for channel in CHANNELS]
        return inboxes + list(self._staging.values())

    def forget(self) -> None:
        """Let go of all memory."""
        self._staging.clear()
        self._views.clear()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _view(self, ring: torch.Tensor, peer: int, channel: int, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a ring: places come again, and making a view takes longer than looking for it."""
        view = self._views.get((peer, channel, offset, nbytes))
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[peer, channel, offset, nbytes] = ring.narrow(0, offset, nbytes)
        return view

    def _refuse_tag(self, tag: Tag) -> NoReturn:
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT:
            raise ValueError(f"{tag}: keys, epochs and tags must be integers in 0 .. 2**31-1")
        raise ValueError(f"{tag}: transport {self._core.name} has rings for the channels {CHANNELS}")


def _where(tag: Tag, nbytes: int) -> Where:
    return Where(f"(message {tag})", tag.seq, str(tag.part), nbytes)
