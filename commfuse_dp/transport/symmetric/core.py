"""What windows and messages of transport `symmetric` share: the device, the peers' memory, notices held back, the watchdog."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter

import torch

from commfuse_dp.device.base import Batch, Device, Event, Stream
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_GRAD, CHANNEL_PARAM, ExchangeFn
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.streams.core import StreamCore
from commfuse_dp.transport.symmetric.memory import SymmetricMemory
from commfuse_dp.transport.symmetric.ring import ARRIVAL_WORDS
from commfuse_dp.transport.symmetric.watch import Awaited, Place, Wait, WordWatch

CHANNELS = (CHANNEL_PARAM, CHANNEL_GRAD, CHANNEL_COLLECTIVE)  # each has rings of its own


class Layout:
    """Where things lie in the block of every rank. Offsets in bytes; all ranks alike. calls: bytes of a ring for messages of
    calls, where they are others than inbox_bytes."""

    def __init__(self, world_size: int, inbox_bytes: int, calls: int | None = None) -> None:
        self.world_size = world_size
        self.capacity = {channel: align(inbox_bytes) for channel in CHANNELS}  # of a ring
        if calls is not None:
            self.capacity[CHANNEL_COLLECTIVE] = align(calls)
        self.pairs = world_size * len(CHANNELS)
        self.credit = align(4 * world_size)  # behind finished[rank]
        self.arrival = self.credit + align(4 * self.pairs)
        first = self.arrival + align(4 * self.pairs * ARRIVAL_WORDS)
        # Of each pair, where its ring begins; and where the last one ends.
        self.rings = list(accumulate([*self.capacity.values()] * world_size, initial=first))
        self.nbytes = self.rings[-1]


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
        self.rings = [block.narrow(0, start, stop - start) for start, stop in pairwise(layout.rings)]


class Core(StreamCore):
    """State of one rank that both halves use."""

    no_graph = "the values that its streams wait for change from step to step"
    watch: WordWatch

    def __init__(
        self,
        rank: int,
        membership: Membership,
        world_size: int,
        exchange: ExchangeFn,
        *,
        name: str,
        device: Device,
        memory: SymmetricMemory,
        layout: Layout,
        blocks: list[torch.Tensor],
        watch: WordWatch,
        probe: Probe,
    ) -> None:
        super().__init__(rank, membership, world_size, name=name, device=device, probe=probe)
        self.exchange, self.memory, self.watch = exchange, memory, watch
        self.take(blocks, layout)
        self._batch: tuple[Stream | None, Batch | None] = None, None  # of the stream that waited last

    def take(self, blocks: Sequence[torch.Tensor], layout: Layout) -> None:
        """Memory of all ranks, whose words are 0."""
        self.blocks = [Block(block, layout) for block in blocks]
        self.own = self.blocks[self.rank]  # of this rank

    # ---- waiting for words -------------------------------------------------------------------------------------------
    def wait_for(
        self, stream: Stream, conditions: Sequence[Awaited], places: Sequence[Place], doing: str, *, about: object = None
    ) -> None:
        """The stream waits for words, all of them exactly or none, and the watchdog looks after it."""
        wait = Wait(conditions, places, doing, about)
        self.watch.note(stream, wait)
        if conditions:
            known, batch = self._batch
            if batch is None or known is not stream:
                batch = self.device.batch(stream)
                self._batch = stream, batch
            try:
                batch.wait_all(list(map(_word_of, conditions)), exact=conditions[0][4])
            finally:
                batch.submit()
        self.behind(stream, wait)

    def behind(self, stream: Stream, wait: Wait | None = None) -> Event:
        """The event behind all that is in the stream now, which ends the wait."""
        event = self.device.record(stream, timing=self.probe.timing is not None)  # as `record`
        if wait is not None:
            wait.end = event
        if self.closed or self.watch.failure is not None:
            self.check()  # on a device whose calls wait, the wait may just have ended badly
        return event


_word_of = itemgetter(1, 2, 3)  # of a condition
