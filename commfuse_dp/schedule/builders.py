"""The programs: all-gather, reduce-scatter, all-reduce and all-to-all, in pairwise and in ring order.

    schedule = build(Problem("all_gather", sizes=(4, 4, 3), order="ring", slices_per_rank=2), rank=1)

Timeline of rank r, N = 4, m = 1 (one column = the compute time of one slice; > = in flight)

    pairwise all-gather            ring reduce-scatter (Algorithm 2)
    compute | r | r+1 | r+2 | r+3  compute | r-1 | r-2  | r-3  | r      own last
    receive | >r+1 >r+2 >r+3 |     receive |     | >r-2 | >r-3 | >r     running sums from r-1
    send    | >r-1 >r-2 >r-3 |     send    |     | >r-1 | >r-2 | >r-3   running sums to r+1: nothing after the last compute

A program costs O(N m) operations to build and to hold, except a ring all-to-all, which forwards O(N^2 m) pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commfuse_dp.schedule.layout import Slice
from commfuse_dp.schedule.operations import (
    TOTAL,
    Consume,
    Operation,
    Piece,
    Problem,
    Produce,
    Receive,
    Reduce,
    Schedule,
    Send,
    partial_sum,
)
from commfuse_dp.schedule.orders import gather_owners, scatter_owners, summation_order


def build(problem: Problem, rank: int) -> Schedule:
    """The program of one rank. Raises ValueError for a rank outside the world."""
    if not 0 <= rank < problem.world_size:
        raise ValueError(f"rank={rank}: must lie in 0 .. {problem.world_size - 1} (world_size={problem.world_size})")
    return Schedule(problem, rank, tuple(_BUILDERS[problem.collective, problem.order](problem, rank)))


def build_all(problem: Problem) -> list[Schedule]:
    """The programs of all ranks."""
    return [build(problem, rank) for rank in range(problem.world_size)]


# ---- all-gather ------------------------------------------------------------------------------------------------------
def gather_pairwise(problem: Problem, rank: int, *, total: bool = False) -> Iterator[Operation]:
    """Own slices straight to r-1, r-2, ...: the order in which these ranks consume them (each consumes r, r+1, ...).

    total: gather sums (the second half of an all-reduce) and not the ranks' own data.
    """
    n = problem.world_size
    for step in range(1, n):
        for part in problem.slices(rank):
            yield Send((rank - step) % n, _gathered(part, total))
    for owner in gather_owners(rank, n, "pairwise"):
        for part in problem.slices(owner):
            if owner != rank:
                yield Receive(owner, _gathered(part, total))
            yield Consume(_gathered(part, total))


def gather_ring(problem: Problem, rank: int, *, total: bool = False) -> Iterator[Operation]:
    """Algorithm 1: every slice goes round the ring; what the neighbour r+1 owns itself is not sent to it."""
    n = problem.world_size
    for owner in gather_owners(rank, n, "ring"):
        for part in problem.slices(owner):
            piece = _gathered(part, total)
            if owner != rank:
                yield Receive((rank - 1) % n, piece)
            if owner != (rank + 1) % n:
                yield Send((rank + 1) % n, piece)
            yield Consume(piece)


def _gathered(part: Slice, total: bool) -> Piece:
    return Piece(TOTAL if total else part.owner, part)


# ---- reduce-scatter --------------------------------------------------------------------------------------------------
def scatter_pairwise(problem: Problem, rank: int) -> Iterator[Operation]:
    """Partials straight to their owners r+1, r+2, ..., own last; the owner adds all of them up in rank order."""
    n = problem.world_size
    for owner in scatter_owners(rank, n, "pairwise"):
        for part in problem.slices(owner):
            yield Produce(part)
            if owner != rank:
                yield Send(owner, Piece(rank, part))
    for part in problem.slices(rank):
        for step in range(1, n):
            source = (rank - step) % n
            yield Receive(source, Piece(source, part))
        yield Reduce(part, summation_order(rank, n, "pairwise"), TOTAL)


def scatter_ring(problem: Problem, rank: int) -> Iterator[Operation]:
    """Algorithm 2: the running sum of owner o's slices starts at o+1, takes up every rank's partial, ends at o."""
    n = problem.world_size
    before, after = (rank - 1) % n, (rank + 1) % n
    for owner in scatter_owners(rank, n, "ring"):
        starts_here = owner == before  # for N = 1 too: nothing has been added up before
        inputs = (rank,) if starts_here else (partial_sum(before), rank)
        output = TOTAL if owner == rank else partial_sum(rank)
        for part in problem.slices(owner):
            yield Produce(part)
            if not starts_here:
                yield Receive(before, Piece(partial_sum(before), part))
            yield Reduce(part, inputs, output)
            if owner != rank:
                yield Send(after, Piece(output, part))


# ---- all-reduce ------------------------------------------------------------------------------------------------------
def _reduce_pairwise(problem: Problem, rank: int) -> Iterator[Operation]:
    yield from scatter_pairwise(problem, rank)
    yield from gather_pairwise(problem, rank, total=True)


def _reduce_ring(problem: Problem, rank: int) -> Iterator[Operation]:
    yield from scatter_ring(problem, rank)
    yield from gather_ring(problem, rank, total=True)


# ---- all-to-all ------------------------------------------------------------------------------------------------------
def exchange_pairwise(problem: Problem, rank: int) -> Iterator[Operation]:
    """Blocks for others are produced and sent first, the own block is produced last and consumed first; then r-1, r-2, ..."""
    n = problem.world_size
    for step in range(1, n + 1):
        owner = (rank + step) % n
        for part in problem.slices(owner, rank):
            yield Produce(part)
            if owner != rank:
                yield Send(owner, Piece(rank, part))
    for step in range(n):
        source = (rank - step) % n
        for part in problem.slices(rank, source):
            if step:
                yield Receive(source, Piece(source, part))
            yield Consume(Piece(source, part))


def exchange_ring(problem: Problem, rank: int) -> Iterator[Operation]:
    """Through the neighbours: in round k the blocks of rank r-k arrive, those for this rank stay, the others go on.

    Within a round the blocks with the farthest way to go are first. A block moves over (destination - source) mod N links,
    which is the least a one-way ring allows; use it only where no direct links exist.
    """
    n = problem.world_size
    after, before = (rank + 1) % n, (rank - 1) % n
    for distance in range(n - 1, -1, -1):
        for part in problem.slices((rank + distance) % n, rank):
            yield Produce(part)
            if distance:
                yield Send(after, Piece(rank, part))
    for part in problem.slices(rank, rank):
        yield Consume(Piece(rank, part))
    for hops in range(1, n):
        source = (rank - hops) % n
        for distance in range(n - 1 - hops, -1, -1):
            for part in problem.slices((rank + distance) % n, source):
                yield Receive(before, Piece(source, part))
                yield Send(after, Piece(source, part)) if distance else Consume(Piece(source, part))


_BUILDERS: dict[tuple[str, str], Callable[[Problem, int], Iterator[Operation]]] = {
    ("all_gather", "pairwise"): gather_pairwise,
    ("all_gather", "ring"): gather_ring,
    ("reduce_scatter", "pairwise"): scatter_pairwise,
    ("reduce_scatter", "ring"): scatter_ring,
    ("all_reduce", "pairwise"): _reduce_pairwise,
    ("all_reduce", "ring"): _reduce_ring,
    ("all_to_all", "pairwise"): exchange_pairwise,
    ("all_to_all", "ring"): exchange_ring,
}
