"""Transport `mpi`: parameters and gradients through MPI (mpi4py), for CPU tensors of processes that an MPI launcher started.

The protocol is `one_sided`, as for `tcp`: a rank publishes, peers pull, a thread of the owner answers. What MPI brings is
`mpi_channel`: which sends and receives that takes, and who makes MPI progress. Any MPI will do whose library mpi4py was built
for: only mpi4py's standard calls are used.

[Note: Communicators]
Each transport has three of its own (control, parameters, gradients), of exactly the group's ranks, so that neither lane queues
behind another nor meets messages of the program's own. They are kept for the next transport of the same ranks if they end
empty (all peers' goodbyes, no receive left open): making them is slow, and an MPI has only so many. They are never freed:
that is collective, and peers may be gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from commfuse_dp import mpi_launch
from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.membership import called_in
from commfuse_dp.transport.one_sided.memory import FetchedMemory
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.two_sided.mpi_channel import Lanes, MpiChannel


class MpiTransport(OneSidedTransport):
    """`mpi`: see the module. Ranks are those of the group that `exchange` connects; those of MPI_COMM_WORLD may be others.

    Raises TransportError on all ranks if they are not different processes of one MPI job, too.
    """

    name: ClassVar[str] = "mpi"

    def _connect(self, exchange: ExchangeFn, members: Sequence[int]) -> tuple[MpiChannel, FetchedMemory]:
        lanes = open_lanes(exchange)
        memory = FetchedMemory(self.rank, self.world_size, exchange, self.message_limit)
        return MpiChannel(self.rank, lanes, self.probe, keep=_keep), memory


class _Card(NamedTuple):
    """What a rank tells the others."""

    world_rank: int
    world_size: int
    host: str
    pid: int
    kept: dict[tuple[int, ...], set[int]]  # serials of idle communicators, by world ranks
    error: str | None


_idle: dict[tuple[int, ...], dict[int, Lanes]] = defaultdict(dict)  # world ranks -> serial -> communicators
_made: Counter[tuple[int, ...]] = Counter()
_serial_lock = threading.RLock()  # around all MPI calls of this package, where MPI allows one thread at a time only


def open_lanes(exchange: ExchangeFn) -> Lanes:
    """Collective over the group of `exchange`: its communicators, kept ones if all ranks have the same to offer."""
    MPI, error, world_rank, world_size = None, None, -1, 0
    try:
        MPI = mpi_launch.load()
        world_rank, world_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    except TransportError as failure:
        error = str(failure)
    kept = {key: set(lanes) for key, lanes in _idle.items()}
    cards: list[_Card] = exchange(_Card(world_rank, world_size, socket.gethostname(), os.getpid(), kept, error))
    failures = [f"rank {called_in(exchange, rank)}: {card.error}" for rank, card in enumerate(cards) if card.error]
    if failures:
        raise TransportError(f"transport 'mpi' cannot be used ({len(failures)} of {len(cards)} ranks); {failures[0]}")
    ranks = tuple(card.world_rank for card in cards)
    _check_one_job(cards)
    places = [f"MPI rank {card.world_rank}, pid {card.pid} on {card.host}" for card in cards]
    assert MPI is not None
    lock = threading.RLock() if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else _serial_lock
    common = set.intersection(*(card.kept.get(ranks, set()) for card in cards))
    if common:
        chosen = _idle[ranks].pop(min(common))
        return chosen._replace(places=places, lock=lock)
    _made[ranks] += 1
    with lock:
        group = MPI.COMM_WORLD.Get_group()
        members = group.Incl(list(ranks))
        communicators = []
        try:
            # The tag keeps groups apart that are made at the same time by other threads of these processes.
            first = MPI.COMM_WORLD.Create_group(members, tag=_made[ranks] % 32768)
            communicators = [first, first.Dup(), first.Dup()]
            for communicator in communicators:
                communicator.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises them
        except MPI.Exception as failure:
            raise TransportError(f"cannot make an MPI communicator of MPI ranks {list(ranks)}: {failure}") from failure
        finally:
            members.Free()
            group.Free()
    control, params, grads = communicators
    return Lanes(MPI, control, params, grads, ranks=ranks, serial=_made[ranks], places=places, lock=lock)


def _check_one_job(cards: list[_Card]) -> None:
    ranks = [card.world_rank for card in cards]
    if len(set(ranks)) == len(ranks) and len({card.world_size for card in cards}) == 1:
        return
    sizes = sorted({card.world_size for card in cards})
    raise TransportError(
        f"transport 'mpi' was asked for, but the {len(cards)} ranks are not different processes of one MPI job: their MPI "
        f"ranks are {ranks}, their MPI worlds have {sizes} processes. Start them with an MPI launcher: "
        f"mpiexec -n {len(cards)} python -m commfuse_dp.run train.py; or use transport 'auto'."
    )


def _keep(lanes: Lanes) -> None:
    with contextlib.suppress(Exception):  # MPI may have been finalised by the program
        if not lanes.mpi.Is_finalized():
            _idle[lanes.ranks][lanes.serial] = lanes
