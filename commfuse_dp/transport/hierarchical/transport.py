"""Transport `hierarchical`: one transport inside every host, another one between hosts, and few bytes on the latter.

    published by rank 5 (host 1)      --outer, once-->  segment of rank 1, its gateway on host 0  --inner-->  ranks 0, 2, 3
    messages inside a host: inner; to other hosts: outer (engine/routes/ adds gradients up before they cross)

The order is program/hosts.py's; who passes on which shard: relays.py. A shard crosses to a host once per step, where each of
the L ranks there would fetch it once per forward and once per backward: 2 L times fewer bytes. The price is memory: what a host
needs of all others stays there until the next step, (H - 1) / N of the model in the compute dtype per rank, as with the
secondary shards of ZeRO++ (hpZ, arXiv 2306.10209).

[Note: Relays run by themselves]
`publish` asks the rail for its shards, and the outer transport's I/O thread publishes what has come: no rank's compute waits
between a shard's arrival and its readers. That thread holds the outer lock while it takes the inner one; nothing takes them the
other way round. Inner channels let another thread post (parts.py); the user's thread, which may sleep in the inner channel, is
woken for news of the outer one (`on_news`, `wake`).

[Note: Epochs of a relay]
A relay's segment is written after `wait_finished(epoch - 1)`, like any: its readers are the host's ranks, which have finished
then. It is complete before the next epoch is asked for (`wait_finished` waits for it), and `finish` reaches the rail only when
it is: a rail peer that rewrites its segment knows that this host has what it needs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.errors import Where
from commfuse_dp.probe import Counters, Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.base import NOWHERE, WHOLE, Outcome, PullRequest, Sending, Tag, Transfer, Transport
from commfuse_dp.transport.hierarchical.recovery import BothRounds
from commfuse_dp.transport.hierarchical.relays import Relays
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport, wait_for_readers
from commfuse_dp.transport.waiting import wait_until


class HierarchicalTransport(Transport):
    """See the module.

    Args:
        inner: connects the ranks of this one's host (`members`); ranks keep their numbers.
        outer: connects all ranks; fetches over a wire, by a thread of its own. Its probe counts what crosses hosts.
        Both are owned from now on.
    """

    name = "hierarchical"

    def __init__(self, hosts: Hosts, inner: OneSidedTransport, outer: OneSidedTransport, *, probe: Probe) -> None:
        limit = min(inner.message_limit, outer.message_limit)
        super().__init__(inner.rank, inner.world_size, message_limit=limit, deadline_s=inner.deadline_s, probe=probe)
        self.hosts: Hosts = hosts
        self.in_place = inner.in_place  # type: ignore[misc]
        self._inner = inner
        self._outer = outer
        self._siblings = frozenset(hosts.siblings(self.rank))
        self._relays = Relays(hosts, self.rank)
        self._inside: dict[PullRequest, PullRequest] = {}  # a pull in place -> the same inside the host
        self._relaying = 0  # shards asked for and not yet here
        self._finish_later = 0  # epoch that the rail is told of when they are
        self._outcome = WHOLE  # of that epoch
        self._lock = threading.Lock()  # of these two
        self._closed = False
        self.recovery = BothRounds(self, inner, outer, self._siblings)
        outer.on_news = inner.wake
        probe.across = outer.probe.counters

    @property
    def across(self) -> Counters:
        """What crossed hosts, to and from this rank (`probe.across`)."""
        return self._outer.probe.counters

    def _side(self, peer: int) -> OneSidedTransport:
        return self._inner if peer in self._siblings else self._outer

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._inner.expose(self._relays.sizes(sizes))
        self._outer.expose(sizes)
        self.sizes = [tuple(row) for row in sizes]
        self.segments = [self._inner.segments[self._relays.key(key)] for key in range(len(sizes))]

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        inner, outer = self._inner, self._outer
        inner.publish([self._relays.key(key) for key in keys], epoch)
        for key in keys:
            outer.segments[key].copy_(self.segments[key])
        outer.publish(keys, epoch)
        assert self.sizes is not None
        for key, (distance, owner) in itertools.product(keys, self._relays.rail):
            relay = self._relays.key(key, distance)
            if not self.sizes[key][owner]:
                inner.publish((relay,), epoch)
                continue
            with self._lock:
                self._relaying += 1
            outer.fetch(owner, key, epoch, inner.segments[relay], then=partial(self._relayed, relay, epoch))

    def _relayed(self, relay: int, epoch: int) -> None:
        """In the outer transport's thread: a shard is here."""
        if self._closed or self._inner.closed:  # at the end of a program without close(), they end in any order
            return
        self._inner.publish((relay,), epoch)
        with self._lock:
            self._relaying -= 1
            finish = self._finish_later if not self._relaying else 0
            if finish:
                self._finish_later = 0
        if finish:
            self._outer.finish(finish, self._outcome)
        self._inner.wake()

    def _all_relayed(self) -> bool:
        return not self._finish_later

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        return self._inner.pull(epoch, [self._at(request) for request in requests])

    def _at(self, request: PullRequest) -> PullRequest:
        found = self._inside.get(request) if request.out is None else None
        if found is None:
            source, key = self._relays.at(request.owner, request.key)
            found = request._replace(owner=source, key=key)
            if request.out is None:
                self._inside[request] = found
        return found

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._inner.finish(epoch, outcome)
        with self._lock:
            self._outcome = outcome
            if self._relaying:
                self._finish_later = epoch
                return
        self._outer.finish(epoch, outcome)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        if epoch <= 0:
            return
        wait_for_readers(self, (self._inner, self._outer), epoch, where, meanwhile)
        # Here, not in `publish`: an exception in a wait is planned for between two steps, not while one begins.
        if self._finish_later:
            wait_until(self, self._all_relayed, peer=-1, where=where, doing="shards of other hosts, of the step before")

    # ---- messages ----------------------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for dst, nbytes in zip(dsts, sizes, strict=True):
            buffers = self._side(dst).reserve((dst,), (nbytes,))
            if not buffers:
                break
            found += buffers
        return found

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        for sending in sendings:
            self._side(sending.dst).send((sending,), more=more)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for src in srcs:
            side = self._side(src)
            here = side.receive((src,), tag, wait=False)
            if not here:
                if not wait:
                    return []
                # By this one, not by a side: a wait on one level must hear of a loss on the other.
                wait_until(self, partial(side.has, src, tag), peer=src, where=where, doing=f"to send {tag}")
                here = side.receive((src,), tag, where)
            found += here
        return found

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        for src in srcs:
            self._side(src).release((src,), tag, more=more)

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._outer.progress()
        seen = self._inner.activity + self._outer.activity
        if seen != self.activity:  # taken in since the last call, by whomever: the caller should look before it sleeps
            timeout_s = 0.0
        self._inner.progress(timeout_s)
        self.activity = self._inner.activity + self._outer.activity

    def close(self, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        if reason:  # both are told before either waits for its peers
            self._inner.abort(reason)
            self._outer.abort(reason)
        try:
            self._outer.close()  # serves the rail until it has what it wants
        finally:
            self._inner.close()
