"""All-to-all: every rank computes a block for every other, and consumes those that are for it."""

from __future__ import annotations

from collections.abc import Iterator

from commfuse_dp.program.operations import Consume, Operation, Piece, Problem, Produce, Receive, Send


def exchange(problem: Problem, rank: int) -> Iterator[Operation]:
    return _ring(problem, rank) if problem.way == "ring" else _direct(problem, rank)


def _direct(problem: Problem, rank: int) -> Iterator[Operation]:
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


def _ring(problem: Problem, rank: int) -> Iterator[Operation]:
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
