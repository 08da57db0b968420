"""Transport `hierarchical`: one transport inside every host, another one between hosts, and few bytes on the latter.

    published by rank 5 (host 1)      --outer, once-->  segment of rank 1, its gateway on host 0  --inner-->  ranks 0, 2, 3
    messages inside a host: inner; to other hosts: outer (engine/routes/ adds gradients up before they cross)

| | inner | outer | passes shards on | sums to other hosts |
| --- | --- | --- | --- | --- |
| on CPUs | shm | tcp | its I/O thread | messages |
| in streams | symmetric | grouped exchanges (rail.py) | a stream | exchanges of whole units (`Rail.cross`) |

The order is program/hosts.py's; who passes on which shard: relays.py. A shard crosses to a host once per step, where each of
the L ranks there would fetch it once per forward and once per backward: 2 L times fewer bytes. The price is memory: what a host
needs of all others stays there until the next step, (H - 1) / N of the model in the compute dtype per rank, as with the
secondary shards of ZeRO++ (hpZ, arXiv 2306.10209).

[Note: Relays run by themselves]
`publish` asks the rail for its shards, and what has come is published by a stream, or by the outer transport's I/O thread: no
rank's compute waits between a shard's arrival and its readers. That thread holds the outer lock while it takes the inner one;
nothing takes them the other way round. Inner channels let another thread post (parts.py); the user's thread, which may sleep in
the inner channel, is woken for news of the outer one (`on_news`, `wake`).

[Note: Epochs of a relay]
A relay's segment is written after `wait_finished(epoch - 1)`, like any: its readers are the host's ranks, which have finished
then. It is complete before the next epoch is asked for (`wait_finished` waits for it), and `finish` reaches the rail only when
it is: a rail peer that rewrites its segment knows that this host has what it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commfuse_dp.errors import CommFuseError, Where
from commfuse_dp.probe import Counters, Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.base import NOWHERE, WHOLE, Outcome, Part, PullRequest, Sending, Tag, Transfer, Transport
from commfuse_dp.transport.closing import close_at_exit, forget
from commfuse_dp.transport.hierarchical.rail import Rail
from commfuse_dp.transport.hierarchical.recovery import BothRounds
from commfuse_dp.transport.hierarchical.relays import Relays
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from commfuse_dp.transport.waiting import wait_until


class HierarchicalTransport(Transport):
    """See the module.

    Args:
        rank: of this process among all ranks of `hosts`.
        inner: connects the ranks of this one's host. One that blocks the CPU counts all ranks; one in streams counts those of
            the host alone, and its kernels do not wait ([Note: Kernels that wait] in rail.py).
        outer: connects all ranks, and fetches over a wire by a thread of its own; in streams: the rail. Both are owned
            from now on.
    """

    name = "hierarchical"
    hosts: Hosts
    rail: Rail | None  # what crosses hosts in streams

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        inner: OneSidedTransport | SymmetricTransport,
        outer: OneSidedTransport | Rail,
        *,
        probe: Probe,
    ) -> None:
        limit = min(inner.message_limit, outer.message_limit)
        super().__init__(rank, hosts.world_size, message_limit=limit, deadline_s=inner.deadline_s, probe=probe)
        self.hosts, self.device = hosts, inner.device
        self.in_place = inner.in_place  # type: ignore[misc]
        self._inner, self._outer = inner, outer
        self._relays = Relays(hosts, rank, hosts.siblings(rank) if self.device is not None else range(hosts.world_size))
        self._numbers = self._relays.numbers
        self._inside: dict[PullRequest, PullRequest] = {}  # a pull in place -> the same inside the host
        self._parts: dict[int, tuple[tuple[Part, ...], tuple[Part, ...]]] = {}  # of a pull -> the same inside the host
        self._relaying = 0  # shards asked for and not yet here
        self._finish_later = 0  # epoch that the rail is told of when they are
        self._outcome = WHOLE  # of that epoch
        self._lock = threading.Lock()  # of these two
        self._closed = False
        self.rail = None
        outer.whole = self
        self.membership.hear_lost += [side.membership.tell_lost for side in (inner, outer) if isinstance(side, Transport)]
        if isinstance(outer, Rail):
            self.rail = outer
            inner.describe = self._describe
        if isinstance(inner, OneSidedTransport) and isinstance(outer, OneSidedTransport):
            inner.whole = self
            self.recovery = BothRounds(self, inner, outer, self._numbers)
            outer.on_news = inner.wake
            forget(outer)
        forget(inner)
        close_at_exit(self)
        outer.counters = probe.across = Counters()

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._inner.expose(self._relays.sizes(sizes))
        self.sizes = [tuple(row) for row in sizes]
        self.segments = [self._inner.segments[self._relays.key(key)] for key in range(len(sizes))]
        self._outer.expose(sizes)

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        self._check()
        inner, outer = self._inner, self._outer
        inner.publish([self._relays.key(key) for key in keys], epoch)
        for key in keys:
            if outer.segments[key] is not self.segments[key]:
                outer.segments[key].copy_(self.segments[key])
        outer.publish(keys, epoch)
        assert self.sizes is not None
        for key, (distance, owner) in itertools.product(keys, self._relays.rail):
            relay = self._relays.key(key, distance)
            if not self.sizes[key][owner] and not outer.lockstep:
                inner.publish((relay,), epoch)
                continue
            with self._lock:
                self._relaying += 1
            outer.fetch(owner, key, epoch, inner.segments[relay], then=partial(self._relayed, relay, epoch))

    def _relayed(self, relay: int, epoch: int) -> None:
        """A shard is here; on CPUs in the outer transport's thread, in streams behind its exchange."""
        if self._closed:
            return
        self._inner.publish((relay,), epoch)
        with self._lock:
            self._relaying -= 1
            finish = self._finish_later if not self._relaying else 0
            if finish:
                self._finish_later = 0
        if finish:
            self._outer.finish(finish, self._outcome)

    def _all_relayed(self) -> bool:
        return not self._finish_later

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Transfer]:
        self._check()
        return self._inner.pull(epoch, [self._at(request) for request in requests])

    def _at(self, request: PullRequest) -> PullRequest:
        """The pull inside the host: of what its ranks have published of their own, and passed on."""
        found = self._inside.get(request) if request.out is None else None
        if found is None:
            owner, key = self._relays.at(request.owner, request.key)
            found = request._replace(owner=owner, key=key, others=self._parts_at(request.others))
            if request.out is None:
                self._inside[request] = found
        return found

    def _parts_at(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        known = self._parts.get(id(parts))
        if known is None or known[0] is not parts:
            there = [self._relays.at(part.owner, part.key) for part in parts]
            inside = (part._replace(owner=owner, key=key) for part, (owner, key) in zip(parts, there, strict=True))
            known = self._parts[id(parts)] = parts, tuple(inside)
        return known[1]

    def _describe(self, place: int, relayed: int, epoch: int, start: int, nbytes: int) -> Where:
        """What `inner` pulls."""
        members = self.hosts.members
        key, distance = divmod(relayed, len(members))
        host = (self.hosts.place(self.rank)[0] + distance) % len(members)
        return self.describe(members[host][place], key, epoch, start, nbytes)

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._inner.finish(epoch, outcome)
        with self._lock:
            self._outcome = outcome
            if self._relaying:
                self._finish_later = epoch
                return
        self._outer.finish(epoch, outcome)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        self._check()
        self._inner.wait_finished(epoch, where, meanwhile=meanwhile)
        self._outer.wait_finished(epoch, where, meanwhile=meanwhile)
        # Here, not in `publish`: an exception in a wait is planned for between two steps, not while one begins.
        if epoch > 0 and self._finish_later:
            wait_until(self, self._all_relayed, peer=-1, where=where, doing="shards of other hosts, of the step before")

    # ---- messages ----------------------------------------------------------------------------------------------------
    def reserve(self, dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        """In streams what one unit owes to one gateway must fit into inbox_bytes."""
        found: list[torch.Tensor] = []
        for side, peers in self._sides(dsts):
            wanted = len(found) + len(peers)
            found += side.reserve(peers, sizes[len(found) : wanted], room)
            if len(found) < wanted:
                break
        return found

    def send(self, sendings: Sequence[Sending], *, more: bool = False) -> None:
        left = iter(sendings)
        for side, peers in self._sides([sending.dst for sending in sendings]):
            side.send([next(left)._replace(dst=peer) for peer in peers], more=more)

    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int, room: int = 0) -> None:
        if self.rail is not None:
            for side, peers in self._sides(srcs):
                side.expect(peers, tag, nbytes, room)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE, *, wait: bool = True) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for side, peers in self._sides(srcs):
            here = side.receive(peers, tag, where, wait=wait)
            if not here:
                return []
            found += here
        return found

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        for side, peers in self._sides(srcs):
            side.release(peers, tag, more=more)

    def _sides(self, ranks: Sequence[int]) -> Sequence[tuple[Transport, Sequence[int]]]:
        """Who serves these ranks, and as whom: together if all of them are on this host, else one by one."""
        numbers = [self._numbers[rank] for rank in ranks if rank in self._numbers]
        if len(numbers) == len(ranks):
            return ((self._inner, numbers),)
        if isinstance(self._outer, Rail):
            raise ValueError(
                f"ranks {ranks} are not all on the host of rank {self.rank}: messages go between ranks {sorted(self._numbers)} "
                "only; what is for other hosts is added up first and crosses by `Rail.cross`"
            )
        return [(self._inner if rank in self._numbers else self._outer, (rank,)) for rank in ranks]

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._check()
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
        self.membership.when_lost.clear()
        if reason:  # both are told before either waits for its peers
            self._inner.abort(reason)
            self._outer.abort(reason)
        try:
            self._outer.close()  # serves the rail until it has what it wants
        finally:
            self._inner.close()

    def _check(self) -> None:
        """Streams: whoever waits in this host hears of a loss between hosts. On CPUs every wait looks at both."""
        if self.rail is not None:
            try:
                self.rail.progress()
            except CommFuseError as error:
                with contextlib.suppress(CommFuseError):
                    self._inner.abort(str(error))
                raise
