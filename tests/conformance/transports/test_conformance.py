"""One suite for every transport: what base.py promises."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.errors import TransportError, Where
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_GRAD, CHANNEL_PARAM, Tag, Transport
from commfuse_dp.transport.waiting import wait_until
from tests.support import single
from tests.support.transports import CLUSTERS, Cluster, pattern, pull_bytes

WORLDS = [1, 2, 3, 5]
WHERE = Where(layer="blocks.3.fc", step=12, slice="2/1", nbytes=4711)


def deposit(transport: Transport, dst: int, tag: Tag, data: torch.Tensor) -> None:
    """Send, consuming nothing meanwhile: only where there is room for sure (or after credits that will come).

    The receiver announces it by `expect`, in the order of sending, which stream-ordered transports need."""
    holder: list[torch.Tensor] = []

    def reserve() -> torch.Tensor | None:
        got = single.reserve(transport, dst, data.numel())
        if got is not None:
            holder.append(got)
        return got

    wait_until(transport, lambda: reserve() is not None, peer=dst, where=WHERE, doing="to give credit")
    buffer = holder[0]
    assert buffer.dtype == torch.uint8 and buffer.shape == (data.numel(),) and buffer.is_contiguous()
    assert data.numel() == 0 or buffer.data_ptr() % 64 == 0
    buffer.copy_(data)
    single.send(transport, dst, tag, buffer)


# ---- windows -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", WORLDS)
def test_publish_and_pull_whole_and_part(cluster: Cluster, world_size: int) -> None:
    sizes = [[300 + 7 * rank for rank in range(world_size)], [64] * world_size]

    def body(transport: Transport, exchange) -> int:
        rank = transport.rank
        for key in range(2):
            segment = transport.segments[key]
            assert segment.shape == (sizes[key][rank],) and segment.data_ptr() % 64 == 0
            segment.copy_(pattern(rank, key, 1, nbytes=sizes[key][rank]))
            transport.publish((key,), 1)
        checked = 0
        for step in range(world_size):
            owner = (rank + step) % world_size
            for key in range(2):
                size = sizes[key][owner]
                expected = pattern(owner, key, 1, nbytes=size)
                assert torch.equal(pull_bytes(transport, owner, key, 1, size=size), expected)
                for start, nbytes in ((0, 1), (5, 20), (size - 3, 3), (size, 0)):
                    part = pull_bytes(transport, owner, key, 1, start, nbytes)
                    assert torch.equal(part, expected[start : start + nbytes])
                    checked += 1
        transport.finish(1)
        return checked

    assert cluster.run(world_size, body, sizes=sizes) == [world_size * 8] * world_size


def test_pull_before_publish_completes_after_it(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        if transport.rank == 0:
            out = None if transport.in_place else torch.empty(100, dtype=torch.uint8)
            transfer = single.pull(transport, 1, 0, 1, out=out)
            for _ in range(20):
                assert not transfer.done()
            exchange("pulling")
            got = transfer.wait(WHERE)
            assert transfer.done()
            assert torch.equal(got, pattern(1, 0, 1, nbytes=100))
        else:
            exchange("may publish")
            transport.segments[0].copy_(pattern(1, 0, 1, nbytes=100))
            transport.publish((0,), 1)
        exchange("read")

    cluster.run(2, body, sizes=[[100, 100]])


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_epochs_never_mix(cluster: Cluster, world_size: int) -> None:
    """Every epoch rewrites the segments as early as allowed; random order of reading; each byte must be of its epoch."""
    keys, epochs = 3, 8
    sizes = [[129 + 31 * ((rank + key) % world_size) for rank in range(world_size)] for key in range(keys)]

    def body(transport: Transport, exchange) -> int:
        rank, choice, read = transport.rank, random.Random(transport.rank), 0
        for epoch in range(1, epochs + 1):
            transport.wait_finished(epoch - 1, WHERE)
            for key in choice.sample(range(keys), keys):
                transport.segments[key].copy_(pattern(rank, key, epoch, nbytes=sizes[key][rank]))
                transport.publish((key,), epoch)
            for index in choice.sample(range(keys * world_size), keys * world_size):
                owner, key = divmod(index, keys)
                got = pull_bytes(transport, owner, key, epoch, size=sizes[key][owner])
                assert torch.equal(got, pattern(owner, key, epoch, nbytes=sizes[key][owner])), (owner, key, epoch)
                read += 1
            transport.finish(epoch)
        return read

    assert cluster.run(world_size, body, sizes=sizes) == [epochs * keys * world_size] * world_size


def test_owner_waits_for_readers(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> bool:
        transport.segments[0].fill_(transport.rank)
        transport.publish((0,), 1)
        transport.wait_finished(0)  # at once
        if transport.rank == 0:
            with pytest.raises(TransportError, match=r"wait_finished\(1\)"):
                transport.publish((0,), 2)
            exchange("rank 1 may finish")
            transport.wait_finished(1)
            transport.publish((0,), 2)
        else:
            exchange("rank 1 may finish")
            transport.finish(1)
        exchange("end")
        transport.finish(2)
        return True

    assert cluster.run(2, body, sizes=[[8, 8]]) == [True, True]


@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_shards_and_no_windows(cluster: Cluster, world_size: int) -> None:
    sizes = [[0] * world_size, [10 if rank == 0 else 0 for rank in range(world_size)]]

    def body(transport: Transport, exchange) -> None:
        for key in range(2):
            assert transport.segments[key].numel() == sizes[key][transport.rank]
            transport.segments[key].fill_(9)
            transport.publish((key,), 1)
        for owner in range(world_size):
            for key in range(2):
                got = pull_bytes(transport, owner, key, 1, size=sizes[key][owner])
                assert got.tolist() == [9] * sizes[key][owner]
        transport.finish(1)

    cluster.run(world_size, body, sizes=sizes)
    cluster.run(world_size, lambda transport, exchange: None, sizes=[])
    cluster.run(world_size, lambda transport, exchange: None)  # never exposed: messages only


# ---- messages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_tight_credit_in_all_directions_at_once(cluster: Cluster, world_size: int) -> None:
    """Room for two messages, thirty to be sent to every peer: nobody may wait for credit without consuming."""
    count, limit = 30, 192

    def size(src: int, dst: int, number: int) -> int:
        return (number * 37 + src * 11 + dst * 5) % 97

    def body(transport: Transport, exchange) -> int:
        rank = transport.rank
        peers = [peer for peer in range(world_size) if peer != rank]
        sent, taken, refused = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0), 0
        for peer in peers:
            for number in range(count):
                single.expect(transport, peer, Tag(CHANNEL_GRAD, 0, number, rank), size(peer, rank, number))

        def turn() -> bool:
            nonlocal refused
            for peer in peers:
                if sent[peer] < count:
                    number = sent[peer]
                    data = pattern(rank, peer, number, nbytes=size(rank, peer, number))
                    buffer = single.reserve(transport, peer, data.numel())
                    if buffer is None:
                        refused += 1
                    else:
                        buffer.copy_(data)
                        single.send(transport, peer, Tag(CHANNEL_GRAD, 0, number, peer), buffer)
                        sent[peer] += 1
                tag = Tag(CHANNEL_GRAD, 0, taken[peer], rank)
                if taken[peer] < count and single.arrived(transport, peer, tag):
                    got = single.receive(transport, peer, tag)
                    assert torch.equal(got, pattern(peer, rank, taken[peer], nbytes=size(peer, rank, taken[peer])))
                    single.release(transport, peer, tag)
                    taken[peer] += 1
            return all(n == count for n in (*sent.values(), *taken.values()))

        wait_until(transport, turn, peer=-1, where=WHERE, doing="to exchange messages")
        received = transport.probe.counters.grad_bytes_received
        assert received == sum(size(peer, rank, n) for peer in peers for n in range(count))
        assert transport.probe.counters.grad_bytes_sent == sum(size(rank, peer, n) for peer in peers for n in range(count))
        return refused

    cluster.run(world_size, body, inbox_bytes=limit)


def test_no_credit_until_release(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        if transport.rank == 0:
            for number in range(4):
                deposit(transport, 1, Tag(CHANNEL_GRAD, part=number), torch.full((64,), number, dtype=torch.uint8))
            for _ in range(30):
                assert single.reserve(transport, 1, 1) is None, "256 bytes are full"
            exchange("full")
            deposit(transport, 1, Tag(CHANNEL_GRAD, part=4), torch.full((64,), 4, dtype=torch.uint8))
            exchange("end")
        else:
            exchange("full")
            assert single.receive(transport, 0, Tag(CHANNEL_GRAD, part=3)).tolist() == [3] * 64
            assert single.receive(transport, 0, Tag(CHANNEL_GRAD, part=0)).tolist() == [0] * 64
            single.release(transport, 0, Tag(CHANNEL_GRAD, part=0))
            got = single.receive(transport, 0, Tag(CHANNEL_GRAD, part=4))
            assert got.tolist() == [4] * 64
            # What is not released keeps its bytes.
            for number in (1, 2, 3):
                assert single.receive(transport, 0, Tag(CHANNEL_GRAD, part=number)).tolist() == [number] * 64
            exchange("end")

    cluster.run(2, body, inbox_bytes=256)


def test_release_out_of_order_and_wrap_around(cluster: Cluster) -> None:
    """Sixty rounds of three messages through a small ring, released in every order: the head wraps many times.

    The receiver asks for the last one first, so all three must fit wherever the head stands: places are contiguous and up to
    half of the ring can be lost to a gap, hence twice the 832 bytes of the largest round.
    """
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2)]
    lengths = [(200, 100, 300), (64, 320, 128), (0, 500, 250)]

    def body(transport: Transport, exchange) -> None:
        for number in range(60):
            nbytes = lengths[number % 3]
            if transport.rank == 0:
                for part in range(3):
                    deposit(transport, 1, Tag(CHANNEL_GRAD, 1, number, part), pattern(number, part, nbytes=nbytes[part]))
            else:
                tags = [Tag(CHANNEL_GRAD, 1, number, part) for part in range(3)]
                for tag, size in zip(tags, nbytes, strict=True):
                    single.expect(transport, 0, tag, size)
                for part in (2, 0, 1):
                    assert torch.equal(
                        single.receive(transport, 0, tags[part], WHERE), pattern(number, part, nbytes=nbytes[part])
                    )
                for part in orders[number % 6]:
                    assert torch.equal(single.receive(transport, 0, tags[part]), pattern(number, part, nbytes=nbytes[part]))
                    single.release(transport, 0, tags[part])
        exchange("end")

    cluster.run(2, body, inbox_bytes=1664)


def test_tags_and_sources_are_told_apart(cluster: Cluster) -> None:
    """Tags that differ in one field only, received in another order than sent; same tags from two sources."""
    tags = [Tag(CHANNEL_PARAM), Tag(CHANNEL_GRAD), Tag(CHANNEL_GRAD, 1), Tag(CHANNEL_GRAD, 0, 1), Tag(CHANNEL_GRAD, 0, 0, 1)]
    tags.append(Tag(CHANNEL_COLLECTIVE, 2**31 - 1, 2**31 - 1, 2**31 - 1))

    def body(transport: Transport, exchange) -> None:
        rank = transport.rank
        if rank:
            for number, tag in enumerate(tags):
                deposit(transport, 0, tag, pattern(rank, number, nbytes=16))
        else:
            for src in (1, 2):
                for tag in tags:
                    single.expect(transport, src, tag, 16)
            for number in reversed(range(len(tags))):
                for src in (2, 1):
                    got = single.receive(transport, src, tags[number], WHERE)
                    assert torch.equal(got, pattern(src, number, nbytes=16))
                    single.release(transport, src, tags[number])
            assert transport.probe.counters.param_bytes_received == 2 * 16
            assert transport.probe.counters.grad_bytes_received == 2 * 16 * (len(tags) - 1)
        exchange("end")

    cluster.run(3, body)


def test_message_limit(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        limit = transport.message_limit
        assert limit == 1000
        other = 1 - transport.rank
        with pytest.raises(ValueError, match=r"1001 bytes.*0 \.\. 1000.*inbox_bytes"):
            single.reserve(transport, other, limit + 1)
        for number in range(5):
            tag = Tag(CHANNEL_GRAD, 0, number)
            single.expect(transport, other, tag, limit)
            deposit(transport, other, tag, pattern(transport.rank, number, nbytes=limit))
            assert torch.equal(single.receive(transport, other, tag, WHERE), pattern(other, number, nbytes=limit))
            single.release(transport, other, tag)
        exchange("end")

    cluster.run(2, body, inbox_bytes=1000)


def test_typed_views_and_shorter_messages(cluster: Cluster) -> None:
    """A reserved buffer may be sent as a view of another dtype, and only its beginning may be used."""

    def body(transport: Transport, exchange) -> None:
        other, tag = 1 - transport.rank, Tag(CHANNEL_GRAD)
        for padding in (64, 128):  # so that the second one does not start at 0
            buffer = single.reserve(transport, other, padding)
            assert buffer is not None
            single.expect(transport, other, tag._replace(part=padding), 20)
            floats = buffer.view(torch.float32)[:5]
            floats.copy_(torch.arange(5.0) + transport.rank)
            single.send(transport, other, tag._replace(part=padding), floats)
        for padding in (64, 128):
            got = single.receive(transport, other, tag._replace(part=padding), WHERE)
            assert got.view(torch.float32).tolist() == [v + other for v in range(5)]
        exchange("end")

    cluster.run(2, body)


IGNORED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=5, suppress_health_check=IGNORED)
@given(data=st.data())
@pytest.mark.parametrize("kind", sorted(CLUSTERS))
def test_random_traffic(kind: str, data: st.DataObject) -> None:
    random_traffic(kind, data)


@pytest.mark.slow
@settings(max_examples=16, suppress_health_check=IGNORED)
@given(data=st.data())
@pytest.mark.parametrize("kind", sorted(CLUSTERS))
def test_more_random_traffic(kind: str, data: st.DataObject) -> None:
    random_traffic(kind, data)


def random_traffic(kind: str, data: st.DataObject) -> None:
    """Random messages, sizes, orders and holding times among 2 to 4 ranks, beside epochs; the oracle is the plan."""
    world_size = data.draw(st.integers(2, min(4, CLUSTERS[kind].most_ranks())), label="world_size")
    inbox_bytes = data.draw(st.integers(64, 700), label="inbox_bytes")
    pairs = [(src, dst) for src in range(world_size) for dst in range(world_size) if src != dst]
    plan = {pair: data.draw(st.lists(st.integers(0, inbox_bytes), max_size=12), label=f"sizes {pair}") for pair in pairs}
    seed = data.draw(st.integers(0, 10_000), label="seed")
    windows = [[data.draw(st.integers(0, 300)) for _ in range(world_size)] for _ in range(2)]
    epochs = data.draw(st.integers(0, 3), label="epochs")

    def body(transport: Transport, exchange) -> tuple[int, int]:
        rank, choice = transport.rank, random.Random(seed * 10 + transport.rank)
        to_send = {dst: list(enumerate(plan[rank, dst])) for dst in range(world_size) if dst != rank}
        due = {(src, n) for src in range(world_size) if src != rank for n in range(len(plan[src, rank]))}
        held: list[tuple[int, int]] = []
        state = {"epoch": 0, "pulls": 0, "messages": 0}

        for src in to_send:
            for number, nbytes in enumerate(plan[src, rank]):
                single.expect(transport, src, Tag(CHANNEL_GRAD, number), nbytes)

        def check(src: int, number: int) -> None:
            got = single.receive(transport, src, Tag(CHANNEL_GRAD, number))
            assert torch.equal(got, pattern(src, rank, number, nbytes=plan[src, rank][number]))

        def turn() -> bool:
            for dst, queue in to_send.items():
                if queue and choice.random() < 0.7:
                    number, nbytes = queue[0]
                    buffer = single.reserve(transport, dst, nbytes)
                    if buffer is not None:
                        buffer.copy_(pattern(rank, dst, number, nbytes=nbytes))
                        single.send(transport, dst, Tag(CHANNEL_GRAD, number), buffer)
                        queue.pop(0)
            for src, number in choice.sample(sorted(due), min(len(due), 4)):
                if single.arrived(transport, src, Tag(CHANNEL_GRAD, number)):
                    check(src, number)
                    due.discard((src, number))
                    held.append((src, number))
                    state["messages"] += 1
            choice.shuffle(held)
            while held and choice.random() < 0.6:
                src, number = held.pop()
                check(src, number)  # bytes are still there just before the release
                single.release(transport, src, Tag(CHANNEL_GRAD, number))
            return not due and not held and not any(to_send.values())

        for epoch in range(1, epochs + 1):
            transport.wait_finished(epoch - 1)
            for key in range(2):
                transport.segments[key].copy_(pattern(rank, key, epoch, nbytes=windows[key][rank]))
                transport.publish((key,), epoch)
            for _ in range(3):
                turn()
            for owner in choice.sample(range(world_size), world_size):
                key = choice.randrange(2)
                size = windows[key][owner]
                start = choice.randint(0, size)
                nbytes = choice.randint(0, size - start)
                got = pull_bytes(transport, owner, key, epoch, start, nbytes)
                assert torch.equal(got, pattern(owner, key, epoch, nbytes=size)[start : start + nbytes])
                state["pulls"] += 1
            transport.finish(epoch)
        limit = time.monotonic() + 20
        while not turn():  # not wait_until: a turn may leave undone by chance what it could do
            assert time.monotonic() < limit, (to_send, due, held)
            transport.progress(0.001)
        exchange("end")
        return state["messages"], state["pulls"]

    results = CLUSTERS[kind]().run(world_size, body, sizes=windows, inbox_bytes=inbox_bytes)
    assert sum(messages for messages, _ in results) == sum(len(sizes) for sizes in plan.values())
    assert [pulls for _, pulls in results] == [epochs * world_size] * world_size
