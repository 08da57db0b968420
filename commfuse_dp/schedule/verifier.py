"""Proof that the programs of all ranks together do what their `Problem` asks for, with the least bytes and without waiting.

`verify` shows for a set of schedules that

* they finish under every interleaving, with channels bounded to `credit` messages (see the note in network.py);
* every slice is delivered exactly once: all-gather, all-reduce and all-to-all consume each piece once; in a sum each
  rank's partial counts exactly once, and is added in the order that orders.summation_order states;
* own first (consumption), own last (production), and no send follows a rank's last compute: no exposed head, no exposed tail;
* the rows moved are the minimum of the order.

A rank that keeps no rows has no own slice to compute first or last, and is excepted from these rules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_dp.schedule.layout import Slice
from commfuse_dp.schedule.network import Network, Value, VerificationError
from commfuse_dp.schedule.operations import TOTAL, Consume, Operation, Piece, Problem, Produce, Reduce, Schedule, Send
from commfuse_dp.schedule.orders import summation_order

__all__ = ["Proof", "VerificationError", "minimum_rows", "verify"]


@dataclass(frozen=True)
class Proof:
    """What was counted while proving."""

    rows_sent: tuple[int, ...]  # per rank
    rows_received: tuple[int, ...]
    messages: tuple[int, ...]  # sent, per rank
    steps: int  # operations executed, all ranks


def minimum_rows(problem: Problem) -> int:
    """The least number of rows that all ranks together must send (times links, for a ring all-to-all).

    All-gather: every rank needs every row that it does not keep. Reduce-scatter: every row is summed over N ranks, which
    takes N-1 moves on any tree. All-reduce: both.
    """
    n = problem.world_size
    if problem.collective == "all_to_all":
        ring = problem.order == "ring"
        return sum(
            rows * ((to - source) % n if ring else to != source)
            for source, row in enumerate(problem.sizes)
            for to, rows in enumerate(row)
        )
    once = (n - 1) * sum(problem.sizes)
    return 2 * once if problem.collective == "all_reduce" else once


def verify(schedules: Sequence[Schedule], *, credit: int = 1, pick: random.Random | None = None) -> Proof:
    """Prove the programs of all ranks, given in rank order. Raises VerificationError naming rank, operation and slice.

    pick: runs a random interleaving and not the greedy one; the outcome is the same, tests show it.
    """
    if not schedules:
        raise ValueError("verify: no schedules given")
    problem = schedules[0].problem
    for rank, schedule in enumerate(schedules):
        if schedule.rank != rank or schedule.problem != problem:
            raise VerificationError(
                f"its schedule is for rank {schedule.rank} and {schedule.problem}; expected rank {rank} and {problem}",
                rank=rank,
            )
    if len(schedules) != problem.world_size:
        raise VerificationError(f"{len(schedules)} schedules for {problem.world_size} ranks", rank=len(schedules))
    for schedule in schedules:
        _check_work(schedule)
        _check_own_first_and_last(schedule)
        _check_no_tail(schedule)
    network = Network(schedules, credit=credit, pick=pick)
    network.run()
    _check_values(problem, network)
    _check_rows(problem, schedules)
    return Proof(
        tuple(s.rows_sent for s in schedules),
        tuple(s.rows_received for s in schedules),
        tuple(sum(map(len, s.send_lanes.values())) for s in schedules),
        network.steps,
    )


# ---- what a rank computes --------------------------------------------------------------------------------------------
def _all_slices(problem: Problem, source: int) -> list[Slice]:
    return [part for owner in range(problem.world_size) for part in problem.slices(owner, source)]


def _work(problem: Problem, rank: int) -> tuple[list[Slice], list[Piece]]:
    """(slices to produce, pieces to consume), in any order."""
    everything = range(problem.world_size)
    if problem.collective == "all_gather":
        return [], [Piece(part.owner, part) for part in _all_slices(problem, rank)]
    produce = _all_slices(problem, rank)
    if problem.collective == "reduce_scatter":
        return produce, []
    if problem.collective == "all_reduce":
        return produce, [Piece(TOTAL, part) for part in produce]
    return produce, [Piece(source, part) for source in everything for part in problem.slices(rank, source)]


def _check_work(schedule: Schedule) -> None:
    produce, consume = _work(schedule.problem, schedule.rank)
    wanted = Counter([Produce(part) for part in produce] + [Consume(piece) for piece in consume])  # type: ignore[list-item]
    found = Counter(op for op in schedule.operations if isinstance(op, (Produce, Consume)))
    for op in wanted - found:
        raise VerificationError("the program lacks this operation", rank=schedule.rank, operation=op)
    for op in found - wanted:
        raise VerificationError("this operation is done once too often", rank=schedule.rank, operation=op)


def _is_own(op: Operation, rank: int) -> bool:
    return (op.slice if isinstance(op, (Produce, Reduce)) else op.piece.slice).owner == rank


def _check_own_first_and_last(schedule: Schedule) -> None:
    problem, rank = schedule.problem, schedule.rank
    if not problem.slices(rank, rank):
        return
    produced = [op for op in schedule.operations if isinstance(op, Produce)]
    if produced and not _is_own(produced[-1], rank):
        raise VerificationError("the own slice must be produced last", rank=rank, operation=produced[-1])
    consumed = [op for op in schedule.operations if isinstance(op, Consume)]
    if not consumed:
        return
    first = consumed[0]
    # All blocks consumed in an all-to-all are owned by this rank: there the own one is the one that came from it.
    own = first.piece.origin == rank if problem.collective == "all_to_all" else _is_own(first, rank)
    if not own:
        raise VerificationError("the own slice must be consumed first", rank=rank, operation=first)


def _check_no_tail(schedule: Schedule) -> None:
    """No send after the last compute, and none of a partial after the last production."""
    problem, rank, ops = schedule.problem, schedule.rank, schedule.operations
    if problem.collective == "all_to_all":
        # A rank that is sent nothing by some source has nothing left to compute while it still passes on others' blocks.
        excepted = any(problem.sizes[source][rank] == 0 for source in range(problem.world_size))
    else:
        excepted = problem.sizes[rank] == 0
    if excepted:
        return
    computes = [i for i, op in enumerate(ops) if isinstance(op, (Produce, Consume))]
    produces = [i for i in computes if isinstance(ops[i], Produce)]
    for i, op in enumerate(ops):
        if not isinstance(op, Send):
            continue
        if i > computes[-1]:
            raise VerificationError("a send after the last compute is exposed", rank=rank, operation=op)
        partial = problem.collective in ("reduce_scatter", "all_reduce") and op.piece.origin != TOTAL
        if partial and i > produces[-1]:
            raise VerificationError("a partial sent after the last one is computed is exposed", rank=rank, operation=op)


# ---- what came out ---------------------------------------------------------------------------------------------------
def _is_leaf(value: Value) -> bool:
    return isinstance(value[0], int)


def _terms(value: Value) -> tuple[list[Value], bool]:
    """Leaves of a sum from left to right, and whether it is a left fold (every right operand a leaf)."""
    leaves: list[Value] = []
    left_fold, stack = True, [value]
    while stack:
        node = stack.pop()
        if _is_leaf(node):
            leaves.append(node)
            continue
        left_fold &= _is_leaf(node[1])
        stack += [node[1], node[0]]
    return leaves, left_fold


def _check_values(problem: Problem, network: Network) -> None:
    summed = problem.collective in ("reduce_scatter", "all_reduce")
    for rank, state in enumerate(network.ranks):
        if not summed:
            for op in state.compute.operations:
                if isinstance(op, Consume) and state.pieces[op.piece] != (op.piece.origin, op.piece.slice):
                    raise VerificationError(f"holds {state.pieces[op.piece]} instead", rank=rank, operation=op)
            continue
        parts = _all_slices(problem, rank) if problem.collective == "all_reduce" else problem.slices(rank)
        for part in parts:
            total = state.pieces.get(Piece(TOTAL, part))
            if total is None:
                raise VerificationError(f"slice {part.index} of owner {part.owner} is never summed", rank=rank, slice=part)
            leaves, left_fold = _terms(total)
            _check_terms(problem, rank, part, leaves, left_fold)


def _check_terms(problem: Problem, rank: int, part: Slice, leaves: list[Value], left_fold: bool) -> None:
    what = f"the sum of slice {part.index} of owner {part.owner}"
    found = [leaf[0] for leaf in leaves]
    if any(leaf[1] != part for leaf in leaves) or sorted(found) != list(range(problem.world_size)):
        raise VerificationError(f"{what} has the terms of ranks {found}: each must count exactly once", rank=rank, slice=part)
    wanted = summation_order(part.owner, problem.world_size, problem.order)
    if tuple(found) != wanted or not left_fold:
        raise VerificationError(f"{what} adds up in the order {found}, not {list(wanted)}", rank=rank, slice=part)


def _check_rows(problem: Problem, schedules: Sequence[Schedule]) -> None:
    least = minimum_rows(problem)
    moved = sum(schedule.rows_sent for schedule in schedules)
    if moved != least:
        worst = max(schedules, key=lambda schedule: schedule.rows_sent)
        raise VerificationError(f"all ranks together send {moved} rows; {least} is the minimum", rank=worst.rank)
