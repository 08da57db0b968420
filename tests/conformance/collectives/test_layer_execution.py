"""Programs of several problems (a layer's backward) over thread ranks: proved, and then executed as they were proved."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives import Owner, all_gather, progress
from commfuse_dp.collectives.bound import Rows, Types, binder
from commfuse_dp.collectives.execution import Bindings
from commfuse_dp.collectives.sessions import begin, execute
from commfuse_dp.program.layer import backward
from commfuse_dp.program.layout import Tensor
from commfuse_dp.program.operations import Problem, Program
from commfuse_dp.program.verify import minimum_rows, verify
from tests.conformance.collectives.worlds import in_world, left_fold, rows
from tests.support.inproc import Faults

GATHERED, SUMMED = Tensor("x", "gathered"), Tensor("dx", "summed")
CPU = torch.device("cpu")


def programs(sizes: tuple[int, ...], order: str, way: str, m: int) -> list[Program]:
    there = Problem("all_gather", sizes, order, m, way="direct", tensor=GATHERED)
    back = Problem("reduce_scatter", sizes, order, m, way=way, tensor=SUMMED)
    return [backward(there, back, rank) for rank in range(len(sizes))]


def run(
    sizes: tuple[int, ...], order: str, way: str, m: int, *, inbox_bytes: int, faults: Faults | None = None, calls: int = 2
) -> list[Any]:
    """Two runs in a row, without a barrier between them: rows of float32 [3] are gathered while rows of float64 [2] are
    summed, as float32 partials."""
    made = programs(sizes, order, way, m)
    proof = verify(made)
    assert sum(proof.rows_sent) == sum(map(minimum_rows, made[0].problems))
    shards = [rows(size, 3, seed=rank) for rank, size in enumerate(sizes)]
    partials = [rows(sum(sizes), 2, seed=40 + rank) for rank in range(len(sizes))]
    whole = torch.cat(shards)

    def body(rank: int, transport: Any) -> Any:
        out = torch.full((sizes[rank], 2), float("nan"), dtype=torch.float64)
        for _ in range(calls):
            seen = torch.full_like(whole, float("nan"))
            order_of_work: list[tuple[str, int]] = []

            def produce(owner: Owner, buffer: torch.Tensor, log: Any = order_of_work) -> None:
                log.append(("produce", int(owner)))
                buffer.copy_(partials[rank][owner.start : owner.stop])

            def consume(owner: Owner, part: torch.Tensor, seen: Any = seen, log: Any = order_of_work) -> None:
                log.append(("consume", int(owner)))
                seen[owner.start : owner.stop] = part

            kinds = (
                Rows(GATHERED, (3,), Types.moved(torch.float32)),
                Rows(SUMMED, (2,), Types.summed(torch.float32, torch.float64)),
            )
            bindings = Bindings(shards[rank], consume=consume), Bindings(target=out, produce=produce)
            execute("backward", binder(made[rank], kinds), bindings, begin(None, transport, CPU), CPU)
            assert torch.equal(seen, whole)
        produced = [owner for kind, owner in order_of_work if kind == "produce"]
        assert not sizes[rank] or produced[-1] == rank  # own last
        return out, produced

    results, moved = in_world(len(sizes), body, inbox_bytes=inbox_bytes, faults=faults)
    for rank, (out, _) in enumerate(results):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if way == "direct":
            assert torch.equal(out, left_fold([p[own] for p in partials], torch.float64, None, torch.float64))
        exact = torch.stack([p[own].double() for p in partials]).sum(0)
        assert torch.allclose(out, exact, rtol=1e-12, atol=1e-9)
        if inbox_bytes >= 1 << 16 and way == "direct":
            others = sum(sizes) - sizes[rank]
            assert moved[rank].messages == calls * proof.messages[rank]
            assert moved[rank].bytes == calls * (sizes[rank] * (len(sizes) - 1) * 12 + others * 8)
    return [out for out, _ in results]


SIZES: list[tuple[int, ...]] = [(5,), (3, 4), (4, 0), (0, 0), (3, 5, 2), (0, 7, 0), (4, 4, 4, 1), (2, 2, 1, 0, 3), (1,) * 8]


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_gathered_and_summed_in_one_pass(sizes: tuple[int, ...], m: int) -> None:
    run(sizes, "pairwise", "direct", m, inbox_bytes=1 << 16)


@settings(max_examples=15)
@example(sizes=(9, 1), order_and_way=("pairwise", "direct"), m=2, inbox_bytes=128, seed=365)  # sums fill the inbox: evicted
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    order_and_way=st.sampled_from([("pairwise", "direct"), ("ring", "direct"), ("ring", "ring")]),
    m=st.integers(1, 3),
    inbox_bytes=st.sampled_from([64, 128, 256, 1 << 14]),
    seed=st.integers(0, 2**31 - 1),
)
def test_whatever_arrives_when(sizes: Any, order_and_way: tuple[str, str], m: int, inbox_bytes: int, seed: int) -> None:
    """Channels too small for a slice, messages late and out of order: never a deadlock, the same bits."""
    order, way = order_and_way
    late = run(sizes, order, way, m, inbox_bytes=inbox_bytes, faults=Faults(seed=seed, max_delay=5))
    calm = run(sizes, order, way, m, inbox_bytes=1 << 14)
    assert all(torch.equal(a, b) for a, b in zip(late, calm, strict=True))


class _Other:
    """A stream of other communication, for which a peer of this rank waits."""

    def __init__(self) -> None:
        self.progressed = threading.Event()

    def make_progress(self) -> None:
        self.progressed.set()


def test_a_thread_takes_over_nothing_from_one_that_has_ended() -> None:
    """Threads' identifiers come again; a stream that outlives its thread is nobody's."""
    other, found = _Other(), []
    for number in range(8):
        first = (
            (lambda: progress.register(other.make_progress)) if number == 0 else (lambda: found.extend(progress.callbacks()))
        )
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
    progress.unregister(other.make_progress)
    assert not found


def test_whoever_waits_makes_progress_for_other_streams() -> None:
    """Rank 1 does its part only after rank 0, which waits for it, has looked after another stream."""
    others = [_Other(), _Other()]

    def body(rank: int, transport: Any) -> None:
        progress.register(others[rank].make_progress)
        if rank == 1:
            assert others[0].progressed.wait(20), "rank 0 waited without a look at its other stream"
        all_gather(torch.ones(2), sizes=(2, 2), transport=transport)
        assert progress.callbacks() == [others[rank].make_progress]
        progress.unregister(others[rank].make_progress)
        assert not progress.callbacks()

    in_world(2, body)
    others.clear()
    assert not progress.callbacks()  # of another thread
