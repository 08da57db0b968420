"""In which order a rank works through the owners' slices.

| order | all-gather: rank r consumes | reduce-scatter: rank r produces for |
| --- | --- | --- |
| pairwise | r, r+1, r+2, ..., r-1 (straight from each owner) | r+1, r+2, ..., r (straight to each owner) |
| ring | r, r-1, r-2, ..., r+1 (all through the neighbour r-1) | r-1, r-2, ..., r (running sum handed on to r+1) |

All indices modulo N. Both keep the two rules that leave no exposed head and no exposed tail: own first in an all-gather,
own last in a reduce-scatter. In step t all ranks talk to different peers (a permutation), so no owner is read by all at once.
The ring orders are Algorithms 1 and 2 of arXiv 2604.24013, with sends to r+1 and receives from r-1.
"""

from __future__ import annotations

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


def summation_order(owner: int, world_size: int, order: str = "pairwise") -> tuple[int, ...]:
    """Ranks in the order in which their partials of `owner`'s slices are added up (left fold).

    pairwise: rank order 0, 1, 2, ... for every owner, so that results do not depend on who owns a row.
    ring: the running sum starts at owner+1 and ends at the owner: deterministic too, but another order for every owner.
    """
    _check(owner, world_size, order)
    if order == "pairwise":
        return tuple(range(world_size))
    return tuple((owner + t) % world_size for t in range(1, world_size + 1))
