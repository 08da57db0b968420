"""Messages of the lockstep transport: out of a staging ring, into a ring of local memory. Timelines: see transport.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.device.base import Device, Event, WordLike
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.transport.base import CHANNEL_GRAD, GRAD_LANE, NOWHERE, ExchangeFn, Sending, Tag
from commfuse_dp.transport.checks import (
    NO_MEMORY,
    check_message,
    check_tag,
    count_message,
    expected_twice,
    not_here,
    not_reserved,
    raise_failures,
)
from commfuse_dp.transport.grouped.core import NOTHING, Core
from commfuse_dp.transport.grouped.watch import Step
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.streams.growth import GrowingRings
from commfuse_dp.transport.streams.staging import PlaceRing, Staging


class Landing:
    """A place for one message, whose exchange is enqueued."""

    __slots__ = ("behind", "data", "here", "number", "read", "released", "step")

    def __init__(self, data: torch.Tensor, number: int, behind: list[Event]) -> None:
        self.data = data
        self.number = number
        self.behind = behind  # what must be over before the message may be written
        self.here: Event  # behind this one it is here
        self.step: Step | None = None
        self.read = False
        self.released: Event | None = None  # behind this one nobody reads it; None: somebody may


class _Ring:
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.places = PlaceRing(data.numel())
        self.live: deque[Landing] = deque()


class Inboxes:
    """A ring for each peer and channel. first: memory of some of them; that of others is taken when needed. called: what a rank
    is called in errors."""

    def __init__(
        self, device: Device, capacity: int, first: dict[tuple[int, int], torch.Tensor], called: Callable[[int], int]
    ) -> None:
        self._device, self._capacity, self._called = device, capacity, called
        self._rings = {place: _Ring(data) for place, data in first.items()}

    def land(self, src: int, tag: Tag, nbytes: int) -> Landing:
        """The next place for a message of `src`. nbytes <= capacity.

        Raises TransportError if it is still held by messages that the host has not released: no stream can wait for that."""
        ring = self._rings.get((src, tag.channel))
        if ring is None:
            ring = self._rings[src, tag.channel] = self._new_ring()
        place = ring.places.place(nbytes)
        behind: list[Event] = []
        while ring.live and ring.live[0].number <= place.behind:
            earlier = ring.live.popleft()
            if earlier.released is None:
                raise TransportError(
                    f"{self._capacity} bytes are too few for what has come from rank {self._called(src)} and was not released: "
                    f"the place of {nbytes} bytes ({tag}) would overwrite {earlier.data.numel()} of them. Release before "
                    "sending more, or raise inbox_bytes."
                )
            behind.append(earlier.released)
        landing = Landing(ring.data.narrow(0, place.offset, nbytes), place.number, behind)
        ring.live.append(landing)
        return landing

    def clear(self) -> None:
        """Let go of all memory."""
        self._rings.clear()

    def _new_ring(self) -> _Ring:
        device = self._device
        with torch.inference_mode(False):
            data = torch.zeros(self._capacity, dtype=torch.uint8, device=device.torch_device)
        device.wait_event(device.side_stream("scatter"), device.record(device.current_stream()))
        return _Ring(data)


class Messages(GrowingRings):
    """What this rank sends and receives."""

    _core: Core

    def _open_messages(self, exchange: ExchangeFn, limit: int, channel: int = CHANNEL_GRAD) -> None:
        """Collective: raises TransportError on all ranks if memory is short. channel: whose inboxes are taken now."""
        core = self._core
        device, ring = core.device, align(limit)
        self._scatter = device.side_stream("scatter")
        rings: dict[int, list[torch.Tensor]] = {}  # of each peer: staging, inbox
        failure = None
        try:
            with torch.inference_mode(False):
                for peer in core.peers:
                    rings[peer] = [torch.zeros(ring, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
        except RuntimeError as error:  # what torch raises when an allocation fails
            failure = f"no memory on {device.torch_device} for inbox_bytes = {limit}, twice for each peer ({error})"
        raise_failures(exchange, exchange(failure), end=NO_MEMORY)
        self._staging = Staging(core, {peer: both[0] for peer, both in rings.items()}, limit)
        first = {(peer, channel): both[1] for peer, both in rings.items()}
        self._inboxes = Inboxes(device, ring, first, core.membership.called)
        # Announced, not yet paired with a send of ours: bytes. Steps that were broken off leave theirs.
        self._expected: dict[tuple[int, Tag], int] = {}
        self._landed: dict[tuple[int, Tag], Landing] = {}

    # ---- sending -----------------------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        """What one call reserves for one peer before it sends must fit into inbox_bytes."""
        return self._staging.reserve(dsts, sizes, room)

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        """`when`: written by kernels that are in the current stream already, once the buffers are complete."""
        for dst, tag, buffer, when, _ in sendings:
            self._send(dst, tag, buffer, when)

    def _send(self, dst: int, tag: Tag, buffer: torch.Tensor, when: Sequence[WordLike]) -> None:
        core = self._core
        stream = core.enter()
        core.check_peer(dst)
        check_tag(tag)
        device, scatter, nbytes = core.device, self._scatter, buffer.nbytes
        reservation = None
        if nbytes:
            staging, ring = self._staging.memory[dst], self._staging.rings.alone(dst)
            reservation = ring.find(buffer.data_ptr() - staging.data_ptr(), nbytes)
            if reservation is None:
                raise not_reserved(dst, tag)
            buffer = staging.narrow(0, reservation.offset, nbytes)
            for word in when:
                device.wait_value(scatter, *word)
            if not when:
                device.wait_event(scatter, device.record(stream))
        src = core.mirror(dst)
        coming = self._expected.pop((src, tag), None)
        landing = self._inboxes.land(src, tag, coming) if coming is not None else None
        for event in landing.behind if landing is not None else ():
            device.wait_event(scatter, event)
        into = landing.data if landing is not None else NOTHING
        layer = core.layer(tag.key, "") if tag.channel == CHANNEL_GRAD else ""
        where = Where(layer or f"(message {tag})", tag.seq, str(tag.part), max(nbytes, into.numel()))
        identity = (tag.key, tag.channel, tag.seq, tag.part)
        event, step = core.trade(scatter, GRAD_LANE, (dst, buffer), (src, into), where, identity, identity)
        if reservation is not None:
            ring.sent(reservation, event)
            count_message(core.probe.counters, tag.channel, nbytes, sent=True)
        if landing is not None:
            landing.here, landing.step = event, step
            self._landed[src, tag] = landing

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:
        """Before the send of the same tag to the peers that mirror `srcs`."""
        core = self._core
        core.check()
        check_tag(tag)
        for src in srcs:
            core.check_peer(src)
            check_message(nbytes, self.message_limit, f"from rank {src}")
            if (src, tag) in self._expected or (src, tag) in self._landed:
                raise expected_twice(core.membership, core.rank, src, tag)
            self._expected[src, tag] = nbytes

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        """wait False: [] unless the steps have been taken in which they come."""
        self._core.check()
        for src in srcs:
            self._core.check_peer(src)
        if not wait and any((src, tag) not in self._landed for src in srcs):
            return []
        return [self._receive(src, tag, where) for src in srcs]

    def _receive(self, src: int, tag: Tag, where: Where) -> torch.Tensor:
        core = self._core
        stream = core.enter()
        landing = self._landed.get((src, tag))
        if landing is None:
            raise ValueError(
                f"receive: {tag} of rank {src} comes in the step in which rank {core.rank} sends {tag} to rank "
                f"{core.mirror(src)}, which it has not done, or it was not announced by expect([{src}], ...) before"
            )
        if landing.step is not None and where is not NOWHERE:
            landing.step.where = where
        core.device.wait_event(stream, landing.here)
        core.check()  # on a device whose calls wait, the wait may just have ended badly
        landing.read = True
        return landing.data

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        core = self._core
        for src in srcs:
            stream = core.enter()
            landing = self._landed.get((src, tag))
            if landing is None or not landing.read:
                raise not_here(src, tag)
            del self._landed[src, tag]
            landing.released = core.device.record(stream)
            count_message(core.probe.counters, tag.channel, landing.data.numel(), sent=False)

    def _forget_messages(self) -> None:
        """Let go of all memory."""
        self._staging.clear()
        self._inboxes.clear()
        self._landed.clear()
