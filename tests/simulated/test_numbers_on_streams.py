"""Ranks of a group that are others in the default group: errors of streams call them by their numbers there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.errors import DeadlineError, MismatchError, PeerLostError, TransportError, Where
from commfuse_dp.transport.base import CHANNEL_GRAD, PullRequest, Tag, Transport
from commfuse_dp.transport.waiting import wait_until
from tests.simulated.test_symmetric import quick
from tests.simulated.test_symmetric_failures import in_another_order
from tests.support import fake_nccl, fake_symmetric, single
from tests.support.fake_device import FakeWorld
from tests.support.fake_grouped import FakeBoard
from tests.support.hosts import DeviceHosts
from tests.support.raising import ranks_said
from tests.support.threads import ExchangeFn, run_ranks

__all__ = ["quick"]  # the fixture

NUMBERS = (3, 6, 8, 9)  # in the default group; no rank of these groups has such a number
WHERE = Where("fc", 77, "-", 55)  # without a number that a rank could have


class Numbered:
    """An exchange of ranks that have other numbers in the default group."""

    def __init__(self, exchange: ExchangeFn) -> None:
        self._exchange, self.numbers = exchange, NUMBERS

    def __call__(self, item: Any) -> list[Any]:
        return self._exchange(item)


def symmetric(
    body: Callable[[Transport, ExchangeFn, FakeWorld], Any], deadline_s: float = 20.0, sizes: Any = ((8, 8),), **settings: Any
) -> list[Any]:
    world = FakeWorld(2, seed=2)

    def main(rank: int, exchange: ExchangeFn) -> Any:
        transport = fake_symmetric.open_fake(
            world, rank, Numbered(exchange), inbox_bytes=1024, deadline_s=deadline_s, **settings
        )
        try:
            if sizes:
                transport.expose(sizes)
            return body(transport, exchange, world)
        finally:
            world.deferred = world.strict = False
            transport.close()

    return run_ranks(2, main, timeout_s=30)


def test_a_peer_that_died() -> None:
    def body(transport: Transport, exchange: ExchangeFn, world: FakeWorld) -> None:
        if transport.rank == 1:
            exchange("enqueued")
            fake_symmetric.die(transport)
        else:
            transport.wait_finished(1, WHERE)
            exchange("enqueued")
            world.run(patience_s=60)
            with pytest.raises(PeerLostError, match=r"rank 3 lost rank 6 .*Rank 3 was waiting for rank 6") as caught:
                transport.progress()
            assert (caught.value.rank, caught.value.peer) == (3, 6) and ranks_said(str(caught.value)) == {3, 6}
        exchange("end")

    symmetric(body)


def test_a_peer_that_left() -> None:
    def body(transport: Transport, exchange: ExchangeFn, world: FakeWorld) -> None:
        if transport.rank == 1:
            exchange("enqueued")
            world.deferred = False
            transport.close()
        else:
            single.expect(transport, 1, Tag(CHANNEL_GRAD), 8)
            single.receive(transport, 1, Tag(CHANNEL_GRAD), WHERE)
            exchange("enqueued")
            with pytest.raises(PeerLostError, match=r"rank 3: rank 6 .*has closed") as caught:
                wait_until(transport, lambda: False, peer=1, where=WHERE, doing="to leave")
            assert (caught.value.rank, caught.value.peer) == (3, 6) and ranks_said(str(caught.value)) == {3, 6}
        exchange("end")

    symmetric(body)


def test_a_peer_that_is_late() -> None:
    def body(transport: Transport, exchange: ExchangeFn, world: FakeWorld) -> None:
        if transport.rank == 0:
            transport.wait_finished(1, WHERE)
            world.run(patience_s=60)
            with pytest.raises(DeadlineError, match=r"rank 3 waited .* for rank 6") as caught:
                transport.progress()
            assert (caught.value.rank, caught.value.peer) == (3, 6) and ranks_said(str(caught.value)) == {3, 6}
            exchange("has failed")
        else:
            transport.deadline_s = 20.0
            exchange("has failed")
            with pytest.raises(PeerLostError) as caught:
                wait_until(transport, lambda: False, peer=0, where=WHERE, doing="to hear of it")
            assert (caught.value.rank, caught.value.peer) == (6, 3) and ranks_said(str(caught.value)) == {3, 6}
        exchange("end")

    symmetric(body, deadline_s=0.3)


def test_another_order_of_messages() -> None:
    texts = symmetric(in_another_order)
    assert all(ranks_said(text) == {3, 6} for text in texts), texts


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(TransportError, match=r"rank 3: .*symmetric memory") as caught:
        symmetric(lambda *_: None, room=16)
    assert ranks_said(str(caught.value)) == {3, 6}


def test_windows_that_differ() -> None:
    def body(transport: Transport, exchange: ExchangeFn, world: FakeWorld) -> None:
        other = 9 - NUMBERS[transport.rank]
        with pytest.raises(MismatchError, match=f"on rank {other} "):
            transport.expose([[8, 8], [8, 8 + transport.rank]])

    symmetric(body, sizes=())


# ---- grouped exchanges -------------------------------------------------------------------------------------------------
def grouped(body: Callable[[Transport, ExchangeFn], Any], deadline_s: float = 20.0, deferred: bool = False) -> list[Any]:
    world = FakeWorld(2, seed=3, deferred=deferred)
    board = FakeBoard(world)
    board.numbers, board.eager = NUMBERS, 0.0

    def main(rank: int, exchange: ExchangeFn) -> Any:
        transport = fake_nccl.open_fake_nccl(board, rank, Numbered(exchange), inbox_bytes=1024, deadline_s=deadline_s)
        try:
            transport.expose([[64, 64]] * 2)
            for key in range(2):
                transport.publish((key,), 1)
            return body(transport, exchange)
        finally:
            world.deferred = False
            transport.close()

    return run_ranks(2, main, timeout_s=40)


def pull(transport: Transport, key: int) -> None:
    out = torch.empty(64, dtype=torch.uint8)
    transport.pull(1, [PullRequest(1 - transport.rank, key, 0, 64, out, None, (0, 64))])[0].wait(WHERE)


def test_a_step_of_an_exchange_that_a_peer_does_not_take() -> None:
    def body(transport: Transport, exchange: ExchangeFn) -> None:
        if transport.rank == 0:
            with pytest.raises(DeadlineError, match=r"rank 3 waited .* for rank 6") as caught:
                pull(transport, 0)
            assert (caught.value.rank, caught.value.peer) == (3, 6) and ranks_said(str(caught.value)) == {3, 6}
        exchange("over")

    grouped(body, deadline_s=0.5)


def test_other_exchanges() -> None:
    def body(transport: Transport, exchange: ExchangeFn) -> None:
        for key in (0, 1) if transport.rank == 0 else (1, 0):
            pull(transport, key)
        transport.finish(1)
        with pytest.raises(MismatchError, match="different programs") as caught:
            wait_until(transport, lambda: False, peer=1 - transport.rank, where=WHERE, doing="to be found out")
        assert ranks_said(str(caught.value)) == {3, 6}

    grouped(body, deferred=True)


# ---- hosts -------------------------------------------------------------------------------------------------------------
def test_a_peer_inside_a_host_that_died() -> None:
    """Each of the two transports of a hierarchical one has ranks of its own."""
    world = FakeWorld(4, seed=1)
    hosts = DeviceHosts(world, "abab")

    def main(rank: int, exchange: ExchangeFn) -> None:
        transport = hosts.open(rank, exchange, inbox_bytes=1024, numbers=NUMBERS)
        try:
            transport.expose([[8] * 4])
            if rank == 3:
                exchange("enqueued")
                fake_symmetric.die(transport._inner)
            else:
                if rank == 1:
                    transport._inner.wait_finished(1, WHERE)
                exchange("enqueued")
            if rank == 1:
                world.run(patience_s=60)
                with pytest.raises(PeerLostError) as caught:
                    transport.progress()
                assert (caught.value.rank, caught.value.peer) == (6, 9) and ranks_said(str(caught.value)) == {6, 9}
            exchange("end")
        finally:
            world.deferred = world.strict = False
            transport.close()

    run_ranks(4, main, timeout_s=60)
