"""Groups of transports of every kind, one thread per rank: what the conformance suite runs on."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.shm.transport import ShmTransport
from tests.support import mpi, single
from tests.support.fake_device import FakeWorld
from tests.support.fake_symmetric import AskingTransport, die, open_fake
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import ExchangeFn, run_ranks

Body = Callable[[Transport, ExchangeFn], Any]
Opener = Callable[[int, ExchangeFn], Transport]


class Cluster:
    """Opens a group of one kind, runs a body per rank, closes. A rank that raises closes at once, as a program would."""

    kind = "?"

    @classmethod
    def most_ranks(cls) -> int:
        return sys.maxsize

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        raise NotImplementedError

    def die(self, transport: Transport) -> None:
        """End a rank without a goodbye, as kill -9 does."""
        transport._channel.close()  # type: ignore[attr-defined]

    def run(
        self,
        world_size: int,
        body: Body,
        *,
        sizes: Sequence[Sequence[int]] | None = None,
        inbox_bytes: int = 4096,
        deadline_s: float = 20.0,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        open_one = self.opener(world_size, inbox_bytes, deadline_s)

        def main(rank: int, exchange: ExchangeFn) -> Any:
            transport = open_one(rank, exchange)
            try:
                if sizes is not None:
                    transport.expose(sizes)
                return body(transport, exchange)
            finally:
                transport.close()

        return self.run_ranks(world_size, main, timeout_s)

    def run_ranks(self, world_size: int, main: Callable[[int, ExchangeFn], Any], timeout_s: float) -> list[Any]:
        return run_ranks(world_size, main, timeout_s=timeout_s)


class InprocCluster(Cluster):
    kind = "inproc"

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults
        self.world: InprocWorld | None = None

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        world = self.world = InprocWorld(world_size, inbox_bytes=inbox_bytes, deadline_s=deadline_s, faults=self.faults)
        return lambda rank, exchange: world.transport(rank)

    def die(self, transport: Transport) -> None:
        assert self.world is not None
        self.world.kill(transport.rank)


class DelayedInprocCluster(InprocCluster):
    """Every message is held back for 0 to 5 polls of its receiver, so that most orders of arrival occur."""

    kind = "inproc-delayed"

    def __init__(self) -> None:
        super().__init__(Faults(seed=7, max_delay=5))


class ShmCluster(Cluster):
    kind = "shm"

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        return lambda rank, exchange: ShmTransport(rank, world_size, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s)


class TcpCluster(Cluster):
    kind = "tcp"

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        tcp = importlib.import_module("commfuse_dp.transport.tcp.transport")
        return lambda rank, exchange: tcp.TcpTransport(
            rank, world_size, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s, address="127.0.0.1"
        )


class P2PCluster(Cluster):
    """Real gloo communicators, made without torch.distributed's global state, which knows only one rank per process."""

    kind = "p2p"

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        import torch.distributed as dist

        from commfuse_dp.transport.two_sided.paired import PairedTransport

        store = dist.HashStore()
        timeout = datetime.timedelta(seconds=deadline_s)

        def open_one(rank: int, exchange: ExchangeFn) -> Transport:
            lanes = {
                lane: dist.ProcessGroupGloo(dist.PrefixStore(str(lane), store), rank, world_size, timeout) for lane in range(3)
            }
            return PairedTransport(rank, world_size, exchange, lanes=lanes, inbox_bytes=inbox_bytes, deadline_s=deadline_s)

        return open_one

    def die(self, transport: Transport) -> None:
        for lane in transport._channel._lanes.values():  # type: ignore[attr-defined]
            lane.abort()


class SymmetricCluster(Cluster):
    """Over the simulated device: the thread of a rank is its current stream, and side streams run in random order."""

    kind = "symmetric"

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        world = FakeWorld(world_size, seed=11, deferred=False)
        return lambda rank, exchange: open_fake(
            world, rank, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s, kind=AskingTransport
        )

    def die(self, transport: Transport) -> None:
        die(transport)


class MpiCluster(Cluster):
    """Works inside an MPI job only: see tests/support/mpi.py."""

    kind = "mpi"

    @classmethod
    def most_ranks(cls) -> int:
        return mpi.job_size()

    def opener(self, world_size: int, inbox_bytes: int, deadline_s: float) -> Opener:
        return lambda rank, exchange: mpi.open_mpi(rank, world_size, exchange, inbox_bytes, deadline_s)

    def run_ranks(self, world_size: int, main: Callable[[int, ExchangeFn], Any], timeout_s: float) -> list[Any]:
        return mpi.run_on_ranks(world_size, main, timeout_s)


CLUSTERS: dict[str, type[Cluster]] = {
    cluster.kind: cluster for cluster in (InprocCluster, DelayedInprocCluster, ShmCluster, SymmetricCluster)
}
if importlib.util.find_spec("commfuse_dp.transport.tcp.transport") is not None:
    CLUSTERS[TcpCluster.kind] = TcpCluster
if importlib.util.find_spec("commfuse_dp.transport.two_sided.paired") is not None:
    CLUSTERS[P2PCluster.kind] = P2PCluster
if mpi.mpiexec() is not None:
    CLUSTERS[MpiCluster.kind] = MpiCluster


def pull_bytes(
    transport: Transport, owner: int, key: int, epoch: int, start: int = 0, nbytes: int | None = None, size: int | None = None
) -> torch.Tensor:
    """Pull and wait, with a buffer where the transport needs one. `size`: of the whole segment, unless nbytes is given."""
    out = None
    if not transport.in_place:
        length = nbytes if nbytes is not None else (size or 0) - start
        out = torch.empty(length, dtype=torch.uint8)
    return single.pull(transport, owner, key, epoch, start=start, nbytes=nbytes, out=out).wait()


def pattern(*identity: int, nbytes: int) -> torch.Tensor:
    """Bytes that depend on every part of `identity`: a mix-up of rank, key, epoch, tag or place cannot go unseen."""
    seed = 17
    for part in identity:
        seed = (seed * 1_000_003 + part + 1) % (1 << 31)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
