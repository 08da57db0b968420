"""Proof that the programs of all ranks together do what their problems ask for, with the least bytes and without waiting.

`verify` shows for a set of programs that

* they finish under every interleaving, with channels bounded to `credit` messages (see the note in network.py);
* every slice is delivered exactly once: all-gather, all-reduce and all-to-all consume each piece once; in a sum each
  rank's partial counts exactly once, and is added in the order of `fold`;
* no exposed head: what is computed first needs nothing from a peer; no exposed tail: the own slice is produced last, and no
  send follows a rank's last compute;
* the rows moved are the minimum; on the way through hosts also those between hosts.

A rank that keeps no rows has no own slice to compute first or last, and is excepted from these rules. For a whole step the
rules of head and tail are those of its layers' programs, verified one by one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.layout import Slice
from commfuse_dp.program.network import Network, Value, VerificationError
from commfuse_dp.program.operations import TOTAL, Consume, Operation, Piece, Problem, Produce, Program, Send

__all__ = ["Proof", "VerificationError", "fold", "minimum_rows", "verify"]


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


def minimum_between_hosts(problem: Problem) -> int:
    """Rows that must cross hosts: to gather, every shard once to every other host; to reduce, one sum of every host."""
    assert problem.hosts is not None
    return (len(problem.hosts.members) - 1) * sum(problem.sizes)


def fold(problem: Problem, owner: int) -> tuple:
    """The order in which the partials of `owner`'s slices are added up: ranks from left to right; a tuple in it is a sum that
    has been made before.

    direct: rank order 0, 1, 2, ... for every owner, so that results do not depend on who owns a row. ring: from owner+1 to the
    owner. hosts: a sum of every host, in the order of hosts.
    """
    n = problem.world_size
    if problem.way == "hosts":
        assert problem.hosts is not None
        first, *others = problem.hosts.members
        return (*first, *(ranks if len(ranks) > 1 else ranks[0] for ranks in others))
    return tuple((owner + t) % n for t in range(1, n + 1)) if problem.way == "ring" else tuple(range(n))


def verify(programs: Sequence[Program], *, credit: int = 1, pick: random.Random | None = None, ends: bool = True) -> Proof:
    """Prove the programs of all ranks, given in rank order. Raises VerificationError naming rank, operation and slice.

    pick: runs a random interleaving and not the greedy one; the outcome is the same, tests show it.
    ends: whether the rules of head and tail hold for them (not for a whole step).
    """
    if not programs:
        raise ValueError("verify: no programs given")
    problems = programs[0].problems
    for rank, program in enumerate(programs):
        if program.rank != rank or program.problems != problems:
            raise VerificationError(
                f"its program is for rank {program.rank} and {program.problems}; expected rank {rank} and {problems}", rank=rank
            )
    if len(programs) != programs[0].world_size:
        raise VerificationError(f"{len(programs)} programs for {programs[0].world_size} ranks", rank=len(programs))
    for program in programs:
        _check_work(program)
        if ends:
            _check_head(program)
            _check_tail(program)
    network = Network(programs, credit=credit, pick=pick)
    network.run()
    for problem in problems:
        _check_values(problem, network)
    _check_rows(programs)
    return Proof(
        tuple(p.rows_sent for p in programs),
        tuple(p.rows_received for p in programs),
        tuple(sum(map(len, p.send_lanes.values())) for p in programs),
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


def _check_work(program: Program) -> None:
    wanted: Counter[Operation] = Counter()
    for problem in program.problems:
        produce, consume = _work(problem, program.rank)
        wanted.update([*map(Produce, produce), *map(Consume, consume)])
    found: Counter[Operation] = Counter(op for op in program.operations if isinstance(op, (Produce, Consume)))
    for op in wanted - found:
        raise VerificationError("the program lacks this operation", rank=program.rank, operation=op)
    for op in found - wanted:
        raise VerificationError("this operation is done once too often", rank=program.rank, operation=op)


def _products(program: Program) -> list[Produce | Consume]:
    return [op for op in program.compute_lane if isinstance(op, (Produce, Consume))]


def _keeps_nothing(problem: Problem, rank: int) -> bool:
    """It has no own slice; or, in an all-to-all, is sent nothing by some source: then it has nothing left to compute while it
    still passes on others' blocks."""
    if problem.collective == "all_to_all":
        return any(problem.sizes[source][rank] == 0 for source in range(problem.world_size))
    return problem.sizes[rank] == 0


def _check_head(program: Program) -> None:
    """What is computed first needs nothing from a peer; what is only consumed begins with the own slice."""
    rank, computed = program.rank, _products(program)
    if any(not problem.slices(rank, rank) for problem in program.problems):
        return
    consumed = [op for op in computed if isinstance(op, Consume)]
    if any(problem.collective == "reduce_scatter" for problem in program.problems):
        consumed = [op for op in computed[:1] if isinstance(op, Consume)]
    if consumed and not (consumed[0].piece.origin == rank or consumed[0].piece == Piece(TOTAL, _own(program)[0])):
        raise VerificationError("the own slice must be consumed first", rank=rank, operation=consumed[0])


def _own(program: Program) -> tuple[Slice, ...]:
    return program.problems[0].slices(program.rank, program.rank)


def _check_tail(program: Program) -> None:
    """The own slice is produced last; no send after the last compute, and none of a partial after the last production."""
    rank, computed = program.rank, _products(program)
    produced = [op for op in computed if isinstance(op, Produce)]
    if any(not problem.slices(rank, rank) for problem in program.problems) or not computed:
        return
    if produced and produced[-1].slice.owner != rank:
        raise VerificationError("the own slice must be produced last", rank=rank, operation=produced[-1])
    if any(_keeps_nothing(problem, rank) for problem in program.problems):
        return
    beside = {Piece(op.output, op.slice) for lane in program.reduce_lanes.values() for op in lane}  # peers hold these up
    summed = {problem.tensor for problem in program.problems if problem.collective in ("reduce_scatter", "all_reduce")}
    last = program.operations.index(computed[-1])
    last_produced = program.operations.index(produced[-1]) if produced else -1
    for at, op in enumerate(program.operations):
        if not isinstance(op, Send) or op.piece in beside:
            continue
        if at > last:
            raise VerificationError("a send after the last compute is exposed", rank=rank, operation=op)
        if op.piece.slice.tensor in summed and op.piece.origin != TOTAL and at > last_produced:
            raise VerificationError("a partial sent after the last one is computed is exposed", rank=rank, operation=op)


# ---- what came out ---------------------------------------------------------------------------------------------------
def _terms(value: Value) -> object:
    """A sum as `fold` states it: the left fold of its terms; a leaf is its rank."""
    if isinstance(value[0], int):
        return value[0]
    terms, node = [], value
    while not isinstance(node[0], int):
        terms.append(_terms(node[1]))
        node = node[0]
    return (node[0], *reversed(terms))


def _leaves(value: Value) -> list[Value]:
    if isinstance(value[0], int):
        return [value]
    return [*_leaves(value[0]), *_leaves(value[1])]


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
            _check_terms(problem, rank, part, total)


def _check_terms(problem: Problem, rank: int, part: Slice, total: Value) -> None:
    what = f"the sum of slice {part.index} of owner {part.owner}"
    leaves = _leaves(total)
    ranks = [leaf[0] for leaf in leaves]
    if any(leaf[1] != part for leaf in leaves) or sorted(ranks) != list(range(problem.world_size)):
        raise VerificationError(f"{what} has the terms of ranks {ranks}: each must count exactly once", rank=rank, slice=part)
    found, wanted = _terms(total), fold(problem, part.owner)
    if found != (wanted if len(wanted) > 1 else wanted[0]):
        raise VerificationError(f"{what} adds up in the order {found}, not {wanted}", rank=rank, slice=part)


def _check_rows(programs: Sequence[Program]) -> None:
    problems = programs[0].problems
    least = sum(map(minimum_rows, problems))
    moved = sum(program.rows_sent for program in programs)
    if moved != least:
        worst = max(programs, key=lambda program: program.rows_sent)
        raise VerificationError(f"all ranks together send {moved} rows; {least} is the minimum", rank=worst.rank)
    for problem in problems:
        if problem.way == "hosts" and problem.hosts is not None:
            _check_rows_between_hosts(problem, problem.hosts, programs)


def _check_rows_between_hosts(problem: Problem, hosts: Hosts, programs: Sequence[Program]) -> None:
    crossed = [
        (program.rank, op)
        for program in programs
        for op in program.operations
        if isinstance(op, Send) and op.piece.slice.tensor == problem.tensor and op.to not in hosts.siblings(program.rank)
    ]
    rows, least = sum(op.piece.slice.size for _, op in crossed), minimum_between_hosts(problem)
    if rows != least:
        raise VerificationError(f"{rows} rows cross hosts; {least} is the minimum", rank=crossed[0][0] if crossed else 0)
