"""The order of attention's blocks: each once, complete when it must be, and something left to compute for both ends."""

from __future__ import annotations

import itertools

import pytest

from commfuse_dp.ops.attention.block_order import BackwardBlocks, ForwardBlocks, Span, arrivals, runs
from commfuse_dp.program.build import build
from commfuse_dp.program.operations import Consume, Problem

WORLDS = [((4,), 1), ((3, 3), 1), ((3, 4), 2), ((0, 5, 2), 3), ((4, 4, 4, 4), 1), ((4, 0, 4, 1), 2)]


class Recorder:
    """Blocks of single positions that have been computed."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def __call__(self, queries: Span, keys: Span) -> None:
        self.done += itertools.product(range(*queries), range(*keys))


def departures(order: list[Span], own: int) -> list[Span]:
    """Others' slices, those of r+1 first, then the own ones."""
    return sorted(order[own:]) + order[:own]


@pytest.mark.parametrize(("sizes", "m"), WORLDS)
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_every_block_is_computed_once_and_in_time(sizes, m, passes):
    for rank in range(len(sizes)):
        order, record = arrivals(sizes, m, rank), Recorder()
        own = min(m, sizes[rank])
        blocks = ForwardBlocks(order, record) if passes == "forward" else BackwardBlocks(order, own, record)
        here: set[int] = set()
        for span in order:
            here.update(range(*span))
            blocks.arrived(span)
            needed = {position for pair in record.done for position in (pair if passes == "forward" else pair[:1])}
            assert needed <= here
        length = sum(sizes)
        for number, span in enumerate(departures(order, own)):
            before = len(record.done)
            blocks.finished(span)
            for position in range(*span):
                row = {key for query, key in record.done if query == position}
                column = {query for query, key in record.done if key == position}
                assert row == set(range(length)) and (passes == "forward" or column == set(range(length)))
            if number == 0 and len(order) > 1:
                assert len(record.done) > before  # it hides what leaves first, or what came last
        assert len(record.done) == len(set(record.done)) == length**2


def test_the_end_of_a_backward_has_something_to_compute():
    order, record = arrivals((4, 4), 2, 0), Recorder()
    blocks = BackwardBlocks(order, 2, record)
    for span in order:
        blocks.arrived(span)
    *others, last = departures(order, 2)
    for span in others:
        blocks.finished(span)
    left = len(record.done)
    blocks.finished(last)
    assert len(record.done) - left == 4


@pytest.mark.parametrize(("sizes", "m"), WORLDS)
@pytest.mark.parametrize("order", ["pairwise", "ring"])
def test_arrivals_are_those_of_the_program(sizes, m, order):
    n = len(sizes)
    problem = Problem("all_to_all", tuple((size,) * n for size in sizes), order, m)
    for rank in range(n):
        consumed = [op.piece for op in build(problem, rank).operations if isinstance(op, Consume)]
        found = []
        for piece in consumed:
            offset = piece.slice.start - problem.slices(rank, piece.origin)[0].start + sum(sizes[: piece.origin])
            found.append(Span(offset, offset + piece.slice.size))
        assert found == arrivals(sizes, m, rank)


def test_runs():
    assert runs([Span(4, 6), Span(0, 2), Span(2, 4), Span(8, 9)]) == [Span(0, 6), Span(8, 9)]
    assert runs([]) == []
