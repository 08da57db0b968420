"""Opening transport `hierarchical`, on CPUs and on GPUs, or saying why it cannot be."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.base import ExchangeFn, Transport
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.free_memory import free_memory
from commfuse_dp.transport.two_sided.p2p import new_group

# By default group, with which they go, and ranks; see [Note: Communicators are kept] in transport/kept.py.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()


RELAY_SHARE = 10  # order 'auto' keeps what has crossed while that is at most this part (1/10) of the memory that is available


def too_dear(hosts: Hosts, published_bytes: int, device: torch.device, exchange: ExchangeFn) -> str | None:
    """Collective: why order 'auto' should rather be flat, or None. published_bytes: by all ranks together in a step."""
    kept = published_bytes * (len(hosts.members) - 1) // hosts.world_size
    known = [nbytes for nbytes in exchange(free_memory(device, hosts.per_host)) if nbytes is not None]
    if not known or RELAY_SHARE * kept <= min(known):
        return None
    return (
        f"a rank would have to keep {kept} bytes that have crossed hosts, more than 1/{RELAY_SHARE} of the {min(known)} that "
        "are available to it; order='hierarchical' asks for it all the same"
    )


def open_on_cpus(
    hosts: Hosts, rank: int, exchange: ExchangeFn, *, inbox_bytes: int, deadline_s: float, probe: Probe
) -> tuple[Transport, str]:
    """Collective: shm inside hosts, tcp between them, and how to say that. Raises TransportError on all ranks alike."""
    from commfuse_dp.transport.hierarchical.transport import HierarchicalTransport
    from commfuse_dp.transport.shm.transport import ShmTransport
    from commfuse_dp.transport.tcp.transport import TcpTransport

    size, members = hosts.world_size, hosts.siblings(rank)
    inner = ShmTransport(rank, size, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s, probe=probe, members=members)
    try:
        outer = TcpTransport(rank, size, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s, probe=probe)
    except BaseException:
        inner.close()
        raise
    return HierarchicalTransport(rank, hosts, inner, outer, probe=probe), "shm inside a host, tcp between hosts"


def open_on_gpus(
    group: dist.ProcessGroup | None,
    hosts: Hosts,
    rank: int,
    exchange: ExchangeFn,
    *,
    device: torch.device,
    inbox_bytes: int,
    deadline_s: float,
    probe: Probe,
) -> tuple[Transport, str]:
    """Collective: symmetric inside hosts, NCCL between them. rank: in `group`. Not yet run on a GPU.

    inbox_bytes: as for one host; a rank takes in what is owed to its whole rail, so there is room for each of its ranks.

    Raises TransportError on all ranks alike: what is missing, on which rank.
    """
    from commfuse_dp.transport.grouped.exchange import open_grouped
    from commfuse_dp.transport.hierarchical.rail import Rail
    from commfuse_dp.transport.hierarchical.transport import HierarchicalTransport
    from commfuse_dp.transport.symmetric.open import open_symmetric, survey

    if not dist.is_initialized():
        raise TransportError("torch.distributed is not initialised: call init_process_group first, or start with torchrun")
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    siblings, rail = hosts.siblings(rank), hosts.rail(rank)
    host_group = _group_of([ranks[member] for member in siblings])
    rail_group = _group_of([ranks[member] for member in rail])
    inside = exchange_of(host_group)
    verdict, cards = survey(device, ["here"] * len(siblings), inside)
    raise_failures(exchange, exchange(None if verdict.possible else f"inside its host: {verdict.reason}"))
    inner, error, how = None, None, ""
    try:
        inner, how = open_symmetric(
            host_group,
            siblings.index(rank),
            len(siblings),
            inside,
            cards,
            device=device,
            inbox_bytes=inbox_bytes * len(rail),
            deadline_s=deadline_s,
            probe=probe,
            kernels_may_wait=False,  # [Note: Kernels that wait] in rail.py
        )
    except TransportError as failure:
        error = f"inside its host: {failure}"
    try:
        raise_failures(exchange, exchange(error))
        grouped, error = None, None
        try:
            grouped = open_grouped(rail_group, deadline_s=deadline_s, device=device)
        except TransportError as failure:
            error = f"between hosts: {failure}"
        raise_failures(exchange, exchange(error))
    except BaseException:
        if inner is not None:
            inner.close()
        raise
    assert inner is not None and grouped is not None
    outer = Rail(rank, hosts, grouped, inner.device, deadline_s=deadline_s, probe=probe)
    transport = HierarchicalTransport(rank, hosts, inner, outer, probe=probe)
    return transport, f"symmetric inside a host ({verdict.reason}; words by {how}), NCCL between hosts"


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of these ranks, each of which calls alike."""
    assert dist.group.WORLD is not None
    groups, key = _groups.setdefault(dist.group.WORLD, {}), tuple(ranks)
    if key not in groups:
        groups[key] = new_group(ranks)
    return groups[key]
