"""All-gather then compute: every rank consumes all slices, each as soon as it is here.

Timeline of rank r, N = 4, m = 1, pairwise (one column = the compute time of one slice; > = in flight)

    compute | r | r+1 | r+2 | r+3
    receive | >r+1 >r+2 >r+3 |
    send    | >r-1 >r-2 >r-3 |

| way | a slice of owner o comes to rank r |
| --- | --- |
| direct | from o |
| ring | from r-1, which passes on what it gets and consumes itself (Algorithm 1) |
| hosts | from o, if o is on the host of r or at r's place on another host; else from the rank of r's host at o's place |
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.layout import Slice
from commfuse_dp.program.operations import TOTAL, Consume, Operation, Piece, Problem, Receive, Send


def gather(problem: Problem, rank: int, *, total: bool = False) -> Iterator[Operation]:
    """Own slices leave at once and are consumed first.

    total: gather sums (the second half of an all-reduce) and not the ranks' own data.
    """
    for step in arrivals(problem, rank, total=total):
        yield from step


def arrivals(problem: Problem, rank: int, *, own_last: bool = False, total: bool = False) -> Iterator[list[Operation]]:
    """The sends of all own slices; then slice by slice, in the order of consumption: receive, pass on, consume.

    own_last: slices are consumed in the order in which a reduce-scatter produces, beside which they are needed."""

    def piece(part: Slice) -> Piece:
        return Piece(TOTAL if total else part.owner, part)

    takers = _takers(problem.world_size, problem.order, problem.way, problem.hosts, rank, own_last)
    published: list[Operation] = [Send(peer, piece(part)) for peer in takers.get(rank, ()) for part in problem.slices(rank)]
    late = own_last and problem.way == "hosts"  # others' slices pass first on the links that carry the own ones, too
    yield [] if late else published
    for owner in problem.scatter_owners(rank) if own_last else problem.gather_owners(rank):
        for part in problem.slices(owner):
            if owner == rank:
                yield [*(published if late else ()), Consume(piece(part))]
                late = False
                continue
            passed_on = [Send(peer, piece(part)) for peer in takers.get(owner, ())]
            yield [Receive(problem.source(rank, owner), piece(part)), *passed_on, Consume(piece(part))]


@functools.lru_cache(maxsize=4096)  # the layers of a model share it
def _takers(n: int, order: str, way: str, hosts: Hosts | None, rank: int, own_last: bool) -> Mapping[int, tuple[int, ...]]:
    """Owner -> ranks that get its slices from `rank`, the one that turns to them first in front."""
    problem = Problem("all_gather", (0,) * n, order, way=way, hosts=hosts)
    turns = problem.scatter_owners if own_last else problem.gather_owners
    if way == "ring":
        after = (rank + 1) % n
        return {owner: (after,) for owner in range(n) if owner != after}
    if way == "direct":
        owners, peers = [rank], [peer for peer in range(n) if peer != rank]
    else:
        assert hosts is not None
        owners = list(hosts.rail(rank))
        peers = [peer for peer in {*hosts.siblings(rank), *hosts.rail(rank)} if peer != rank]
    orders = {peer: turns(peer) for peer in peers}
    takers = {}
    for owner in owners:
        mine = [peer for peer in peers if peer != owner and problem.source(peer, owner) == rank]
        takers[owner] = tuple(sorted(mine, key=lambda peer: (orders[peer].index(owner), peer)))
    return takers
