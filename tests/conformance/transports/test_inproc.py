"""Faults that only the in-process transport can inject, and that they really happen."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag
from tests.support import single
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks
from tests.support.transports import InprocCluster


def order_of_arrival(seed: int, max_delay: int, count: int = 40) -> list[int]:
    """Rank 1 sends `count` numbered messages before rank 0 looks; the order in which rank 0 sees them."""
    seen: list[int] = []

    def body(transport: Any, exchange: Any) -> None:
        if transport.rank == 1:
            for number in range(count):
                buffer = single.reserve(transport, 0, 4)
                single.send(transport, 0, Tag(CHANNEL_GRAD, number), buffer)
            exchange("sent")
        else:
            exchange("sent")
            left = set(range(count))
            while left:
                transport.progress()
                now = [n for n in sorted(left) if (1, Tag(CHANNEL_GRAD, n)) in transport._inbox]
                seen.extend(now)
                left -= set(now)
        exchange("end")

    InprocCluster(Faults(seed=seed, max_delay=max_delay)).run(2, body, inbox_bytes=64 * count)
    return seen


def test_delays_reorder_and_are_the_same_in_every_run() -> None:
    first = order_of_arrival(seed=3, max_delay=6)
    assert sorted(first) == list(range(40))
    assert first != list(range(40))
    assert first == order_of_arrival(seed=3, max_delay=6)
    assert first != order_of_arrival(seed=4, max_delay=6)
    assert order_of_arrival(seed=3, max_delay=0) == list(range(40))


def test_publications_keep_their_order_under_delay() -> None:
    """Epoch 2 of key 1 is published after epoch 2 of key 0: whoever sees the later sees the earlier."""

    def body(transport: Any, exchange: Any) -> None:
        for epoch in range(1, 30):
            transport.wait_finished(epoch - 1)
            if transport.rank == 0:
                for key in range(4):
                    transport.publish((key,), epoch)
            else:
                transfers = [single.pull(transport, 0, key, epoch) for key in range(4)]
                transfers[3].wait()
                assert all(transfer._ready() for transfer in transfers)
            transport.finish(epoch)
        exchange("end")

    InprocCluster(Faults(seed=1, max_delay=9)).run(2, body, sizes=[[8, 8]] * 4)


def test_a_lost_message_ends_in_a_named_deadline() -> None:
    lost: list[tuple[int, int, str, int]] = []

    def drop(src: int, dst: int, kind: str, number: int) -> bool:
        if kind == "deposit" and src == 1 and number == 2:
            lost.append((src, dst, kind, number))
            return True
        return False

    def body(transport: Any, exchange: Any) -> None:
        if transport.rank == 1:
            for number in range(4):
                single.send(transport, 0, Tag(CHANNEL_GRAD, number), single.reserve(transport, 0, 8))
        else:
            for number in (0, 1, 3):
                single.receive(transport, 1, Tag(CHANNEL_GRAD, number))
            with pytest.raises(DeadlineError, match=r"key=2") as caught:
                single.receive(transport, 1, Tag(CHANNEL_GRAD, 2))
            assert caught.value.peer == 1
        exchange("end")

    InprocCluster(Faults(drop=drop)).run(2, body, deadline_s=0.2)
    assert lost == [(1, 0, "deposit", 2)]


def test_held_messages_come_after_let_go() -> None:
    cluster = InprocCluster()

    def body(transport: Any, exchange: Any) -> None:
        world = cluster.world
        assert world is not None
        if transport.rank == 0:
            world.hold(1, 0)
            exchange("held")
            exchange("published")
            transfer = single.pull(transport, 1, 0, 1)
            assert not any(transfer.done() for _ in range(50))
            assert single.pull(transport, 2, 0, 1).wait().tolist() == [2] * 4, "other pairs are not held"
            world.let_go(1, 0)
            assert transfer.done() and transfer.wait().tolist() == [1] * 4
        else:
            exchange("held")
            transport.segments[0].fill_(transport.rank)
            transport.publish((0,), 1)
            exchange("published")
        exchange("end")

    cluster.run(3, body, sizes=[[4, 4, 4]])


def test_a_killed_rank_notices_itself() -> None:
    cluster = InprocCluster()

    def body(transport: Any, exchange: Any) -> None:
        assert cluster.world is not None
        if transport.rank == 1:
            cluster.world.kill(1)
            with pytest.raises(TransportError, match="killed"):
                transport.progress()
        else:
            with pytest.raises(PeerLostError, match="rank 1"):
                single.receive(transport, 1, Tag(CHANNEL_GRAD))

    cluster.run(2, body)


def test_exchange_reports_a_missing_rank() -> None:
    world = InprocWorld(2, deadline_s=0.1)

    def body(rank: int, exchange: Any) -> bool:
        if rank == 0:
            with pytest.raises(TransportError, match="not all 2 ranks"):
                world.transport(0).expose([[1, 1]])
        return True

    assert run_ranks(2, body) == [True, True]


def test_harness_raises_the_first_error_with_its_rank() -> None:
    def body(rank: int, exchange: Any) -> None:
        if rank == 2:
            raise KeyError("here")
        exchange("never complete")

    with pytest.raises(KeyError, match="here") as caught:
        run_ranks(3, body)
    assert any("rank 2 of 3" in note for note in getattr(caught.value, "__notes__", ["rank 2 of 3"]))


def test_bad_world_size() -> None:
    with pytest.raises(ValueError, match="world_size 0"):
        InprocWorld(0)
