"""In which order a rank works through the owners' slices.

| order | all-gather: rank r consumes | reduce-scatter: rank r produces for |
| --- | --- | --- |
| pairwise | r, r+1, r+2, ..., r-1 (straight from each owner) | r+1, r+2, ..., r (straight to each owner) |
| ring | r, r-1, r-2, ..., r+1 (all through the neighbour r-1) | r-1, r-2, ..., r (running sum handed on to r+1) |

| hierarchical | own host as pairwise, then the other hosts | the other hosts first, then own host as pairwise |

All indices modulo N. All keep the two rules that leave no exposed head and no exposed tail: own first in an all-gather,
own last in a reduce-scatter. In step t all ranks talk to different peers (a permutation), so no owner is read by all at once.
The hierarchical order is for several hosts with equally many ranks each: what crosses hosts is fetched once for all ranks of
a host, and added up inside it before it crosses (program/hosts.py, transport/hierarchical/transport.py). It comes first in a
reduce-scatter, as its way is longest, and last in an all-gather.

The ring orders are Algorithms 1 and 2 of arXiv 2604.24013, with sends to r+1 and receives from r-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

Order = Literal["pairwise", "ring"]
ORDERS: tuple[str, ...] = get_args(Order)


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: must be one of {', '.join(map(repr, ORDERS))}")


def _check(rank: int, world_size: int, order: str) -> None:
    check_order(order)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must lie in 0 .. {world_size - 1} (world_size={world_size})")


def gather_owners(rank: int, world_size: int, order: str = "pairwise") -> tuple[int, ...]:
    """Owners in the order in which `rank` consumes their slices in an all-gather: own first."""
    _check(rank, world_size, order)
    step = 1 if order == "pairwise" else -1
    return tuple((rank + step * t) % world_size for t in range(world_size))


def scatter_owners(rank: int, world_size: int, order: str = "pairwise") -> tuple[int, ...]:
    """Owners in the order in which `rank` produces the partials owed to them in a reduce-scatter: own last."""
    _check(rank, world_size, order)
    step = 1 if order == "pairwise" else -1
    return tuple((rank + step * t) % world_size for t in range(1, world_size + 1))


def hierarchical_gather_owners(rank: int, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """As `gather_owners`, for ranks on `hosts` (the ranks of each, equally many): own, own host, then the hosts that follow; on
    each of them from the own place onwards, whose shards this rank has fetched itself."""
    return _around(rank, hosts, first=0)


def hierarchical_scatter_owners(rank: int, hosts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """As `scatter_owners`: the hosts that follow, then the own one; on each from the next place onwards, so own last."""
    order = _around(rank, hosts, first=1)
    return order[len(hosts[0]) :] + order[: len(hosts[0])]


def _around(rank: int, hosts: Sequence[Sequence[int]], first: int) -> tuple[int, ...]:
    host = next((number for number, ranks in enumerate(hosts) if rank in ranks), None)
    if host is None or len({len(ranks) for ranks in hosts}) > 1:
        raise ValueError(f"rank={rank}: must be on one of hosts={hosts}, which must have equally many ranks")
    place, size = list(hosts[host]).index(rank), len(hosts[0])
    return tuple(
        hosts[(host + ahead) % len(hosts)][(place + first + t) % size] for ahead in range(len(hosts)) for t in range(size)
    )
