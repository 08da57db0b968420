"""Programs over streams: collectives and layers of tensor parallelism on the simulated device, over both of its transports.

Torch's own operations count as work of the current stream (`Watched`): what is read before it has come, or written again under
a reader, is a race whatever the order in which things happened to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from commfuse_dp.collectives.streams import StreamExecution
from commfuse_dp.errors import MismatchError, PeerLostError, TransportError
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Sending, Tag, Transport
from commfuse_dp.transport.streams import growth
from commfuse_dp.transport.symmetric.core import Core
from tests.conformance.collectives.worlds import left_fold, rows
from tests.conformance.sequence import test_experts as experts
from tests.conformance.sequence import test_sequence_ops as sequence
from tests.support import fake_nccl, fake_symmetric
from tests.support.fake_device import FakeWorld, Race
from tests.support.fake_grouped import FakeBoard
from tests.support.fake_nccl import open_fake_nccl
from tests.support.fake_symmetric import open_fake
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.watched import Watched

KINDS = ("symmetric", "nccl")
RING = 1 << 12


def on_streams(
    kind: str, n: int, body: Callable[[int, Any], Any], *, seed: int | None = None, ring: int = RING, costs: Any = None
) -> list[Any]:
    """seed: of the order of streams, and of the calls in which hosts stand; None: they do not."""
    world = FakeWorld(n, seed=seed or 0, deferred=False, costs=costs, stands=seed is not None)
    board = FakeBoard(world)

    def main(rank: int, exchange: ExchangeFn) -> Any:
        die: Callable[[Any], None]
        transport: Transport
        if kind == "symmetric":
            die, transport = fake_symmetric.die, open_fake(world, rank, exchange, inbox_bytes=ring, deadline_s=20.0)
        else:
            die, transport = fake_nccl.die, open_fake_nccl(board, rank, exchange, inbox_bytes=ring)
        try:
            with Watched(world.devices[rank]):
                found = body(rank, transport)
            exchange(None)
            transport.close()
            return found
        except BaseException:
            die(transport)
            raise

    return run_ranks(n, main)


@st.composite
def collectives(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(2, 5))
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "n": n,
        "sizes": draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        "table": [draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)) for _ in range(n)],
        "order": draw(st.sampled_from(["pairwise", "ring"])),
        "slices_per_rank": draw(st.integers(1, 3)),
        "width": draw(st.integers(1, 40)),
        "ring": draw(st.sampled_from([256, 1024, RING])),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


def run_collectives(case: dict[str, Any]) -> None:
    n, sizes, width, seed = case["n"], case["sizes"], case["width"], case["seed"]
    how = {"order": case["order"], "slices_per_rank": case["slices_per_rank"]}
    wholes = [rows(sum(sizes), width, seed=seed + rank) for rank in range(n)]
    starts = [sum(sizes[:rank]) for rank in range(n)]
    blocks = [[rows(count, width, seed=seed + 7 * i + j) for j, count in enumerate(row)] for i, row in enumerate(case["table"])]

    def body(rank: int, transport: Any) -> Any:
        own = slice(starts[rank], starts[rank] + sizes[rank])
        seen: dict[tuple[int, int], torch.Tensor] = {}

        def produce(owner: Any, out: torch.Tensor) -> None:
            out.copy_(wholes[rank][owner.start : owner.stop])

        def consume(owner: Any, part: torch.Tensor) -> None:
            seen[int(owner), owner.start] = part.clone()

        at = {**how, "transport": transport}
        for _ in range(2):  # rings go round
            gathered = all_gather(wholes[0][own], sizes=sizes, **at)
            all_gather(wholes[0][own], consume, sizes=sizes, **at)
            made = reduce_scatter(produce, sizes=sizes, shape=(sum(sizes), width), **at)
            fed = reduce_scatter(wholes[rank], sizes=sizes, **at)
            summed = all_reduce(wholes[rank], **at)
            swapped = all_to_all(torch.cat(blocks[rank]), sizes=case["table"], **at)
        return gathered, seen, made, fed, summed, swapped

    for rank, (gathered, seen, made, fed, summed, swapped) in enumerate(
        on_streams(case["kind"], n, body, seed=seed, ring=case["ring"])
    ):
        assert torch.equal(gathered, wholes[0])
        for (_, start), part in seen.items():
            assert torch.equal(part, wholes[0][start : start + len(part)])
        assert sum(len(part) for part in seen.values()) == sum(sizes)
        own = slice(starts[rank], starts[rank] + sizes[rank])
        order = list(range(n)) if case["order"] == "pairwise" else [(rank + 1 + step) % n for step in range(n)]
        total = left_fold([wholes[other][own] for other in order], torch.float32, None, torch.float32)
        assert torch.equal(made, total) and torch.equal(fed, total)
        assert torch.allclose(summed, torch.stack(wholes).double().sum(0).float(), rtol=1e-4, atol=1e-2)
        assert torch.equal(swapped, torch.cat([blocks[source][rank] for source in range(n)]))


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=4, suppress_health_check=QUIET, deadline=None)
@given(collectives())
def test_collectives(case: dict[str, Any]) -> None:
    run_collectives(case)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=QUIET, deadline=None)
@given(collectives())
def test_more_collectives(case: dict[str, Any]) -> None:
    run_collectives(case)


def compare(case: dict[str, Any], kind: str, ring: int) -> None:
    """As `compare` over threads: forward and backward of a block against the unsharded one in float64."""
    whole = sequence.Whole(case)
    whole.forward().backward(whole.grad)
    exact = whole.forward().detach()

    def body(rank: int, transport: Any) -> Any:
        local = whole.local(rank, torch.float64)
        y = sequence.block(local, whole, case, transport)
        y.backward(whole.shard(whole.grad, rank))
        return y.detach(), local

    for rank, (y, local) in enumerate(on_streams(kind, whole.n, body, seed=case["seed"], ring=ring)):
        assert sequence.relative(y, whole.shard(exact, rank)) <= 1e-12
        assert whole.x.grad is not None and whole.last.grad is not None
        assert sequence.relative(local["x"].grad, whole.shard(whole.x.grad, rank)) <= 1e-12
        for mine, all_of_it, f in zip(local["weights"], whole.weights, whole.per_rank, strict=True):
            assert all_of_it.grad is not None
            assert sequence.relative(mine.grad, all_of_it.grad.narrow(0, rank * f, f)) <= 1e-12
        width = sum(whole.per_rank)
        assert sequence.relative(local["last"].grad, whole.last.grad.narrow(1, rank * width, width)) <= 1e-12


@settings(max_examples=4, suppress_health_check=QUIET, deadline=None)
@given(sequence.cases().filter(lambda case: case["n"] > 1), st.sampled_from(KINDS), st.sampled_from([512, RING]))
def test_tensor_parallel_layers(case: dict[str, Any], kind: str, ring: int) -> None:
    compare(case, kind, ring)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=QUIET, deadline=None)
@given(sequence.cases().filter(lambda case: case["n"] > 1), st.sampled_from(KINDS), st.sampled_from([512, RING]))
def test_more_tensor_parallel_layers(case: dict[str, Any], kind: str, ring: int) -> None:
    compare(case, kind, ring)


@settings(max_examples=4, suppress_health_check=QUIET, deadline=None)
@given(experts.cases().filter(lambda case: case["n"] > 1), st.sampled_from(KINDS), st.sampled_from([512, RING]))
def test_experts(case: dict[str, Any], kind: str, ring: int) -> None:
    whole = experts.Whole(case)
    for rank, found in enumerate(on_streams(kind, whole.n, whole.run, seed=case["seed"], ring=ring)):
        whole.check(rank, found, 1e-12)


def _release_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are used after their place was given back."""
    take = StreamExecution._take

    def hasty(self: StreamExecution, lane: int | None, until: int = -1, most: int = 1 << 62) -> Any:
        found = take(self, lane, until, most)
        if until in self._held:
            source, tag = self._held.pop(until)
            self._transport.release((source,), tag)  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(StreamExecution, "_take", hasty)


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are used whether they have come or not."""
    monkeypatch.setattr(Core, "wait_for", lambda self, stream, conditions, places, doing, **more: None)


def _moved_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is moved out of a ring that is filled again."""
    monkeypatch.setattr(StreamExecution, "_empty", lambda self, exchange: self._filled.clear())


@pytest.mark.parametrize(
    ("kind", "mistake", "error"),
    [
        ("nccl", _release_early, Race),
        ("symmetric", _no_wait, Race),
        pytest.param("nccl", _moved_late, TransportError, marks=pytest.mark.slow),  # its peers wait for as long as they may
    ],
)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, kind: str, mistake: Any, error: type[Exception]) -> None:
    """One rank sends all of it, so that nothing but its own waits orders it behind its peers. Rings hold two messages."""
    sizes, shards = (32, 0, 0), (torch.ones(32, 8), torch.ones(0, 8), torch.ones(0, 8))

    def body(rank: int, transport: Any) -> None:
        if mistake is _moved_late:  # partials stay in their ring until the own one is there, but for this
            reduce_scatter(torch.ones(32, 8), sizes=sizes, slices_per_rank=8, transport=transport)
        all_gather(shards[rank], lambda owner, part: part.sum(), sizes=sizes, slices_per_rank=8, transport=transport)

    on_streams(kind, 3, body, ring=256)
    mistake(monkeypatch)
    with pytest.raises(error):
        on_streams(kind, 3, body, ring=256)


def test_messages_of_one_peer_do_not_overtake() -> None:
    """`send` sends those of one tag together; what goes to one peer stays in its order all the same."""

    def body(rank: int, transport: Any) -> list[float]:
        tags = [Tag(CHANNEL_COLLECTIVE, 1, number) for number in range(3)]
        plan = {1: (0, 1, 2), 2: (1, 2, 0)}  # to rank 2 in another order than to rank 1
        if rank:
            for number in plan[rank]:
                transport.expect((0,), tags[number], 4)
            return [float(transport.receive((0,), tags[number])[0].view(torch.float32)) for number in plan[rank]]
        sendings = []
        for dst, numbers in plan.items():
            for number in numbers:
                (message,) = transport.reserve((dst,), (4,))
                message.view(torch.float32).fill_(10 * dst + number)
                sendings.append(Sending(dst, tags[number], message))
        transport.send(sendings)
        return []

    assert on_streams("symmetric", 3, body) == [[], [10.0, 11.0, 12.0], [21.0, 22.0, 20.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_run_beside_compute(kind: str) -> None:
    """A transfer takes half as long as the products of a slice: by the simulated clock none of it is exposed, head and tail
    included: a forward is as long as its products, a reduce-scatter ends one transfer and the last product after the others."""
    compute, n = 1000, 3

    def costs(stream: Any, what: str, nbytes: int) -> int:
        return compute // 2 if what in ("copy", "exchange") and nbytes >= 128 else 0

    def body(rank: int, transport: Any) -> tuple[int, int]:
        device = transport.device
        stream = device.current_stream()

        def consume(owner: Any, part: torch.Tensor) -> None:
            device.delay(compute)

        def produce(owner: Any, out: torch.Tensor) -> None:
            device.delay(compute)
            out.zero_()

        start = stream.now
        all_gather(torch.ones(4, 8), consume, sizes=(4,) * n, transport=transport)
        between = stream.now
        reduce_scatter(produce, sizes=(4,) * n, shape=(4 * n, 8), transport=transport)
        return between - start, stream.now - between

    for gathering, scattering in on_streams(kind, n, body, costs=costs):
        assert gathering == n * compute
        assert scattering <= n * compute + compute  # peers begin their products when their own gathers have ended


def calls_of_all_sizes(rank: int, transport: Any) -> list[tuple[int, int]]:
    """Checked bit for bit. The limit of a message after each of them, and how many messages it sent."""
    found, sent, reserve = [], [0], transport.reserve

    def counted(dsts: Any, sizes: Any, room: int = 0) -> Any:
        sent[0] += len(dsts)
        return reserve(dsts, sizes, room)

    transport.reserve = counted
    for rows_of, width in (((1, 2, 0), 4), ((5, 0, 9), 40), ((1, 2, 0), 4), ((16, 16, 16), 40), ((0, 3, 2), 80)):
        whole, start = rows(sum(rows_of), width, seed=width), sum(rows_of[:rank])
        own = whole[start : start + rows_of[rank]]
        before = sent[0]
        assert torch.equal(all_gather(own, sizes=rows_of, transport=transport), whole)
        total = reduce_scatter(whole, sizes=rows_of, transport=transport)
        assert torch.equal(total, left_fold([own, own, own], torch.float32, None, torch.float32))
        found.append((transport.message_limit, sent[0] - before))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rings_grow_with_what_calls_send(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices go whole, of 9 x 40 floats and of 16 x 40; what is larger than the most is cut."""

    def body(rank: int, transport: Any) -> list[tuple[int, int]]:
        transport.growing = True
        return calls_of_all_sizes(rank, transport)

    for found in on_streams(kind, 3, body, ring=256):
        assert [limit for limit, _ in found] == [256, 2 * 1472, 2 * 1472, 2 * 2560, 2 * 2560]
        assert found[3][1] == 2 * 2
    monkeypatch.setattr(growth, "MOST", 1000)
    for found in on_streams(kind, 3, body, ring=256):
        assert [limit for limit, _ in found] == [256, *[2 * 1024] * 4]
        assert found[3][1] == 2 * 2 * 5


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
def test_rings_that_nobody_lets_grow_stay(kind: str) -> None:
    for found in on_streams(kind, 3, calls_of_all_sizes, ring=256):
        assert {limit for limit, _ in found} == {256}


def test_rings_stay_where_memory_is_short(caplog: pytest.LogCaptureFixture) -> None:
    """On all ranks, with a warning, and everything goes on in parts."""

    def body(rank: int, transport: Any) -> list[tuple[int, int]]:
        transport.growing = True
        if rank == 1:
            transport._core.memory.room = 1 << 12
        return calls_of_all_sizes(rank, transport)

    for found in on_streams("symmetric", 3, body, ring=256):
        assert {limit for limit, _ in found} == {256}
    assert sum("stay cut into parts" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_make_different_calls_are_told_so(kind: str) -> None:
    """By the message that comes instead, not at the deadline; the other rank by the first one's goodbye, or likewise."""

    def body(rank: int, transport: Any) -> None:
        own = torch.ones(4, 8)
        all_gather(own, sizes=(4, 4), transport=transport)
        if rank == 0:
            all_gather(own, sizes=(4, 4), transport=transport)
        else:
            reduce_scatter(torch.ones(8, 8), sizes=(4, 4), transport=transport)
        for _ in range(3):
            all_gather(own, sizes=(4, 4), transport=transport)

    with pytest.raises((MismatchError, PeerLostError)) as error:
        on_streams(kind, 2, body)
    told = [str(error.value), *getattr(error.value, "__notes__", ())]
    assert any("different orders" in text or "another message" in text for text in told), told
    assert kind != "nccl" or any("a message of call" in text for text in told), told
