"""Compute then reduce-scatter: every rank computes its partial of all slices, and the sums end at the slices' owners.

Timeline of rank r, N = 4, m = 1, ring (Algorithm 2; one column = the compute time of one slice; > = in flight)

    compute | r-1 | r-2  | r-3  | r      own last
    receive |     | >r-2 | >r-3 | >r     running sums from r-1
    send    |     | >r-1 | >r-2 | >r-3   running sums to r+1: nothing after the last compute

| way | a slice of owner o is added up |
| --- | --- |
| direct | by o, in rank order |
| ring | along o+1, o+2, ..., o: each adds its own partial to what comes and passes the sum on |
| hosts | on each host by the rank at o's place, in rank order; these sums by o, in the order of hosts |

`beside`: sums are made on lanes of their own, as soon as their terms are here, while the compute lane goes on. It is what the
engine does; the plain collectives sum on the compute lane. The sums of a chain's slices do not wait for each other; all others
are made in program order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from commfuse_dp.program.operations import (
    COMPUTE,
    TOTAL,
    Operation,
    Piece,
    Problem,
    Produce,
    Receive,
    Reduce,
    Send,
    partial_sum,
)

SUMS = "sums"  # lane: of a rank's own slices, or of its host
HOST_SUMS = "sums over hosts"  # lane: what the hosts have added up


def scatter(problem: Problem, rank: int, *, beside: bool = False) -> Iterator[Operation]:
    """Own slices are produced last."""
    for step in productions(problem, rank, beside=beside):
        yield from step


def productions(problem: Problem, rank: int, *, beside: bool = False) -> Iterator[list[Operation]]:
    """Slice by slice, in the order of production: produce, and what becomes of it; at the end the sums that remain."""
    builder = {"direct": _direct, "ring": _ring, "hosts": _hosts}[problem.way]
    return builder(problem, rank, beside)


def _direct(problem: Problem, rank: int, beside: bool) -> Iterator[list[Operation]]:
    n = problem.world_size
    for owner in problem.scatter_owners(rank):
        for part in problem.slices(owner):
            yield [Produce(part)] if owner == rank else [Produce(part), Send(owner, Piece(rank, part))]
    for part in problem.slices(rank):
        come = [Receive(source, Piece(source, part)) for source in reversed(_others(rank, n))]
        yield [*come, Reduce(part, tuple(range(n)), TOTAL, SUMS if beside else COMPUTE)]


def _others(rank: int, n: int) -> list[int]:
    return [(rank + step) % n for step in range(1, n)]


def _ring(problem: Problem, rank: int, beside: bool) -> Iterator[list[Operation]]:
    n = problem.world_size
    before, after = (rank - 1) % n, (rank + 1) % n
    order = problem.scatter_owners(rank)
    if not beside and problem.order != "ring":
        raise ValueError(f"order={problem.order!r}: running sums that compute waits for need the order 'ring'")
    steps: dict[tuple[int, int], list[Operation]] = {}
    for owner in order:
        starts_here = owner == before  # for N = 1 too: nothing has been added up before
        inputs = (rank,) if starts_here else (partial_sum(before), rank)
        output = TOTAL if owner == rank else partial_sum(rank)
        for part in problem.slices(owner):
            lane: Hashable = (part.tensor, owner, part.index) if beside else COMPUTE
            come = [] if starts_here else [Receive(before, Piece(partial_sum(before), part))]
            gone = [] if owner == rank else [Send(after, Piece(output, part))]
            steps[owner, part.index] = [Produce(part), *come, Reduce(part, inputs, output, lane), *gone]
    yield from steps.values()


def _hosts(problem: Problem, rank: int, beside: bool) -> Iterator[list[Operation]]:
    hosts = problem.hosts
    assert hosts is not None
    siblings, rail = hosts.siblings(rank), hosts.rail(rank)
    for owner in problem.scatter_owners(rank):
        gateway = hosts.gateway(rank, owner)
        for part in problem.slices(owner):
            yield [Produce(part)] if gateway == rank else [Produce(part), Send(gateway, Piece(rank, part))]
    for owner in hosts.rail_from_next(rank):
        for part in problem.slices(owner):
            come = [Receive(peer, Piece(peer, part)) for peer in siblings if peer != rank]
            gone = [] if owner == rank else [Send(owner, Piece(partial_sum(rank), part))]
            yield [*come, Reduce(part, siblings, partial_sum(rank), SUMS if beside else COMPUTE), *gone]
    for part in problem.slices(rank):
        come = [Receive(peer, Piece(partial_sum(peer), part)) for peer in rail if peer != rank]
        yield [*come, Reduce(part, tuple(map(partial_sum, rail)), TOTAL, HOST_SUMS if beside else COMPUTE)]
