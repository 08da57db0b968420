"""Pretended hosts: transport hierarchical with the ranks of one process, on CPU tensors and on simulated devices."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commfuse_dp.probe import Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.hierarchical.rail import Rail
from commfuse_dp.transport.hierarchical.transport import HierarchicalTransport
from commfuse_dp.transport.shm.sockets import SocketChannel, connect_mesh
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from commfuse_dp.transport.tcp.transport import TcpTransport
from tests.support.copying import CopyingTransport
from tests.support.fake_device import FakeWorld
from tests.support.fake_grouped import FakeBoard, FakeGroupedExchange
from tests.support.fake_symmetric import FakeSymmetricMemory
from tests.support.inproc import InprocTransport, InprocWorld
from tests.support.threads import ExchangeFn


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
        probe=probe,
        address="127.0.0.1",
    )
    return HierarchicalTransport(rank, hosts, inner, outer, probe=probe)


class DeviceHosts:
    """Simulated devices on pretended hosts: one board for grouped exchanges per rail."""

    def __init__(self, world: FakeWorld, identities: Sequence[str]) -> None:
        self.world = world
        self.hosts = Hosts.of(identities)
        self.boards = {rank: FakeBoard(world, self.hosts.rail(rank)) for rank in self.hosts.members[0]}

    def open(
        self,
        rank: int,
        exchange: ExchangeFn,
        *,
        inbox_bytes: int,
        deadline_s: float = 20.0,
        numbers: Sequence[int] | None = None,
    ) -> HierarchicalTransport:
        """numbers: of the ranks in the default group; None: their own."""
        hosts, numbers = self.hosts, numbers if numbers is not None else range(self.hosts.world_size)
        siblings = hosts.siblings(rank)
        place = siblings.index(rank)

        def inside(item):  # type: ignore[no-untyped-def]
            everyone = exchange(item)
            return [everyone[member] for member in siblings]

        inside.numbers = [numbers[member] for member in siblings]  # type: ignore[attr-defined]
        probe = Probe()
        inner = SymmetricTransport(
            place,
            hosts.per_host,
            inside,
            device=self.world.devices[rank],
            memory=FakeSymmetricMemory(self.world, rank, inside),
            channel=SocketChannel(connect_mesh(place, range(hosts.per_host), inside, 20.0)),
            inbox_bytes=inbox_bytes,
            deadline_s=deadline_s,
            probe=probe,
            kernels_may_wait=False,
        )
        rail = hosts.rail(rank)
        grouped = FakeGroupedExchange(self.boards[rail[0]], rail.index(rank))
        grouped.numbers = [numbers[member] for member in rail]
        outer = Rail(rank, hosts, grouped, inner.device, deadline_s=deadline_s, probe=probe)
        return HierarchicalTransport(rank, hosts, inner, outer, probe=probe)
