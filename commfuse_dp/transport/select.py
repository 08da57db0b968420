"""Choose and open the transport of a group of ranks.

[Note: What counts as one host]
Ranks can share memory if they meet on an abstract UNIX-domain socket, run under one user and on one kernel. So the
identity of a "host" is the boot id of the kernel, the network namespace (abstract sockets belong to it) and the user id:
ranks in two network namespaces of one machine count as two hosts, as two containers do.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.errors import ConfigError, MismatchError, TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.program.hosts import Hosts, check_hosts
from commfuse_dp.transport.backends import check_ranks_exist, check_sends
from commfuse_dp.transport.base import ExchangeFn, Transport
from commfuse_dp.transport.budget import Room
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.free_memory import free_memory
from commfuse_dp.transport.membership import called_in
from commfuse_dp.transport.streams.growth import GrowingRings

if TYPE_CHECKING:
    from commfuse_dp.config import CommFuseConfig  # needs pydantic, which machines that only run `make gpu-check` may lack

Kind = Literal["auto", "shm", "tcp", "symmetric", "p2p", "mpi"]
KINDS = ("auto", "shm", "tcp", "symmetric", "p2p", "mpi")
_log = logging.getLogger("commfuse_dp")


def host_identity() -> str:
    """Equal on two ranks exactly if they can share memory by transport 'shm'."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # not Linux: 'shm' is not available, every process stands alone
        return f"pid-{os.getpid()}-{os.uname().nodename}"
    return f"{boot}/{network}/{os.getuid()}"


def choose(kind: str, hosts: list[str], device: torch.device) -> tuple[str, str]:
    """(transport, reason) for ranks on `hosts` (identities in rank order), as far as that can be said without looking at GPUs.

    Raises TransportError for a request that cannot be met.
    """
    count = len(set(hosts))
    places = "one rank" if len(hosts) == 1 else f"{len(hosts)} ranks on one host"
    if count > 1:
        places = f"{len(hosts)} ranks on {count} hosts"
    if kind == "auto":
        if device.type != "cpu":
            return "p2p", f"auto: parameters are on {device.type}, which torch.distributed moves ({places})"
        return ("shm", f"auto: {places} can share memory") if count == 1 else ("tcp", f"auto: {places}, parameters on CPU")
    if kind == "symmetric" and device.type != "cuda":
        raise TransportError(f"transport 'symmetric' is for CUDA GPUs, but the parameters are on {device}; use 'auto'")
    if kind in ("shm", "tcp", "mpi") and device.type != "cpu":
        raise TransportError(f"transport {kind!r} moves CPU memory, but the parameters are on {device}; use 'p2p' or 'auto'")
    if kind == "shm" and count > 1:
        raise TransportError(
            f"transport 'shm' was asked for, but the group has {places} (counting network namespaces and users apart), "
            "which cannot share memory; use 'tcp', 'p2p' or 'auto'"
        )
    return kind, f"asked for by the configuration ({places})"


def open_transport(
    kind: Kind,
    *,
    group: dist.ProcessGroup | None,
    inbox_bytes: int,
    deadline_s: float,
    probe: Probe | None,
    device: torch.device,
    stream_ordered: bool = False,
    growing: bool = False,
    order: str = "pairwise",
    published_bytes: int = 0,
    prefetch_bytes: int = 0,
    least_ring: int = 0,
    most_bytes: int | None = None,
) -> tuple[Transport, str]:
    """Collective over `group` (None: the default group, or one rank without torch.distributed).

    order: of the configuration; 'hierarchical' asks for transport hierarchical, 'auto' takes it where it can be had, and where
    the memory for it is small. Callers that cannot use it say 'pairwise'.
    published_bytes: by all ranks together in a step, if known: a part of it is that memory. prefetch_bytes: the most that this
    rank fetches ahead of it.

    inbox_bytes: what this rank may take for messages of all peers together, see budget.py. least_ring: bytes for one peer's
    messages that are taken even if that is too little. most_bytes: of inbox_bytes, what is of use; None: all. What is taken is
    logged before, and is `transport.footprint` afterwards.

    stream_ordered: the caller can use a stream-ordered transport (base.py); else 'symmetric' is never chosen. growing: it is
    for calls whose sizes come later, and on streams its rings grow with them (streams/growth.py).

    Returns the transport and why it was chosen. Raises ConfigError for an unknown kind and for ranks that cannot have it
    (backends.py), TransportError if a request cannot be met, MismatchError on all ranks if they ask for different kinds,
    devices, inbox sizes or orders.
    """
    if kind not in KINDS:
        raise ConfigError(f"transport={kind!r}: {', '.join(KINDS)} are allowed")
    check_ranks_exist(group)
    exchange = exchange_of(group)
    wishes = exchange((host_identity(), kind, device.type, inbox_bytes, order))
    for position, what in ((1, "transports"), (2, "devices"), (3, "inbox_bytes"), (4, "orders")):
        asked = [wish[position] for wish in wishes]
        if len(set(asked)) > 1:
            who = ", ".join(f"rank {called_in(exchange, rank)}: {wish!r}" for rank, wish in enumerate(asked))
            raise MismatchError(f"ranks ask for different {what}: {who}; all ranks need the same configuration")
    hosts, rank = [wish[0] for wish in wishes], dist.get_rank(group) if dist.is_initialized() else 0
    # Ranks of this host, also those of other groups, who take as much: where a launcher has said how many.
    beside = max(hosts.count(hosts[rank]), int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    free = free_memory(device, beside)
    room = Room(
        inbox_bytes, len(hosts), least_ring, most=most_bytes, window=prefetch_bytes, published=published_bytes, free=free
    )
    wanted = Wanted(kind, order, group, rank, hosts, exchange, room, deadline_s, probe, device, stream_ordered, published_bytes)
    transport, reason = _open(wanted)
    transport.footprint = room.footprint
    if isinstance(transport, GrowingRings):
        transport.growing = growing
    if group is not None:
        transport.membership.numbers = dist.get_process_group_ranks(group)
    return transport, reason


def open_for(
    config: CommFuseConfig, *, group: dist.ProcessGroup | None, device: torch.device, probe: Probe | None = None, **more: Any
) -> tuple[Transport, str]:
    """`open_transport` with the settings of a configuration. more: its other arguments."""
    return open_transport(
        config.transport,
        group=group,
        inbox_bytes=config.inbox_bytes,
        deadline_s=config.deadline_s,
        probe=probe,
        device=device,
        **more,
    )


class Wanted(NamedTuple):
    """What a transport is opened for, and with. All but the rank is the same on all ranks."""

    kind: Kind
    order: str
    group: dist.ProcessGroup | None
    rank: int
    hosts: list[str]  # identities, in rank order
    exchange: ExchangeFn
    room: Room
    deadline_s: float
    probe: Probe | None
    device: torch.device
    stream_ordered: bool
    published_bytes: int

    def settings(self, name: str, hosts: Hosts | None = None) -> dict[str, Any]:
        """Of a transport that is about to be opened; says how much memory it takes."""
        return {"inbox_bytes": self.room.ring(name, hosts), "deadline_s": self.deadline_s, "probe": self.probe}


_ON_CPUS = {
    "shm": ("shm.transport", "ShmTransport"),
    "tcp": ("tcp.transport", "TcpTransport"),
    "mpi": ("two_sided.mpi", "MpiTransport"),
}


def _open(wanted: Wanted) -> tuple[Transport, str]:
    kind, device = wanted.kind, wanted.device
    chosen, reason = choose(kind, wanted.hosts, device)
    together = _together(wanted)
    if together is not None:
        found = _open_hierarchical(together, wanted)
        if found is not None:
            return found
    if chosen == "symmetric" and not wanted.stream_ordered:
        raise TransportError(
            "transport 'symmetric' orders work by CUDA streams, as layers of FSDP2 and DeepSpeed do; this caller waits on the "
            "host: use 'auto'"
        )
    if device.type == "cuda" and wanted.stream_ordered and kind in ("auto", "symmetric"):
        opened = _open_symmetric(wanted)
        if not isinstance(opened, str):
            return opened
        reason = f"auto: 'symmetric' is not possible: {opened}"
        _log.warning("transport 'p2p' (NCCL, uses multiprocessors) instead of 'symmetric': %s", opened)
    if chosen in _ON_CPUS:
        module, name = _ON_CPUS[chosen]
        made = getattr(importlib.import_module(f"commfuse_dp.transport.{module}"), name)
        return made(wanted.rank, len(wanted.hosts), wanted.exchange, **wanted.settings(chosen)), reason
    if not dist.is_initialized():
        raise TransportError("transport 'p2p' needs torch.distributed: call init_process_group first, or start with torchrun")
    if device.type != "cpu":
        if device.type != "cuda" or not wanted.stream_ordered:
            raise TransportError(
                f"parameters are on {device}, where this caller would have to wait for every transfer on the host: "
                "torch.distributed's own collectives are better there. Layers of FSDP2 and DeepSpeed on CUDA are ordered by "
                "streams instead"
            )
        return _open_nccl(wanted), f"{reason}; NCCL in grouped exchanges, ordered by streams"
    check_sends(wanted.group)
    paired = importlib.import_module("commfuse_dp.transport.two_sided.paired")
    return paired.open_p2p(wanted.group, **wanted.settings("p2p")), reason


def _together(wanted: Wanted) -> Hosts | None:
    """The hosts of a hierarchical order; None: it is not wanted, or left out. Raises TransportError if it was asked for and
    cannot be had."""
    order, hosts, device = wanted.order, wanted.hosts, wanted.device
    if order not in ("auto", "hierarchical"):
        return None
    try:
        if wanted.kind != "auto":
            raise TransportError(
                f"order 'hierarchical' joins one transport inside a host and one between hosts, but "
                f"transport={wanted.kind!r} was asked for; use transport='auto'"
            )
        if device.type != "cpu" and not wanted.stream_ordered:
            raise TransportError(f"order 'hierarchical' on {device} is ordered by streams, which this caller is not")
        return check_hosts(hosts)
    except TransportError as error:
        if order == "hierarchical":
            raise TransportError(f"{error}. Or use order='pairwise'.") from None
        if len(set(hosts)) not in (1, len(hosts)):
            _log.info("order 'pairwise' instead of 'hierarchical': %s", error)
        return None


def _open_hierarchical(hosts: Hosts, wanted: Wanted) -> tuple[Transport, str] | None:
    """The transport and why; None: it cannot be had, or costs much, and was not asked for."""
    opening = importlib.import_module("commfuse_dp.transport.hierarchical.open")
    order, device, exchange = wanted.order, wanted.device, wanted.exchange
    dear = opening.too_dear(hosts, wanted.published_bytes, device, exchange) if order == "auto" else None
    if dear is not None:
        _log.warning("order 'pairwise' instead of 'hierarchical': %s", dear)
        return None
    settings = wanted._replace(probe=wanted.probe or Probe()).settings(device.type, hosts)
    if device.type == "cpu":
        transport, ways = opening.open_on_cpus(hosts, wanted.rank, exchange, **settings)
    else:
        try:
            transport, ways = opening.open_on_gpus(wanted.group, hosts, wanted.rank, exchange, device=device, **settings)
        except TransportError as error:
            if order == "hierarchical":
                raise TransportError(f"order 'hierarchical' was asked for, but cannot be had: {error}") from error
            _log.warning("order 'pairwise' instead of 'hierarchical': %s", error)
            return None
    return transport, (
        f"{'asked for' if order == 'hierarchical' else 'auto'}: {hosts.world_size} ranks, {hosts.per_host} on each of "
        f"{len(hosts.members)} hosts: {ways}"
    )


def _open_nccl(wanted: Wanted) -> Transport:
    """The stream-ordered transport. Raises TransportError on all ranks alike if some rank cannot have it."""
    cuda = importlib.import_module("commfuse_dp.device.cuda")
    grouped = importlib.import_module("commfuse_dp.transport.grouped.exchange")
    nccl = importlib.import_module("commfuse_dp.transport.grouped.transport")
    own, problem = None, grouped.wrong_device(wanted.device)
    try:
        own = cuda.CudaDevice(wanted.device)
    except TransportError as error:
        problem = problem or str(error)
    answers = wanted.exchange(problem)
    raise_failures(wanted.exchange, answers, "transport 'p2p' on cuda is ordered by streams, which cannot be had: ")
    return nccl.open_nccl(wanted.group, device=own, **wanted.settings("p2p"))


def _open_symmetric(wanted: Wanted) -> tuple[Transport, str] | str:
    """The transport and why; or why not, if it was not asked for by name. Raises TransportError if it was."""
    symmetric = importlib.import_module("commfuse_dp.transport.symmetric.open")
    kind, hosts, exchange, device = wanted.kind, wanted.hosts, wanted.exchange, wanted.device
    asked = "asked for by the configuration" if kind == "symmetric" else "auto"
    verdict, cards = symmetric.survey(device, hosts, exchange)
    try:
        if not verdict.possible:
            raise TransportError(verdict.reason)
        if not dist.is_initialized():
            raise TransportError("torch.distributed is not initialised: call init_process_group first, or start with torchrun")
        settings = wanted.settings("symmetric")
        transport, how = symmetric.open_symmetric(
            wanted.group, wanted.rank, len(hosts), exchange, cards, device=device, **settings
        )
    except TransportError as error:  # raised on all ranks alike
        if kind == "symmetric":
            raise TransportError(f"transport 'symmetric' was asked for, but cannot be used: {error}") from error
        if len({(host, card.uuid) for host, card in zip(hosts, cards, strict=True)}) < len(cards):
            raise TransportError(
                f"several ranks share one GPU, which NCCL refuses, and transport 'symmetric' cannot be used: {error}"
            ) from error
        return str(error)
    return transport, f"{asked}: {verdict.reason}; words by {how}"
