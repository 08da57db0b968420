"""What crosses hosts in streams: grouped exchanges (NCCL) between the ranks of a rail, those at one place on all hosts.

**Not yet run on a GPU**; its order is proved over a simulated device. Who stands for whom: program/hosts.py.

[Note: Timelines] (|: a wait; rail = the ranks at this one's place on other hosts)

  parameters, one epoch
    current  |wait_finished(e-1)   copy shards -> segment   write published[own] (inside the host)
    relay        |event of current   { segment -> rail, rail -> relay segment }   write published[relay] (inside the host) ...
    gather (of all ranks of the host)                                  |published[relay]  copy relay segment -> buffer
  So: a relay segment is written when the host's ranks have finished the epoch before, and read when the exchange is through.
  `wait_finished` waits for the stream "relay", too: what was exchanged has left the segment before it is packed anew.

  gradients, one unit (engine/routes/stream.py)
    reduce   |partials of the host   sums, for every host
    across       |event of reduce   { sum -> rail, rail -> landing }   (event)
    reduce                                                            |event   sum over hosts
  So: sums and landings come from the engine's pool and go back to it behind the last sum.

[Note: One order of exchanges]
Relays go in the order of publication, one exchange per key and distance in hosts; sums in the order of units. Both are the same
on all ranks of a program, so exchanges meet: see [Note: Order, and why nothing can wait for ever] in grouped/exchange.py.

[Note: Kernels that wait]
A kernel may wait inside itself for a slice whose relay is an exchange that needs multiprocessors (NCCL's kernels do): if
waiting kernels held all of them, both would wait for ever. So pulls have no arrival words here: `inner` must be opened with
kernels_may_wait=False, and the stream waits before the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from commfuse_dp.device.base import Device, Event, Stream
from commfuse_dp.errors import Where
from commfuse_dp.probe import Counters, Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.base import (
    CHANNEL_GRAD,
    CHANNEL_PARAM,
    GRAD_LANE,
    NOWHERE,
    PARAM_LANE,
    WHOLE,
    Outcome,
    Transport,
)
from commfuse_dp.transport.checks import count_message
from commfuse_dp.transport.closing import CLOSE_S, never_free
from commfuse_dp.transport.grouped.core import Core
from commfuse_dp.transport.grouped.exchange import GroupedExchange


class Rail:
    """The outer side of a hierarchical transport, of which it has the part of the interface that is called.

    Args:
        rank: of this process among all ranks of `hosts`.
        grouped: between the ranks of the rail, numbered by hosts. Owned from now on.
    """

    lockstep = True
    message_limit = sys.maxsize  # messages do not cross
    activity = 0
    whole: Transport  # that it is a part of
    counters: Counters  # of what crosses hosts
    segments: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        grouped: GroupedExchange,
        device: Device,
        *,
        deadline_s: float,
        probe: Probe,
    ) -> None:
        self._device, self._deadline_s = device, deadline_s
        self._ranks, self._hosts = hosts.rail(rank), hosts
        name = f"hierarchical, between the hosts of ranks {', '.join(map(str, grouped.numbers or self._ranks))}"
        self._core = Core(grouped, device, name=name, deadline_s=deadline_s, probe=probe)
        self._core.layers = lambda: self.whole.layers
        self._relay, self._across = device.side_stream("relay"), device.side_stream("across")

    # ---- shards ------------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        """Own shards leave from where they are published inside the host."""
        self.segments = self.whole.segments

    def publish(self, keys: Sequence[int], epoch: int) -> None:
        """The segments, packed in the current stream, may leave."""
        self._behind(self._relay)

    def fetch(self, owner: int, key: int, epoch: int, out: torch.Tensor, *, then: Callable[[], None]) -> None:
        """Exchange a shard with the rail. then: called with the stream that waits for it."""
        taker = self._core.mirror(self._hosts.place(owner)[0])
        where = self.whole.describe(owner, key, epoch, 0, out.numel())
        self._trade(self._relay, PARAM_LANE, taker, self.segments[key], out, where, (key, epoch))
        with self._device.on(self._relay):
            then()

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._core.tell(epoch)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        if epoch > 0:
            self._device.wait_event(self._device.current_stream(), self._device.record(self._relay))

    # ---- sums of gradients -------------------------------------------------------------------------------------------
    def cross(self, where: Where, sums: dict[int, torch.Tensor], landings: dict[int, torch.Tensor]) -> Event:
        """Give the ranks of the rail this host's sums, and take theirs, behind what is in the current stream.

        sums, landings: by rank of the rail, contiguous; all ranks of the rail call alike. Nothing of it may be touched before
        the event that is returned, which is behind the last exchange.
        """
        self.progress()
        self._behind(self._across)
        core, ranks, layers = self._core, self._ranks, self.whole.layers
        key = layers.index(where.layer) if where.layer in layers else -1
        event = self._device.record(self._across)
        for taker in core.peers:
            give, take = sums[ranks[taker]], landings[ranks[core.mirror(taker)]]
            event = self._trade(self._across, GRAD_LANE, taker, give, take, where, (key, where.step))
        return event

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self) -> None:
        """Raises what has failed between hosts."""
        self._core.check()

    def abort(self, reason: str) -> None:
        """Other hosts find out by their control connections."""

    def close(self) -> None:
        core = self._core
        if not core.leave():
            return
        patience_s = self._deadline_s if core.watch.failure is None else CLOSE_S
        idle = False
        try:
            idle = core.end((self._relay, self._across), patience_s)
        finally:
            if not idle:
                never_free(self.whole, "an exchange between hosts did not end", self.whole)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _behind(self, stream: Stream) -> None:
        """What is given to it from now on runs behind what is in the current stream."""
        self._device.wait_event(stream, self._device.record(self._device.current_stream()))

    def _trade(
        self,
        stream: Stream,
        lane: int,
        taker: int,
        give: torch.Tensor,
        take: torch.Tensor,
        where: Where,
        name: tuple[int, int],
    ) -> Event:
        """Give to one rank of the rail, which are numbered by hosts, and take from the one that mirrors it."""
        parts = (taker, give), (self._core.mirror(taker), take)
        event, _ = self._core.trade(stream, lane, *parts, where, name, name)
        channel = CHANNEL_PARAM if lane == PARAM_LANE else CHANNEL_GRAD
        count_message(self.counters, channel, give.nbytes, sent=True)
        count_message(self.counters, channel, take.nbytes, sent=False)
        return event
