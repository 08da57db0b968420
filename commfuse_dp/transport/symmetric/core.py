"""What windows and messages of transport `symmetric` share: the device, the peers' memory, notices held back, the watchdog."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_dp.device.base import Batch, Device, Event, Stream, Word
from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_GRAD, CHANNEL_PARAM, ExchangeFn
from commfuse_dp.transport.checks import check_peer, is_closed
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.symmetric.memory import SymmetricMemory
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS
from commfuse_dp.transport.symmetric.watch import Condition, Place, Wait, Watchdog

CHANNELS = (CHANNEL_PARAM, CHANNEL_GRAD, CHANNEL_COLLECTIVE)  # each has rings of its own


class Layout:
    """Where things lie in the block of every rank. Offsets in bytes; all ranks alike."""

    def __init__(self, world_size: int, inbox_bytes: int) -> None:
        self.world_size = world_size
        self.ring = align(inbox_bytes)
        self.pairs = world_size * len(CHANNELS)
        self.credit = align(4 * world_size)  # behind finished[rank]
        self.arrival = self.credit + align(4 * self.pairs)
        self.rings = self.arrival + align(4 * self.pairs * ARRIVAL_WORDS)
        self.nbytes = self.rings + self.pairs * self.ring


def pair_of(peer: int, channel: int) -> int:
    """Index of what belongs to a peer and a channel. The channel must be one of CHANNELS."""
    return peer * len(CHANNELS) + CHANNELS.index(channel)


class Block:
    """Views of one rank's block, this rank's own or a peer's. Words are indexed by whom they concern:

    finished[reader]; credit[pair of the releasing owner]; arrival[pair of the sender, word]; rings[pair of the sender]
    """

    def __init__(self, block: torch.Tensor, layout: Layout) -> None:
        def words(start: int, count: int) -> torch.Tensor:
            return block.narrow(0, start, 4 * count).view(torch.int32)

        self.finished = words(0, layout.world_size)
        self.credit = words(layout.credit, layout.pairs)
        self.arrival = words(layout.arrival, layout.pairs * ARRIVAL_WORDS)
        self.rings = [block.narrow(0, layout.rings + i * layout.ring, layout.ring) for i in range(layout.pairs)]


class Core:
    """State of one rank that both halves use. Every call of the transport begins with `enter`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: ExchangeFn,
        *,
        name: str,
        device: Device,
        memory: SymmetricMemory,
        layout: Layout,
        blocks: list[torch.Tensor],
        watch: Watchdog,
        probe: Probe,
    ) -> None:
        self.rank, self.world_size, self.exchange, self.name = rank, world_size, exchange, name
        self.device, self.memory, self.watch, self.probe = device, memory, watch, probe
        self.peers = [(rank + step) % world_size for step in range(1, world_size)]  # not all ranks turn to rank 0 first
        self.blocks = [Block(block, layout) for block in blocks]
        self.own = self.blocks[rank]  # of this rank
        self.closed = False
        self._held: list[Word] = []
        self._held_on: Stream | None = None

    def check(self) -> None:
        if self.closed:
            raise is_closed(self.name, self.rank)
        if self.watch.failure is not None:
            raise self.watch.error()

    def enter(self, *, flush: bool = True) -> Stream:
        """Raises what is wrong; hands over what was held back for company. Returns the current stream."""
        self.check()
        if self.device.capturing():
            raise TransportError(
                f"transport {self.name} cannot be captured into a CUDA graph: the values that its streams wait for change from "
                "step to step. Capture without CommFuse's layers, or use them outside the graph."
            )
        if flush and self._held:
            self.flush()
        return self.device.current_stream()

    def check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            check_peer(peer, self.rank, self.peers, self.world_size)

    # ---- writing words -----------------------------------------------------------------------------------------------
    def hold(self, stream: Stream, words: list[Word], *, more: bool) -> None:
        """Write words behind what is in the stream now; `more`: or a little later."""
        if self._held and self._held_on != stream:
            self.flush()
        self._held += words
        self._held_on = stream
        if not more:
            self.flush()

    def flush(self) -> None:
        if self._held:
            assert self._held_on is not None
            self.device.write_values(self._held_on, self._held)
            self._held = []

    # ---- events ------------------------------------------------------------------------------------------------------
    def record(self, stream: Stream) -> Event:
        """Behind all that is in the stream now. Keeps the time while somebody watches."""
        return self.device.record(stream, timing=self.probe.timing is not None)

    # ---- waiting for words -------------------------------------------------------------------------------------------
    def wait_for(
        self,
        stream: Stream,
        conditions: Sequence[Condition],
        places: Sequence[Place],
        doing: str,
        *,
        about: object = None,
        batch: Batch | None = None,
    ) -> Wait:
        """The stream waits for words, all of them exactly or none, and the watchdog looks after it. `behind` ends the wait,
        once all that belongs to it is enqueued. batch: of the stream, if the caller has more to put into it."""
        wait = Wait(conditions, places, doing, about)
        self.watch.note(stream, wait)
        waits = self.device.batch(stream) if batch is None else batch
        if conditions:
            words = [Word(pad, place, value) for _, pad, place, value, _, _ in conditions]
            waits.wait_all(words, exact=conditions[0].exact)
        if batch is None:
            waits.submit()
        return wait

    def behind(self, stream: Stream, waits: Sequence[Wait]) -> Event:
        """The event that ends the waits: behind all that is in the stream now."""
        event = self.record(stream)
        for wait in waits:
            wait.event = event
        self.check()  # on a device whose calls wait, the wait may just have ended badly
        return event
