"""Transport `hierarchical` on GPUs: `symmetric` inside every host, grouped exchanges (NCCL) between hosts, all in streams.

**Not yet run on a GPU**; its order is proved over a simulated device. Who stands for whom: program/hosts.py; the same idea on
CPUs, with threads in place of streams: transport.py.

[Note: Timelines] (| stands for a wait; rail = the ranks at this one's place on other hosts)

  parameters, one epoch
    current  |wait_finished(e-1)   copy shards -> segment   write published[own] (inside the host)
    relay        |event of current   { segment -> rail, rail -> relay segment }   write published[relay] (inside the host) ...
    gather (of all ranks of the host)                                  |published[relay]  copy relay segment -> buffer
  So: a relay segment is written when the host's ranks have finished the epoch before, and read when the exchange is through.
  `wait_finished` stands behind the stream "relay", too: what was exchanged has left the segment before it is packed anew.

  gradients, one unit (engine/routes/stream_two_level.py)
    reduce   |partials of the host   sums, for every host
    across       |event of reduce   { sum -> rail, rail -> landing }   (event)
    reduce                                                            |event   sum over hosts
  So: sums and landings come from the engine's pool and go back to it behind the last sum.

[Note: One order of exchanges]
Relays go in the order of publication, one exchange per key and distance in hosts; sums in the order of units. Both are the same
on all ranks of a program, so exchanges meet: see [Note: Order, and why nothing can stand for ever] in grouped/exchange.py.

[Note: Kernels that wait]
A kernel may wait inside itself for a slice whose relay is an exchange that needs multiprocessors (NCCL's kernels do): if
waiting kernels held all of them, both would stand for ever. So pulls have no arrival words here: `inner` must be opened with
kernels_may_wait=False, and the stream waits before the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from commfuse_dp.device.base import Device, Event, Word
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
    Tag,
    Transfer,
    Transport,
)
from commfuse_dp.transport.closing import CLOSE_S, close_at_exit
from commfuse_dp.transport.grouped.core import Core
from commfuse_dp.transport.grouped.exchange import GroupedExchange
from commfuse_dp.transport.grouped.watch import Ballot
from commfuse_dp.transport.hierarchical.transport import AcrossProbe, inside_sizes, relay_key
from commfuse_dp.transport.symmetric.transport import SymmetricTransport

_log = logging.getLogger("commfuse_dp")
_never_freed: list[object] = []  # buffers under exchanges that did not end


class StreamHierarchicalTransport(Transport):
    """See the module.

    Args:
        rank: of this process among all ranks of `hosts`.
        inner: between the ranks of this host, numbered by their places in it, without kernels that wait.
        grouped: between the ranks of this one's rail, numbered by hosts. Both are owned from now on.
        ballot: how the ranks of the rail compare what they do; None: not at all.
    """

    name: ClassVar[str] = "hierarchical"
    in_place: ClassVar[bool] = False
    stream_ordered: ClassVar[bool] = True
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
        super().__init__(rank, hosts.world_size, deadline_s=inner.deadline_s, probe=probe)
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
        # owner -> (place of who has its shard on this host, hosts to go to it)
        self._parts: dict[int, tuple[tuple[Part, ...], tuple[Part, ...]]] = {}  # of a pull -> the same inside the host
        self._source = [(hosts.place(owner)[1], hosts.distance(rank, owner)) for owner in range(self.world_size)]
        self._relay = inner.device.side_stream("relay")
        self._across = inner.device.side_stream("across")
        self._sizes: list[tuple[int, ...]] = []
        self._due: list[tuple[int, int]] = []  # (key, epoch) published, and not relayed yet
        self._describe: Callable[[int, int, int, int, int], Where] = _where
        self._pid = os.getpid()
        close_at_exit(self)

    @property
    def across(self) -> Counters:
        """What crossed hosts, to and from this rank (`probe.across`)."""
        return self._rail.probe.counters

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        inside = inside_sizes(self.hosts, sizes)
        self._inner.expose([[row[member] for member in self._places] for row in inside])
        self._sizes = [tuple(row) for row in sizes]

    def segment(self, key: int) -> torch.Tensor:
        return self._inner.segment(relay_key(self.hosts, key, 0))

    def publish(self, key: int, epoch: int, *, more: bool = False) -> None:
        self._check()
        self._inner.publish(relay_key(self.hosts, key, 0), epoch, more=more)
        self._due.append((key, epoch))
        if not more:
            self._relay_due()

    def push(self) -> None:
        self._inner.push()
        self._relay_due()

    def _relay_due(self) -> None:
        """Exchange with the rail what was published, and publish inside the host what came."""
        if not self._due:
            return
        due, self._due = self._due, []
        device, relay, inner = self.device, self._relay, self._inner
        device.wait_event(relay, device.record(device.current_stream()))
        count, counters = len(self.hosts.members), self.across
        rail = self.hosts.rail(self.rank)
        for key, epoch in due:
            own = self.segment(key)
            for ahead in range(1, count):
                taker, giver = (self._host - ahead) % count, (self._host + ahead) % count
                into = inner.segment(relay_key(self.hosts, key, ahead))
                where = self._describe(rail[giver], key, epoch, 0, into.numel())
                self._rail.trade(
                    relay,
                    PARAM_LANE,
                    (taker, own),
                    (giver, into),
                    where,
                    given=(key, epoch, own.numel()),
                    taken=(key, epoch, into.numel()),
                )
                counters.param_bytes_sent += own.numel()
                counters.param_bytes_received += into.numel()
                with device.on(relay):
                    inner.publish(relay_key(self.hosts, key, ahead), epoch, more=True)
        with device.on(relay):
            inner.push()

    def pull(
        self,
        owner: int,
        key: int,
        epoch: int,
        *,
        start: int = 0,
        nbytes: int | None = None,
        out: torch.Tensor | None = None,
        after: Event | None = None,
    ) -> Transfer:
        self._check()
        place, distance = self._source[owner]
        return self._inner.pull(
            place, relay_key(self.hosts, key, distance), epoch, start=start, nbytes=nbytes, out=out, after=after
        )

    def pull_all(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        self._check()
        return self._inner.pull_all(epoch, [self._inside(request) for request in requests])

    def _inside(self, request: PullRequest) -> PullRequest:
        """The pull inside the host: of what this host's ranks have published of their own, and passed on."""
        others = self._parts.get(id(request.others))
        if others is None or others[0] is not request.others:
            parts = tuple(part._replace(owner=owner, key=key) for part in request.others for owner, key in [self._at(part)])
            others = self._parts[id(request.others)] = request.others, parts
        owner, key = self._at(request)
        return request._replace(owner=owner, key=key, others=others[1])

    def _at(self, wanted: PullRequest | Part) -> tuple[int, int]:
        owner, distance = self._source[wanted.owner]
        return owner, relay_key(self.hosts, wanted.key, distance)

    def describe_pulls(self, describe: Callable[[int, int, int, int, int], Where]) -> None:
        self._describe = describe
        members = self.hosts.members

        def inside(place: int, relayed: int, epoch: int, start: int, nbytes: int) -> Where:
            key, distance = divmod(relayed, len(members))
            return describe(members[(self._host + distance) % len(members)][place], key, epoch, start, nbytes)

        self._inner.describe_pulls(inside)

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._inner.finish(epoch)
        self._rail.tell(epoch)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        self._check()
        self._inner.wait_finished(epoch, where)
        if epoch > 0:
            self.device.wait_event(self.device.current_stream(), self.device.record(self._relay))

    # ---- messages inside the host ------------------------------------------------------------------------------------
    def box_of(self, owner: int) -> int:
        return self.hosts.gateway(self.rank, owner)

    @property
    def message_limit(self) -> int:
        return self._inner.message_limit

    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor:
        """Never None. What one unit owes to one gateway must fit into inbox_bytes."""
        return self._inner.try_reserve(self._place_of(dst), nbytes)

    def send(self, dst: int, tag: Tag, buffer: torch.Tensor, *, when: Word | None = None, more: bool = False) -> None:
        self._inner.send(self._place_of(dst), tag, buffer, when=when)

    def expect(self, src: int, tag: Tag, nbytes: int) -> None:
        self._inner.expect(self._place_of(src), tag, nbytes)

    def arrived(self, src: int, tag: Tag) -> bool:
        return self._inner.arrived(self._place_of(src), tag)

    def receive(self, src: int, tag: Tag, where: Where = NOWHERE) -> torch.Tensor:
        return self._inner.receive(self._place_of(src), tag, where)

    def release(self, src: int, tag: Tag, *, more: bool = False) -> None:
        self._inner.release(self._place_of(src), tag, more=more)

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

    def abort(self, reason: str) -> None:
        """Tell the ranks of this host that this rank has failed; other hosts find out by their control connections."""
        self._inner.abort(reason)

    def close(self) -> None:
        rail = self._rail
        if rail.closed:
            return
        rail.closed = True
        if os.getpid() == self._pid:  # a copy made by fork has no right to any of it
            idle = False
            try:
                patience_s = self.deadline_s if rail.watch.failure is None else CLOSE_S
                idle = rail.settle((self._relay, self._across), patience_s)
            finally:
                if not rail.watch.stop() or not idle:
                    rail.grouped.abort()  # communicators with something left open are not used again
                rail.grouped.close()
                if not idle:
                    _never_freed.append(self._inner)
                    _log.warning("rank %d: transport %s: an exchange between hosts did not end", self.rank, self.name)
        self._inner.close()

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


def _where(owner: int, key: int, epoch: int, start: int, nbytes: int) -> Where:
    return Where(f"(window {key})", epoch, f"shard of rank {owner}", nbytes)
