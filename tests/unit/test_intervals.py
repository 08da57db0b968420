"""Interval arithmetic against sets of integer instants."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from commfuse_dp.observe.intervals import Interval, clip, head_and_tail, intersect, merge, pack, subtract, total

INTERVAL = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))
INTERVALS = st.lists(INTERVAL, max_size=8)


def instants(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in intervals for t in range(start, end)}


def is_canonical(intervals: list[tuple[int, int]]) -> bool:
    return all(a < b for a, b in intervals) and all(x[1] < y[0] for x, y in pairwise(intervals))


@given(INTERVALS)
def test_merge_and_total(intervals: list[tuple[int, int]]) -> None:
    merged = merge(intervals)
    assert instants(merged) == instants(intervals)
    assert is_canonical(merged)
    assert total(intervals) == len(instants(intervals))


@given(INTERVALS, INTERVALS)
def test_subtract(intervals: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    left = subtract(intervals, holes)
    assert instants(left) == instants(intervals) - instants(holes)
    assert left == sorted(left)
    assert sum(b - a for a, b in left) == len(instants(left))


@given(INTERVALS, INTERVALS)
def test_intersect(intervals: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    both = intersect(intervals, others)
    assert instants(both) == instants(intervals) & instants(others)
    assert total(both) == sum(b - a for a, b in both)


@given(INTERVALS, INTERVAL)
def test_clip(intervals: list[tuple[int, int]], window: tuple[int, int]) -> None:
    assert instants(clip(intervals, *window)) == instants(intervals) & instants([window])


@given(st.lists(INTERVAL.filter(lambda i: i[0] < i[1]), max_size=12))
def test_pack_uses_as_few_rows_as_overlap_demands(intervals: list[tuple[int, int]]) -> None:
    rows = pack(intervals)
    for row in set(rows):
        mine = [i for i, r in zip(intervals, rows, strict=True) if r == row]
        assert sum(b - a for a, b in mine) == len(instants(mine)), "two intervals of one row overlap"
    busiest = max((sum(a <= t < b for a, b in intervals) for t in range(61)), default=0)
    assert len(set(rows)) == busiest


def lengths(work: list[Interval], waits: list[Interval]) -> tuple[int, int]:
    head, tail = head_and_tail(work, waits)
    return total(head), total(tail)


def test_head_and_tail_of_a_step_that_waits_first_last_and_between() -> None:
    work = [(100, 600), (650, 1150)]
    waits = [(0, 100), (600, 650), (1150, 1180)]
    assert lengths(work, waits) == (100, 30)


def test_no_head_and_no_tail_if_waits_lie_between_work() -> None:
    assert lengths([(0, 500), (520, 1000)], [(500, 520)]) == (0, 0)
    assert lengths([(0, 500)], []) == (0, 0)


def test_a_moment_of_work_before_the_first_wait_does_not_hide_the_head() -> None:
    assert lengths([(0, 5), (105, 1000)], [(5, 105)]) == (100, 0)


def test_a_step_that_only_waits_is_all_tail() -> None:
    assert lengths([], [(3, 10)]) == (0, 7)
