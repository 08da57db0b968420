"""Transport `hierarchical` on GPUs: `symmetric` inside every host, grouped exchanges (NCCL) between hosts, all in streams.

**Not yet run on a GPU**; its order is proved over a simulated device. Who stands for whom: program/hosts.py; the same idea on
CPUs, with threads in place of streams: transport.py.

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

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from commfuse_dp.device.base import Device, Event
from commfuse_dp.errors import CommFuseError, Where
from commfuse_dp.probe import Counters, Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.base import (
    GRAD_LANE,
    NOWHERE,
    PARAM_LANE,
    WHOLE,
    Outcome,
    Part,
    PullRequest,
    Sending,
    Tag,
    Transfer,
    Transport,
)
from commfuse_dp.transport.closing import CLOSE_S, close_at_exit, never_free
from commfuse_dp.transport.grouped.core import Core
from commfuse_dp.transport.grouped.exchange import GroupedExchange
from commfuse_dp.transport.grouped.watch import Ballot
from commfuse_dp.transport.hierarchical.across import AcrossProbe
from commfuse_dp.transport.hierarchical.relays import Relays
from commfuse_dp.transport.symmetric.transport import SymmetricTransport


class StreamHierarchicalTransport(Transport):
    """See the module.

    Args:
        rank: of this process among all ranks of `hosts`.
        inner: between the ranks of this host, numbered by their places in it, without kernels that wait.
        grouped: between the ranks of this one's rail, numbered by hosts. Both are owned from now on.
        ballot: how the ranks of the rail compare what they do; None: not at all.
    """

    name: ClassVar[str] = "hierarchical"
    device: Device
    hosts: Hosts

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        inner: SymmetricTransport,
        grouped: GroupedExchange,
        *,
        ballot: Ballot | None = None,
        probe: Probe,
    ) -> None:
        super().__init__(rank, hosts.world_size, message_limit=inner.message_limit, deadline_s=inner.deadline_s, probe=probe)
        self.device, self.hosts = inner.device, hosts
        self._inner = inner
        across = AcrossProbe(probe)
        probe.across = across.counters
        self._rail = Core(
            grouped,
            inner.device,
            name=f"{self.name}, between the hosts of ranks {', '.join(map(str, hosts.rail(rank)))}",
            deadline_s=inner.deadline_s,
            ballot=ballot,
            probe=across,
        )
        self._rail.layers = lambda: self.layers
        self._host = hosts.place(rank)[0]
        self._places = {member: place for place, member in enumerate(hosts.siblings(rank))}
        self._relays = Relays(hosts, rank)
        self._parts: dict[int, tuple[tuple[Part, ...], tuple[Part, ...]]] = {}  # of a pull -> the same inside the host
        self._relay = inner.device.side_stream("relay")
        self._across = inner.device.side_stream("across")
        inner.describe = self._describe
        self._pid = os.getpid()
        close_at_exit(self)

    @property
    def across(self) -> Counters:
        """What crossed hosts, to and from this rank (`probe.across`)."""
        return self._rail.probe.counters

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._inner.expose([[row[member] for member in self._places] for row in self._relays.sizes(sizes)])
        self.sizes = [tuple(row) for row in sizes]
        self.segments = [self._inner.segments[self._relays.key(key)] for key in range(len(sizes))]

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        self._check()
        self._inner.publish([self._relays.key(key) for key in keys], epoch)
        if keys:
            self._relay_all(keys, epoch)

    def _relay_all(self, keys: Sequence[int], epoch: int) -> None:
        """Exchange with the rail what was published, and publish inside the host what came."""
        device, relay, inner = self.device, self._relay, self._inner
        device.wait_event(relay, device.record(device.current_stream()))
        count, counters = len(self.hosts.members), self.across
        for key, (ahead, owner) in itertools.product(keys, self._relays.rail):
            own, into = self.segments[key], inner.segments[self._relays.key(key, ahead)]
            taker, giver = (self._host - ahead) % count, (self._host + ahead) % count
            self._rail.trade(
                relay,
                PARAM_LANE,
                (taker, own),
                (giver, into),
                self.describe(owner, key, epoch, 0, into.numel()),
                given=(key, epoch, own.numel()),
                taken=(key, epoch, into.numel()),
            )
            counters.param_bytes_sent += own.numel()
            counters.param_bytes_received += into.numel()
        with device.on(relay):
            inner.publish([self._relays.key(key, ahead) for key in keys for ahead, _ in self._relays.rail], epoch)

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        self._check()
        return self._inner.pull(epoch, [self._inside(request) for request in requests])

    def _inside(self, request: PullRequest) -> PullRequest:
        """The pull inside the host: of what this host's ranks have published of their own, and passed on."""
        others = self._parts.get(id(request.others))
        if others is None or others[0] is not request.others:
            parts = tuple(part._replace(owner=owner, key=key) for part in request.others for owner, key in [self._at(part)])
            others = self._parts[id(request.others)] = request.others, parts
        owner, key = self._at(request)
        return request._replace(owner=owner, key=key, others=others[1])

    def _at(self, wanted: PullRequest | Part) -> tuple[int, int]:
        source, key = self._relays.at(wanted.owner, wanted.key)
        return self._places[source], key

    def _describe(self, place: int, relayed: int, epoch: int, start: int, nbytes: int) -> Where:
        """What `inner` pulls."""
        members = self.hosts.members
        key, distance = divmod(relayed, len(members))
        return self.describe(members[(self._host + distance) % len(members)][place], key, epoch, start, nbytes)

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._inner.finish(epoch)
        self._rail.tell(epoch)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        self._check()
        self._inner.wait_finished(epoch, where)
        if epoch > 0:
            self.device.wait_event(self.device.current_stream(), self.device.record(self._relay))

    # ---- messages inside the host ------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        """What one unit owes to one gateway must fit into inbox_bytes."""
        return self._inner.reserve(list(map(self._place_of, dsts)), sizes, room)

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        self._inner.send([sending._replace(dst=self._place_of(sending.dst)) for sending in sendings])

    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:
        self._inner.expect(list(map(self._place_of, srcs)), tag, nbytes, room)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        return self._inner.receive(list(map(self._place_of, srcs)), tag, where, wait=wait)

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        self._inner.release(list(map(self._place_of, srcs)), tag, more=more)

    # ---- sums between hosts ------------------------------------------------------------------------------------------
    def cross(self, where: Where, sums: dict[int, torch.Tensor], landings: dict[int, torch.Tensor]) -> Event:
        """Give the ranks of the rail this host's sums, and take theirs, behind what is in the current stream.

        sums, landings: by rank of the rail, contiguous; all ranks of the rail call alike. Nothing of it may be touched before
        the event that is returned, which is behind the last exchange.
        """
        self._check()
        device, across = self.device, self._across
        device.wait_event(across, device.record(device.current_stream()))
        rail, counters = self.hosts.rail(self.rank), self.across
        key = self.layers.index(where.layer) if where.layer in self.layers else -1
        event = device.record(across)
        for ahead in range(1, len(rail)):
            taker, giver = (self._host + ahead) % len(rail), (self._host - ahead) % len(rail)
            give, take = sums[rail[taker]], landings[rail[giver]]
            event, _ = self._rail.trade(
                across,
                GRAD_LANE,
                (taker, give),
                (giver, take),
                where,
                given=(key, where.step, give.nbytes),
                taken=(key, where.step, take.nbytes),
            )
            counters.grad_bytes_sent += give.nbytes
            counters.grad_bytes_received += take.nbytes
        return event

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._check()
        self._inner.progress(timeout_s)

    def close(self, reason: str = "") -> None:
        """reason: other hosts find out by their control connections."""
        rail = self._rail
        if rail.closed:
            return
        rail.closed = True
        if os.getpid() == self._pid:  # a copy made by fork has no right to any of it
            patience_s = self.deadline_s if rail.watch.failure is None else CLOSE_S
            idle = False
            try:
                idle = rail.end((self._relay, self._across), patience_s)
            finally:
                if not idle:
                    never_free(self, "an exchange between hosts did not end", self._inner)
        self._inner.close(reason)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _check(self) -> None:
        try:
            self._rail.check()
        except CommFuseError as error:
            with contextlib.suppress(CommFuseError):
                self._inner.abort(str(error))
            raise

    def _place_of(self, peer: int) -> int:
        place = self._places.get(peer)
        if place is None:
            raise ValueError(
                f"rank {peer} is on another host than rank {self.rank}: messages go between ranks {sorted(self._places)} only; "
                "what is for other hosts is added up first and crosses by `cross`"
            )
        return place
