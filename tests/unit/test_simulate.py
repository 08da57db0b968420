"""The cost model against closed forms and bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.program.build import build_all
from commfuse_dp.program.operations import Problem, Send
from commfuse_dp.program.simulate import COMPUTE, RECEIVE, SEND, Costs, compute_per_row, estimate

ROWS = 12  # of one shard: divides by every m used here


def seconds(
    collective: str, order: str, n: int, *, compute: float, wire: float, latency: float = 0.0, m: int = 1, used: bool = True
) -> tuple:
    """(makespan, exposed) with `compute` seconds per shard and `wire` seconds to move one. used: to consume takes time, too."""
    sizes = tuple((ROWS,) * n for _ in range(n)) if collective == "all_to_all" else (ROWS,) * n
    per_row = compute / ROWS
    found = estimate(
        build_all(Problem(collective, sizes, order, m)),  # type: ignore[arg-type]
        Costs(1.0, ROWS / wire, latency, compute_per_row(produce_s=per_row, consume_s=per_row if used else 0.0)),
    )
    return found.makespan_s, found.exposed_s


@pytest.mark.parametrize(("n", "m"), list(itertools.product([1, 2, 3, 8], [1, 2, 3])))
@pytest.mark.parametrize("order", ["pairwise", "ring"])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_nothing_is_exposed_if_communication_is_not_longer_than_compute(collective: str, order: str, n: int, m: int) -> None:
    """The paper's claim: with T_comm <= T_comp per step there is neither head nor tail."""
    assert seconds(collective, order, n, compute=1.0, wire=1.0, m=m) == pytest.approx((n, 0.0))
    assert seconds(collective, order, n, compute=1.0, wire=0.8, latency=0.2 / m, m=m) == pytest.approx((n, 0.0))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_closed_forms_where_the_wire_is_the_limit(n: int) -> None:
    alpha, t, c = 0.1, 2.0, 0.5
    assert seconds("all_gather", "pairwise", n, compute=c, wire=t, latency=alpha) == pytest.approx(
        (alpha + (n - 1) * t + c, alpha + (n - 1) * (t - c))
    )
    assert seconds("all_gather", "pairwise", n, compute=0, wire=t, latency=alpha)[0] == pytest.approx(alpha + (n - 1) * t)
    assert seconds("all_gather", "ring", n, compute=0, wire=t, latency=alpha)[0] == pytest.approx((n - 1) * (alpha + t))
    # The first partial must be computed before anything can leave, then the wire is busy to the end.
    assert seconds("reduce_scatter", "pairwise", n, compute=c, wire=t, latency=alpha)[0] == pytest.approx(
        c + (n - 1) * t + alpha
    )
    assert seconds("all_to_all", "pairwise", n, compute=0, wire=t, latency=alpha)[0] == pytest.approx(alpha + (n - 1) * t)
    # A one-way ring carries every block over all links between: N (N-1) / 2 blocks on each link.
    assert seconds("all_to_all", "ring", n, compute=0, wire=t)[0] == pytest.approx(t * n * (n - 1) / 2)
    both = 2 * (n - 1) * t
    assert seconds("all_reduce", "ring", n, compute=0, wire=t)[0] == pytest.approx(both)
    assert seconds("all_reduce", "pairwise", n, compute=0, wire=t)[0] == pytest.approx(both)


@pytest.mark.parametrize(("n", "m"), list(itertools.product([2, 3, 4], [1, 2, 3, 4])))
def test_of_an_all_reduce_the_last_rounds_totals_are_exposed(n: int, m: int) -> None:
    """Totals of one round travel beside the products of the next: 1/m of half of the all-reduce is left."""
    wire = 0.2
    makespan, exposed = seconds("all_reduce", "pairwise", n, compute=1.0, wire=wire, m=m, used=False)
    assert makespan == pytest.approx(n + (n - 1) * wire / m) and exposed == pytest.approx(makespan - n)


def test_finer_slices_shorten_what_is_left_exposed() -> None:
    exposed = [seconds("all_gather", "pairwise", 4, compute=1.0, wire=1.5, m=m)[1] for m in (1, 2, 3, 4)]
    assert exposed == sorted(exposed, reverse=True) and exposed[0] > exposed[-1]


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=10).map(tuple),
    order=st.sampled_from(["pairwise", "ring"]),
    collective=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    m=st.integers(1, 3),
    wire=st.floats(0.1, 10),
    latency=st.floats(0, 1),
)
def test_bounds_and_spans(sizes: tuple, order: str, collective: str, m: int, wire: float, latency: float) -> None:
    programs = build_all(Problem(collective, sizes, order, m))  # type: ignore[arg-type]
    costs = Costs(1.0, wire, latency, compute_per_row(produce_s=1.0, consume_s=0.5, reduce_s=0.1))
    found = estimate(programs, costs)
    for program, timeline in zip(programs, found.timelines, strict=True):
        sent = program.rows_sent / wire
        received = program.rows_received / wire
        assert timeline.finish_s >= max(timeline.compute_s, sent, received) - 1e-9
        assert timeline.exposed_s >= -1e-9
        for lane, total in ((COMPUTE, timeline.compute_s), (SEND, sent), (RECEIVE, received)):
            spans = sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: (s.start, s.end))
            assert sum(s.end - s.start for s in spans) == pytest.approx(total)
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans)), "a port carries one message at a time"
    assert found.makespan_s == max(t.finish_s for t in found.timelines)
    assert estimate(programs, costs, keep_spans=False).makespan_s == found.makespan_s


def test_a_slow_rank_delays_only_those_that_need_it() -> None:
    """No barrier: rank 0's neighbours do not wait for the slowest before they consume what is there."""
    programs = build_all(Problem("all_gather", (1, 1, 1, 1)))
    even = estimate(programs, Costs(1.0, 1e9, 0.0, lambda rank, op: 1.0))
    slow = estimate(programs, Costs(1.0, 1e9, 0.0, lambda rank, op: 3.0 if rank == 3 else 1.0))
    assert [t.finish_s for t in slow.timelines[:3]] == pytest.approx([t.finish_s for t in even.timelines[:3]])
    assert slow.timelines[3].finish_s == pytest.approx(12.0)


def test_broken_schedules_and_costs_are_refused() -> None:
    a, b = build_all(Problem("all_gather", (2, 2)))
    a = replace(a, operations=tuple(op for op in a.operations if not isinstance(op, Send)))
    with pytest.raises(RuntimeError, match="rank 1 is stuck with 2 operations left"):
        estimate([a, b], Costs(1.0, 1.0))
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        Costs(1.0, 0)


def test_many_ranks() -> None:
    n = 128  # operations grow as N^2, time with them: a few microseconds an operation
    found = estimate(build_all(Problem("all_gather", (1,) * n, "ring")), Costs(1.0, 1.0), keep_spans=False)
    assert found.makespan_s == pytest.approx(n - 1)
