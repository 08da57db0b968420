"""Messages of transport `symmetric`: from a staging ring into the owner's inbox ring. Timelines: see symmetric.py."""

from __future__ import annotations

from functools import partial

import torch

from commfuse_dp.device.base import Word
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import SEND
from commfuse_dp.transport.accounts import count_message
from commfuse_dp.transport.base import NOWHERE, Tag
from commfuse_dp.transport.symmetric_core import CHANNELS, Core, Layout, pair_of
from commfuse_dp.transport.symmetric_ring import ARRIVAL_WORDS, Inbox, Outbox, StagingRing
from commfuse_dp.transport.symmetric_watch import Condition

_FIELD_LIMIT = 1 << 31


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
        self._inboxes = {(peer, channel): Inbox(layout.ring) for peer in core.peers for channel in CHANNELS}

    # ---- sending -----------------------------------------------------------------------------------------------------
    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor:
        core = self._core
        stream = core.enter()
        core.check_peer(dst)
        if not 0 <= nbytes <= self.limit:
            raise ValueError(
                f"a message of {nbytes} bytes to rank {dst}: 0 .. {self.limit} fit; "
                "send smaller slices (more slices_per_rank) or raise inbox_bytes"
            )
        reservation, behind = self._reserved[dst].reserve(nbytes)
        if behind is not None:
            if core.probe.timing is not None:
                core.probe.stood(core.probe.timing.layer, core.probe.mark(), (behind,))
            core.device.wait_event(stream, behind)
        return self._staging[dst].narrow(0, reservation.offset, nbytes)

    def send(self, dst: int, tag: Tag, buffer: torch.Tensor, when: Word | None) -> None:
        core = self._core
        stream = core.enter()
        core.check_peer(dst)
        self._check_tag(tag)
        staging, nbytes = self._staging[dst], buffer.nbytes
        # An empty tensor has no address.
        offset = buffer.data_ptr() - staging.data_ptr() if nbytes else int(buffer.storage_offset()) * buffer.element_size()
        reservation = self._reserved[dst].find(offset, nbytes)
        if reservation is None:
            raise ValueError(
                f"send to rank {dst}, {tag}: the buffer was not reserved by try_reserve({dst}, ...), or was sent before"
            )
        device, scatter, box = core.device, self._scatter, self._outboxes[dst, tag.channel]
        if when is not None:
            device.wait_value(scatter, when.pad, when.place, when.value)
        else:
            device.wait_event(scatter, device.record(stream))
        number, place, behind = box.places.place(nbytes)
        word, value, _ = box.fingerprints.next(number, tag, nbytes)
        wait = None
        if behind > box.credited:
            box.credited = behind
            credit = Condition(dst, core.own.credit, pair_of(dst, tag.channel), behind)
            wait = core.stand(
                scatter, (credit,), (partial(_where, tag, nbytes),), "to read earlier messages, which fill its inbox"
            )
        remote, pair = core.blocks[dst], pair_of(core.rank, tag.channel)
        timing = core.probe.timing if core.probe.sink is not None else None
        begun = timing.mark(scatter) if timing is not None else None
        device.copy(remote.rings[pair].narrow(0, place, nbytes), staging.narrow(0, offset, nbytes), scatter)
        left = core.behind(scatter, (wait,)) if wait is not None else core.record(scatter)
        if timing is not None and begun is not None:
            about: dict[str, object] = {"nbytes": nbytes, "peer": dst, "key": tag.key, "seq": tag.seq, "part": tag.part}
            timing.span(SEND, "message", begun, left, about)
        device.write_value(scatter, remote.arrival, pair * ARRIVAL_WORDS + word, value)
        self._reserved[dst].sent(reservation, left)
        count_message(core.probe.counters, tag.channel, nbytes, sent=True)

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, src: int, tag: Tag, nbytes: int) -> None:
        core = self._core
        core.check_peer(src)
        self._check_tag(tag)
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

    def receive(self, src: int, tag: Tag, where: Where) -> torch.Tensor:
        core = self._core
        stream = core.enter()
        core.check_peer(src)
        self._check_tag(tag)
        entry = self._inboxes[src, tag.channel].expected.get(tag)
        if entry is None:
            raise ValueError(
                f"receive: {tag} of rank {src} was not announced by expect({src}, ...), in the order in which rank {src} "
                f"sends: transport {core.name} finds messages by it"
            )
        pair = pair_of(src, tag.channel)
        index = pair * ARRIVAL_WORDS + entry.word
        condition = Condition(src, core.own.arrival, index, entry.value, exact=True, before=entry.before)
        place = where if where is not NOWHERE else partial(_where, tag, entry.nbytes)
        core.behind(stream, (core.stand(stream, (condition,), (place,), "to send", about=tag),))
        self._inboxes[src, tag.channel].received.add(tag)
        return core.own.rings[pair].narrow(0, entry.offset, entry.nbytes)

    def release(self, src: int, tag: Tag, *, more: bool) -> None:
        core = self._core
        stream = core.enter(flush=False)
        box = self._inboxes.get((src, tag.channel))
        if box is None or tag not in box.received:
            raise ValueError(f"release: no message {tag} of rank {src} is here (released twice, or not yet received)")
        box.received.discard(tag)
        entry = box.expected.pop(tag)
        count_message(core.probe.counters, tag.channel, entry.nbytes, sent=False)
        if not box.is_next(entry.number):
            box.release_early(entry.number, core.device.record(stream))
            return
        credit, events = box.release(entry.number)
        for event in events:
            core.device.wait_event(stream, event)
        word = Word(core.blocks[src].credit, pair_of(core.rank, tag.channel), credit)
        core.hold(stream, [word], more=more)

    def forget(self) -> None:
        """Let go of all memory."""
        self._staging.clear()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _check_tag(self, tag: Tag) -> None:
        if min(tag) < 0 or max(tag) >= _FIELD_LIMIT:
            raise ValueError(f"{tag}: keys, epochs and tags must be integers in 0 .. 2**31-1")
        if tag.channel not in CHANNELS:
            raise ValueError(f"{tag}: transport {self._core.name} has rings for the channels {CHANNELS}")


def _where(tag: Tag, nbytes: int) -> Where:
    return Where(f"(message {tag})", tag.seq, str(tag.part), nbytes)
