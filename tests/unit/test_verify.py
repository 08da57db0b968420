"""Every builder proved over random worlds; every kind of damage to a program is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.program.build import build, build_all
from commfuse_dp.program.operations import (
    COLLECTIVES,
    Consume,
    Operation,
    Piece,
    Problem,
    Produce,
    Program,
    Receive,
    Reduce,
    Send,
)
from commfuse_dp.program.orders import ORDERS
from commfuse_dp.program.verify import VerificationError, minimum_rows, verify


@st.composite
def problems(draw: st.DrawFn, largest: int = 64) -> Problem:
    collective = draw(st.sampled_from(COLLECTIVES))
    order = draw(st.sampled_from(ORDERS))
    # A ring all-to-all forwards O(N^3) pieces in all: keep it small.
    n = draw(st.integers(1, min(largest, 12) if collective == "all_to_all" else largest))
    rng = random.Random(draw(st.integers(0, 2**32)))
    rows = st.integers(0, 7)
    top = draw(rows)

    def sizes() -> tuple[int, ...]:
        return tuple(rng.randint(0, top) for _ in range(n))

    table = tuple(sizes() for _ in range(n)) if collective == "all_to_all" else sizes()
    return Problem(collective, table, order, draw(st.integers(1, 3)))  # type: ignore[arg-type]


def prove(problem: Problem, credit: int) -> None:
    proof = verify(build_all(problem), credit=credit)
    assert sum(proof.rows_sent) == sum(proof.rows_received) == minimum_rows(problem)
    if problem.collective == "all_gather":
        assert proof.rows_received == tuple(sum(problem.sizes) - own for own in problem.sizes)
    if problem.collective == "reduce_scatter":
        assert proof.rows_sent == tuple(sum(problem.sizes) - own for own in problem.sizes)


@settings(max_examples=15)
@given(problem=problems(), credit=st.integers(1, 3))
def test_every_program_is_proved(problem: Problem, credit: int) -> None:
    prove(problem, credit)


@pytest.mark.slow
@settings(max_examples=60)
@given(problem=problems(), credit=st.integers(1, 3))
def test_more_programs_are_proved(problem: Problem, credit: int) -> None:
    prove(problem, credit)


@settings(max_examples=25)
@given(problem=problems(largest=7), seed=st.integers(0, 2**32))
def test_random_interleavings_end_like_the_greedy_one(problem: Problem, seed: int) -> None:
    programs = build_all(problem)
    assert verify(programs, credit=1, pick=random.Random(seed)) == verify(programs, credit=1)


def test_minimum_is_the_textbook_one() -> None:
    assert minimum_rows(Problem("all_gather", (4, 4, 4))) == 3 * 8  # each receives (N-1)/N of 12
    assert minimum_rows(Problem("all_reduce", (4, 4, 4))) == 2 * 3 * 8
    assert minimum_rows(Problem("all_to_all", ((1, 2), (3, 4)))) == 5
    assert minimum_rows(Problem("all_to_all", ((0, 0, 5), (0, 0, 0), (0, 0, 0)), "ring")) == 10  # two links away


# ---- damage ----------------------------------------------------------------------------------------------------------
Ops = list[Operation]


def damaged(problem: Problem, rank: int, change: Callable[[Ops], Ops]) -> list[Program]:
    programs = build_all(problem)
    programs[rank] = replace(programs[rank], operations=tuple(change(list(programs[rank].operations))))
    return programs


def first(ops: Ops, kind: type, skip: int = 0) -> int:
    return [i for i, op in enumerate(ops) if isinstance(op, kind)][skip]


def drop(kind: type, skip: int = 0) -> Callable[[Ops], Ops]:
    return lambda ops: [op for i, op in enumerate(ops) if i != first(ops, kind, skip)]


def twice(kind: type) -> Callable[[Ops], Ops]:
    return lambda ops: ops[: first(ops, kind) + 1] + ops[first(ops, kind) :]


def swap(kind: type, a: int, b: int) -> Callable[[Ops], Ops]:
    def change(ops: Ops) -> Ops:
        i, j = first(ops, kind, a), first(ops, kind, b)
        ops[i], ops[j] = ops[j], ops[i]
        return ops

    return change


def to_end(kind: type) -> Callable[[Ops], Ops]:
    return lambda ops: [*drop(kind)(ops), ops[first(ops, kind)]]


def redirect(ops: Ops) -> Ops:
    i = first(ops, Send)
    ops[i] = replace(ops[i], to=2)  # and not 0
    return ops


def sum_without_last(ops: Ops) -> Ops:
    i = first(ops, Reduce)
    ops[i] = replace(ops[i], inputs=ops[i].inputs[:-1])
    return ops


def sum_reversed(ops: Ops) -> Ops:
    i = first(ops, Reduce)
    ops[i] = replace(ops[i], inputs=ops[i].inputs[::-1])
    return ops


def sum_one_twice(ops: Ops) -> Ops:
    i = first(ops, Reduce)
    ops[i] = replace(ops[i], inputs=(*ops[i].inputs[:-1], ops[i].inputs[0]))
    return ops


AG, RS, AR, A2A = COLLECTIVES
SIZES = (4, 3, 4)
TABLE = (SIZES, SIZES, SIZES)
MUTATIONS = [
    # collective, order, change, part of the message
    (AG, "pairwise", drop(Send), "does not send it"),
    (AG, "ring", drop(Send, -1), "does not send it"),
    (AG, "pairwise", drop(Receive), "neither received nor computed here"),
    (AG, "pairwise", drop(Consume), "lacks this operation"),
    (AG, "pairwise", twice(Send), "at this point|never receives it|does not receive it"),
    (AG, "pairwise", twice(Receive), "at this point|does not send it|delivered or computed twice"),
    (AG, "pairwise", twice(Consume), "once too often"),
    (AG, "pairwise", swap(Send, 0, 1), "at this point"),
    (AG, "ring", swap(Send, 0, 1), "at this point"),
    (AG, "pairwise", swap(Consume, 0, 2), "own slice must be consumed first"),
    (AG, "ring", to_end(Send), "after the last compute is exposed"),
    (AG, "pairwise", redirect, "at this point|does not send it|does not receive it"),
    (RS, "pairwise", drop(Send), "does not send it"),
    (RS, "ring", drop(Send), "sends slice 0 of owner 2 .* at this point"),
    (RS, "pairwise", drop(Produce), "lacks this operation"),
    (RS, "pairwise", swap(Produce, 0, -1), "own slice must be produced last"),
    (RS, "pairwise", to_end(Send), "after the last compute is exposed"),
    (RS, "pairwise", drop(Reduce), "is never summed"),
    (RS, "pairwise", sum_without_last, "must count exactly once"),
    (RS, "pairwise", sum_one_twice, "must count exactly once"),
    (RS, "pairwise", sum_reversed, "adds up in the order"),
    (RS, "ring", twice(Reduce), "computed twice"),
    (RS, "ring", drop(Reduce), "neither received nor computed here"),
    (AR, "pairwise", drop(Send), r"sends slice 0 of owner 1 \(total\) at this point"),
    (AR, "ring", drop(Send, -1), "does not send it"),
    (AR, "pairwise", swap(Consume, 0, 2), "own slice must be consumed first"),
    (A2A, "pairwise", drop(Send), "does not send it"),
    (A2A, "ring", drop(Receive), "rank 0 sends slice 0 of owner 2 .* at this point"),
    (A2A, "pairwise", swap(Consume, 0, 2), "own slice must be consumed first"),
    (A2A, "pairwise", swap(Send, 0, 1), "at this point"),
]


@pytest.mark.parametrize("case", MUTATIONS, ids=[f"{i}-{c[0]}-{c[1]}" for i, c in enumerate(MUTATIONS)])
def test_damage_is_found(case: tuple[str, str, Callable[[Ops], Ops], str]) -> None:
    collective, order, change, message = case
    m = 2 if message == "at this point" else 1  # what changes places must be on one lane
    problem = Problem(collective, TABLE if collective == A2A else SIZES, order, m)  # type: ignore[arg-type]
    verify(build_all(problem))
    with pytest.raises(VerificationError, match=message) as caught:
        verify(damaged(problem, 1, change), credit=2)
    assert 0 <= caught.value.rank < 3


def test_more_rows_than_the_minimum_are_found() -> None:
    """Rank 0 sends a partial that rank 1 receives and nobody needs."""
    problem = Problem("reduce_scatter", (2, 2))
    useless = Piece(0, problem.slices(0)[0])
    a, b = build_all(problem)
    a = replace(a, operations=(Send(1, useless), *a.operations))
    b = replace(b, operations=(Receive(0, useless), *b.operations))
    with pytest.raises(VerificationError, match="6 rows; 4 is the minimum"):
        verify([a, b])


def test_a_circular_wait_is_a_deadlock_under_every_interleaving() -> None:
    """Both ranks add up their own slice first, for which they need what the other one adds up only afterwards."""
    problem = Problem("reduce_scatter", (2, 2), "ring")
    looped = []
    for program in build_all(problem):
        other, own = (op for op in program.operations if isinstance(op, Reduce))
        rest = [op for op in program.operations if not isinstance(op, Reduce)]
        looped.append(replace(program, operations=(*rest, own, other)))
    for seed in range(20):
        for credit in (1, 5):
            with pytest.raises(VerificationError, match=r"deadlock.*rank 0 at .*rank 1 at "):
                verify(looped, credit=credit, pick=random.Random(seed) if seed else None)


def test_wrong_sets_of_schedules() -> None:
    problem = Problem("all_gather", (2, 2))
    with pytest.raises(VerificationError, match="1 programs for 2 ranks"):
        verify([build(problem, 0)])
    with pytest.raises(VerificationError, match="expected rank 1"):
        verify([build(problem, 0), build(problem, 0)])
    with pytest.raises(ValueError, match="rank=2"):
        build(problem, 2)
    with pytest.raises(ValueError, match="collective='gather'"):
        Problem("gather", (1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sizes\[1\]"):
        Problem("all_to_all", ((1, 2), (1,)))
    with pytest.raises(ValueError, match=r"sizes\[0\]=-1"):
        Problem("all_gather", (-1, 2))
