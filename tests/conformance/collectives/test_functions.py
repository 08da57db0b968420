"""The four collectives over thread ranks, against their definitions: values bit for bit, order of calls, bytes, messages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from commfuse_dp.collectives import Owner, all_gather, all_reduce, all_to_all, reduce_scatter
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.program.build import build
from commfuse_dp.program.layout import slices_of_sizes
from commfuse_dp.program.operations import Problem
from commfuse_dp.program.orders import gather_owners, scatter_owners
from commfuse_dp.program.verify import fold, minimum_rows
from tests.conformance.collectives.worlds import Moved, in_world, left_fold, rows
from tests.support.inproc import Faults

ORDERS = ["pairwise", "ring"]
SIZES: list[tuple[int, ...]] = [(5,), (3, 4), (4, 0), (3, 5, 2), (0, 7, 0), (4, 4, 4, 1), (3, 3, 2, 0, 1)]
CASES = list(itertools.product(SIZES, ORDERS, [1, 2, 3]))


def expect_moved(moved: list[Moved], problem: Problem, row_bytes: int) -> None:
    """As many messages and bytes as the schedule says, and no more than the minimum."""
    schedules = [build(problem, rank) for rank in range(problem.world_size)]
    assert [m.messages for m in moved] == [sum(map(len, s.send_lanes.values())) for s in schedules]
    assert [m.bytes for m in moved] == [s.rows_sent * row_bytes for s in schedules]
    assert sum(m.bytes for m in moved) == minimum_rows(problem) * row_bytes


@pytest.mark.parametrize(("sizes", "order", "m"), CASES)
def test_all_gather(sizes: tuple[int, ...], order: str, m: int) -> None:
    n = len(sizes)
    shards = [rows(size, 3, seed=rank) for rank, size in enumerate(sizes)]
    whole = torch.cat(shards)

    def body(rank: int, transport: Any) -> Any:
        options: dict[str, Any] = {"order": order, "sizes": sizes, "slices_per_rank": m, "transport": transport}
        calls: list[tuple[int, int, int, int, int]] = []

        def consume(owner: Owner, part: torch.Tensor) -> None:
            calls.append((owner, owner.index, owner.start, owner.stop, owner.offset))
            assert torch.equal(part, whole[owner.start : owner.stop])

        assert all_gather(shards[rank], consume, **options) is None
        return calls, shards[rank].clone()

    results, moved = in_world(n, body)
    expect_moved(moved, Problem("all_gather", sizes, order, m), row_bytes=12)
    slices = slices_of_sizes(sizes, m)
    for rank, (calls, after) in enumerate(results):
        wanted = [
            (o, s.index, s.start, s.stop, s.start - sum(sizes[:o])) for o in gather_owners(rank, n, order) for s in slices[o]
        ]
        assert calls == wanted
        assert torch.equal(after, shards[rank])

    results, moved = in_world(
        n, lambda rank, t: all_gather(shards[rank], order=order, sizes=sizes, slices_per_rank=m, transport=t)
    )
    assert all(torch.equal(result, whole) for result in results)
    expect_moved(moved, Problem("all_gather", sizes, order, m), row_bytes=12)


@pytest.mark.parametrize(("sizes", "order", "m"), CASES)
def test_reduce_scatter(sizes: tuple[int, ...], order: str, m: int) -> None:
    n = len(sizes)
    partials = [rows(sum(sizes), 3, seed=10 + rank) for rank in range(n)]
    oracle = torch.stack([p.double() for p in partials]).sum(0)

    def body(rank: int, transport: Any) -> Any:
        calls: list[tuple[int, int]] = []

        def produce(owner: Owner, buffer: torch.Tensor) -> None:
            calls.append((owner, owner.index))
            buffer.copy_(partials[rank][owner.start : owner.stop])

        out = torch.full((sizes[rank], 3), float("nan"))
        got = reduce_scatter(produce, out, order=order, sizes=sizes, slices_per_rank=m, transport=transport)
        assert got is out
        return out, calls

    results, moved = in_world(n, body)
    expect_moved(moved, Problem("reduce_scatter", sizes, order, m), row_bytes=12)
    slices = slices_of_sizes(sizes, m)
    for rank, (out, calls) in enumerate(results):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        in_order = [partials[source][own] for source in fold(Problem("reduce_scatter", (1,) * n, order), rank)]
        assert torch.equal(out, left_fold(in_order, torch.float32, None, torch.float32))
        assert torch.allclose(out.double(), oracle[own], rtol=0, atol=1e-6 * oracle.abs().max().item() * n) or not out.numel()
        assert calls == [(o, s.index) for o in scatter_owners(rank, n, order) for s in slices[o]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float64, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_scatter_of_a_tensor_in_other_dtypes(order: str, dtype: torch.dtype, reduce_dtype: Any, op: Any) -> None:
    sizes = (3, 3, 1)  # FSDP2's division of 7 rows, which is the default
    partials = [rows(7, 2, seed=rank, dtype=dtype) for rank in range(3)]
    kept = [p.clone() for p in partials]
    options: dict[str, Any] = {"op": op, "order": order, "reduce_dtype": reduce_dtype}
    results, _ = in_world(3, lambda rank, t: reduce_scatter(partials[rank], transport=t, **options))
    sent = reduce_dtype or dtype
    for rank, out in enumerate(results):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        terms = [partials[source][own].to(sent) for source in fold(Problem("reduce_scatter", (1,) * 3, order), rank)]
        want = left_fold(terms, wide_dtype(dtype, sent), 3.0 if op == "mean" else None, dtype)
        assert out.dtype == dtype and torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(partials, kept, strict=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("n", "shape", "m"),
    [(1, (3,), 1), (2, (5, 3), 1), (3, (2, 2, 5), 2), (4, (3,), 3), (3, (), 1), (2, (0, 4), 1)],
)
def test_all_reduce(order: str, n: int, shape: tuple[int, ...], m: int) -> None:
    tensors = [rows(1, *shape, seed=rank).view(shape) for rank in range(n)]
    count = tensors[0].numel()
    bounds = Problem("all_reduce", tuple(len(c) for c in torch.arange(count).chunk(n)) if count else (0,) * n)
    sizes = (*bounds.sizes, *(0,) * (n - bounds.world_size))
    want = torch.empty(count)
    for owner in range(n):
        own = slice(sum(sizes[:owner]), sum(sizes[: owner + 1]))
        terms = [tensors[source].reshape(-1)[own] for source in fold(Problem("reduce_scatter", (1,) * n, order), owner)]
        want[own] = left_fold(terms, torch.float32, float(n), torch.float32)

    def body(rank: int, transport: Any) -> Any:
        options: dict[str, Any] = {"op": "mean", "order": order, "slices_per_rank": m, "transport": transport}
        mine = tensors[rank].clone()
        fresh = all_reduce(mine, **options)
        assert torch.equal(mine, tensors[rank]) and fresh.shape == mine.shape
        assert all_reduce(mine, mine, **options) is mine
        assert torch.equal(mine, fresh)
        return mine

    results, moved = in_world(n, body)
    assert all(torch.equal(result.reshape(-1), want) for result in results)
    assert sum(m.bytes for m in moved) == 2 * 4 * minimum_rows(Problem("all_reduce", sizes, order, m))


TABLES = [((4,),), ((1, 2), (3, 4)), ((0, 3), (0, 0)), ((2, 0, 3), (1, 1, 1), (0, 4, 2)), tuple((3, 1, 2, 2) for _ in range(4))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("table", TABLES)
def test_all_to_all(table: tuple[tuple[int, ...], ...], order: str, m: int) -> None:
    n = len(table)
    sent = [rows(sum(table[rank]), 2, seed=rank) for rank in range(n)]

    def block(source: int, to: int) -> torch.Tensor:
        start = sum(table[source][:to])
        return sent[source][start : start + table[source][to]]

    def body(rank: int, transport: Any) -> Any:
        options: dict[str, Any] = {"order": order, "slices_per_rank": m, "transport": transport}
        produced: list[int] = []
        consumed: list[int] = []
        seen = {source: torch.zeros_like(block(source, rank)) for source in range(n)}

        def produce(to: Owner, buffer: torch.Tensor) -> None:
            produced.append(int(to))
            buffer.copy_(block(rank, to)[to.offset : to.offset + buffer.shape[0]])
            assert torch.equal(buffer, sent[rank][to.start : to.stop])

        def consume(source: Owner, part: torch.Tensor) -> None:
            consumed.append(int(source))
            seen[source][source.offset : source.offset + part.shape[0]] = part

        assert all_to_all(produce, consume, sizes=table, row_shape=(2,), **options) is None
        assert all(torch.equal(seen[source], block(source, rank)) for source in range(n))
        if table[rank][rank]:
            assert produced[-1] == rank and consumed[0] == rank
        got = all_to_all(sent[rank], sizes=list(table[rank]), **options)
        assert torch.equal(got, torch.cat([block(source, rank) for source in range(n)]))
        return len(produced)

    in_world(n, body)
    _, moved = in_world(n, lambda rank, t: all_to_all(sent[rank], sizes=table, order=order, slices_per_rank=m, transport=t))
    expect_moved(moved, Problem("all_to_all", table, order, m), row_bytes=8)


# ---- arrival, credit, runs -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("inbox_bytes", [64, 256, 1 << 14])
def test_bits_do_not_depend_on_arrival_credit_or_run(order: str, inbox_bytes: int) -> None:
    """Messages delayed and reordered (seeded), channels too small for a slice: the same bits, and never a deadlock."""
    n, sizes, m = 3, (41, 37, 29), 2
    partials = [rows(sum(sizes), 5, seed=rank) for rank in range(n)]

    def body(rank: int, transport: Any) -> Any:
        options: dict[str, Any] = {"order": order, "slices_per_rank": m, "transport": transport}
        out = torch.empty(sizes[rank], 5)

        def produce(owner: Owner, buffer: torch.Tensor) -> None:
            buffer.copy_(partials[rank][owner.start : owner.stop])

        for _ in range(2):  # the second call meets the leftovers of the first
            reduce_scatter(produce, out, sizes=sizes, **options)
        whole = torch.zeros(sum(sizes), 5)

        def consume(owner: Owner, part: torch.Tensor) -> None:
            whole[owner.start : owner.stop] = part

        all_gather(out, consume, sizes=sizes, **options)
        assert torch.equal(all_gather(out, **options), whole)  # type: ignore[arg-type]
        assert torch.equal(all_to_all(out, **options)[:1], out[:1]) or rank  # type: ignore[index]
        return whole

    in_order = [partials[source] for source in range(n)]
    results = []
    for seed, delay in ((0, 0), (1, 3), (2, 9)):
        got, _ = in_world(n, body, inbox_bytes=inbox_bytes, faults=Faults(seed=seed, max_delay=delay))
        results += got
    assert all(torch.equal(result, results[0]) for result in results)
    if order == "pairwise":
        assert torch.equal(results[0], left_fold(in_order, torch.float32, None, torch.float32))


def test_produce_writes_into_the_peers_inbox() -> None:
    """No copy of what is computed for others while there is room: the buffer lies in the owner's ring."""

    def body(rank: int, transport: Any) -> Any:
        ring = transport._memory.outgoing[1 - rank]
        places = {}

        def produce(owner: Owner, buffer: torch.Tensor) -> None:
            places[int(owner)] = ring.data_ptr() <= buffer.data_ptr() < ring.data_ptr() + ring.numel()
            buffer.fill_(rank)

        out = torch.empty(4, 4)
        reduce_scatter(produce, out, sizes=(4, 4), transport=transport)
        return places

    results, _ = in_world(2, body)
    assert results == [{1: True, 0: False}, {0: True, 1: False}]


def test_a_slice_is_consumed_before_the_next_one_is_sent() -> None:
    """Rank 1's data reach rank 0 although rank 2 has not even begun: no barrier, and own first."""
    import threading

    consumed = threading.Event()

    def body(rank: int, transport: Any) -> Any:
        seen: list[int] = []

        def consume(owner: Owner, part: torch.Tensor) -> None:
            seen.append(int(owner))
            if rank == 0 and owner == 1:
                consumed.set()

        if rank == 2:
            assert consumed.wait(20), "rank 0 waited for rank 2 before it consumed rank 1's slice"
        all_gather(torch.full((2,), float(rank)), consume, sizes=(2, 2, 2), transport=transport)
        return seen

    results, _ = in_world(3, body)
    assert results == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_consume_reads_in_the_inbox() -> None:
    """No copy on the receiving side either: the slice handed to `consume` lies where the owner wrote it."""

    def body(rank: int, transport: Any) -> Any:
        ring = transport._memory.incoming[1 - rank]
        places = {}

        def consume(owner: Owner, part: torch.Tensor) -> None:
            places[int(owner)] = ring.data_ptr() <= part.data_ptr() < ring.data_ptr() + ring.numel()

        all_gather(torch.ones(4, 4), consume, sizes=(4, 4), transport=transport)
        return places

    results, _ = in_world(2, body)
    assert results == [{0: False, 1: True}, {1: False, 0: True}]
