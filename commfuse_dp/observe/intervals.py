"""Arithmetic on half-open time intervals [start, end) in nanoseconds; pure functions, used by the timeline and its figures."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union as sorted, disjoint, non-empty intervals."""
    out: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """What is covered by `intervals` and by none of `holes`; sorted and disjoint."""
    out: list[Interval] = []
    cut = merge(holes)
    for start, end in merge(intervals):
        at = start
        for hole_start, hole_end in cut:
            if hole_end <= at:
                continue
            if hole_start >= end:
                break
            if hole_start > at:
                out.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            out.append((at, end))
    return out


def clip(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """The parts that lie inside [start, end)."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def intersect(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is covered by both; sorted and disjoint."""
    given = merge(intervals)
    return subtract(given, subtract(given, others))


def total(intervals: Iterable[Interval]) -> int:
    """Time covered, each instant counted once."""
    return sum(end - start for start, end in merge(intervals))


def head_and_tail(
    work: Iterable[Interval], waits: Iterable[Interval], *, margin: float = 0.02
) -> tuple[list[Interval], list[Interval]]:
    """The waiting before the first and after the last `margin` (fraction) of the work: the exposed head and tail.

    `work` is the time spent in forward and backward without waiting, `waits` the time blocked on a transfer. A margin, and
    not the very first instant of work, because a few microseconds of Python before the first all-gather are no compute.
    """
    done = merge(work)
    blocked = merge(waits)
    if not done or not blocked:
        return [], blocked
    amount = total(done)
    start_at = _instant(done, amount * margin)
    end_at = _instant(done, amount * (1.0 - margin))
    return clip(blocked, blocked[0][0], start_at), clip(blocked, end_at, blocked[-1][1])


def _instant(work: list[Interval], amount: float) -> int:
    """The instant at which `amount` ns of the work are done."""
    left = amount
    for start, end in work:
        if end - start >= left:
            return int(start + left)
        left -= end - start
    return work[-1][1]


def pack(intervals: Iterable[Interval]) -> list[int]:
    """Row for each interval (in the order given) such that intervals of one row do not overlap; as few rows as possible."""
    given = list(intervals)
    rows = [0] * len(given)
    free_at: list[int] = []
    for index in sorted(range(len(given)), key=lambda i: given[i]):
        start, end = given[index]
        row = next((r for r, at in enumerate(free_at) if at <= start), len(free_at))
        if row == len(free_at):
            free_at.append(end)
        else:
            free_at[row] = end
        rows[index] = row
    return rows
