"""The programs of the plain collectives, of one rank or of all.

    program = build(Problem("all_gather", sizes=(4, 4, 3), order="ring", slices_per_rank=2), rank=1)

A program costs O(N m) operations to build and to hold, except a ring all-to-all, which forwards O(N^2 m) pieces.
"""

from __future__ import annotations

from commfuse_dp.program.all_reduce import all_reduce
from commfuse_dp.program.all_to_all import exchange
from commfuse_dp.program.gather import gather
from commfuse_dp.program.operations import Problem, Program
from commfuse_dp.program.scatter import scatter


def build(problem: Problem, rank: int) -> Program:
    """The program of one rank. Raises ValueError for a rank outside the world."""
    check_rank(problem, rank)
    return Program((problem,), rank, tuple(_BUILDERS[problem.collective](problem, rank)))


def build_all(problem: Problem) -> list[Program]:
    """The programs of all ranks."""
    return [build(problem, rank) for rank in range(problem.world_size)]


def check_rank(problem: Problem, rank: int) -> None:
    if not 0 <= rank < problem.world_size:
        raise ValueError(f"rank={rank}: must lie in 0 .. {problem.world_size - 1} (world_size={problem.world_size})")


_BUILDERS = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": all_reduce, "all_to_all": exchange}
