"""Pretended hosts: transport hierarchical with the ranks of one process."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import Transfer
from commfuse_dp.transport.hierarchical import AcrossProbe, HierarchicalTransport
from commfuse_dp.transport.hosts import Hosts
from commfuse_dp.transport.inproc import InprocTransport, InprocWorld
from commfuse_dp.transport.tcp import TcpTransport
from tests.support.threads import ExchangeFn


class _Copy(Transfer):
    def __init__(self, view: Transfer, out) -> None:  # type: ignore[no-untyped-def]
        self._view, self._out = view, out

    def done(self) -> bool:
        return self._view.done()

    def wait(self, where: Where = Where()):  # type: ignore[no-untyped-def]  # noqa: B008
        return self._out.copy_(self._view.wait(where))


class CopyingTransport(InprocTransport):
    """Not in place: the engine needs its window, as over a network."""

    in_place = False

    def pull(self, owner, key, epoch, *, start=0, nbytes=None, out=None, after=None) -> Transfer:  # type: ignore[no-untyped-def]
        return _Copy(super().pull(owner, key, epoch, start=start, nbytes=nbytes), out)


def shuffled_hosts(world_size: int, per_host: int, seed: int) -> list[str]:
    """A host for each rank; ranks of a host need not be neighbours."""
    identities = [chr(ord("a") + rank // per_host) for rank in range(world_size)]
    if seed % 2:
        random.Random(seed).shuffle(identities)
    return identities


def open_hierarchical(
    rank: int,
    identities: Sequence[str],
    world: InprocWorld,
    exchange: ExchangeFn,
    *,
    inbox_bytes: int,
    deadline_s: float = 20.0,
    copying: bool = False,
) -> HierarchicalTransport:
    """inner: in-process, with the faults of `world`; outer: TCP over loopback."""
    hosts = Hosts.of(identities)
    probe = Probe()
    kind = CopyingTransport if copying else InprocTransport
    inner = kind(rank, world, probe=probe, members=hosts.siblings(rank))
    outer = TcpTransport(
        rank,
        len(identities),
        exchange,
        inbox_bytes=inbox_bytes,
        deadline_s=deadline_s,
        probe=AcrossProbe(probe),
        address="127.0.0.1",
    )
    return HierarchicalTransport(hosts, inner, outer, probe=probe)
