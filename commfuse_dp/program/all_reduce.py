"""All-reduce in rounds: the first slice of every owner is summed and handed out while the partials of the next are computed.

Timeline of rank r, N = 2, m = 3, pairwise (o: the other rank; P: partial of a slice, T: its total; > = in flight)

    compute | o0  | r0  | o1  | r1  | o2  | r2  |
    send    |     |>P o0|     |>P o1|>T r0|>P o2|>T r1 >T r2
    receive |     |>P r0|     |>P r1|>T o0|>P r2|>T o1 >T o2

Half of the bytes are partials, half are totals. What nothing computed hides is the way of the last round's totals: 1/m of that
half. The own slice is the last of every round, as in a reduce-scatter: scatter.py says how a slice is added up, and gather.py
how a total comes to all ranks. A round's sums come behind the next round's products: peers' partials have this time to come.

An owner whose rows are fewer than m has fewer slices; it takes part in the last rounds (`round_of`). Through hosts all slices
are one round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commfuse_dp.program.gather import arrivals, gather
from commfuse_dp.program.layout import Slice
from commfuse_dp.program.operations import Consume, Operation, Problem, Produce, Receive, Reduce, Send
from commfuse_dp.program.scatter import productions, scatter

Steps = list[list[Operation]]


def all_reduce(problem: Problem, rank: int) -> Iterator[Operation]:
    """Every slice is produced once on each rank, and its total consumed once, round by round, own slices first."""
    if problem.way == "hosts":
        yield from scatter(problem, rank)
        yield from gather(problem, rank, total=True)
        return
    count = _rounds(problem)
    made, summed, shared, used = [_empty(count) for _ in range(4)]
    for step in productions(problem, rank, beside=True):
        _sort(problem, step, {Produce: made, Send: made, Receive: made, Reduce: made if _produces(step) else summed})
    for step in arrivals(problem, rank, total=True):
        _sort(problem, step, {Send: shared, Receive: shared})
        for op in step:
            if isinstance(op, Consume):
                used[op.piece.slice.index].append(op)
    for number in range(count):
        yield from made[number]
        for late in (summed, shared) if number else ():
            yield from late[number - 1]
    for late in (summed, shared) if count else ():
        yield from late[-1]
    for consumed in used:
        yield from consumed


def _empty(count: int) -> Steps:
    return [[] for _ in range(count)]


def round_of(problem: Problem, part: Slice) -> int:
    """In which round a slice is computed and summed."""
    return part.index + _rounds(problem) - len(problem.slices(part.owner))


def _rounds(problem: Problem) -> int:
    return max(map(len, problem.slices_by_source[0]))


def _produces(step: Sequence[Operation]) -> bool:
    return isinstance(step[0], Produce)


def _sort(problem: Problem, step: Sequence[Operation], into: dict[type[Operation], Steps]) -> None:
    for op in step:
        if type(op) in into:
            part = op.slice if isinstance(op, (Produce, Reduce)) else op.piece.slice
            into[type(op)][round_of(problem, part)].append(op)


__all__ = ["all_reduce", "round_of"]
