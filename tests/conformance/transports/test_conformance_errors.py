"""The suite for every transport, continued: what goes wrong is named, on all ranks, and what cannot be is refused."""

from __future__ import annotations

import threading

import pytest
import torch

from commfuse_dp.errors import DeadlineError, MismatchError, PeerLostError, TransportError
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag, Transport
from commfuse_dp.transport.two_sided import paired
from commfuse_dp.transport.waiting import wait_until
from tests.conformance.transports.test_conformance import WHERE, deposit
from tests.support import single
from tests.support.transports import Cluster, pattern


@pytest.mark.parametrize("what", ["pull", "receive", "finished"])
def test_deadline_names_everything(cluster: Cluster, what: str) -> None:
    def body(transport: Transport, exchange) -> None:
        if transport.rank == 0:
            with pytest.raises(DeadlineError) as caught:
                if what == "pull":
                    out = None if transport.in_place else torch.empty(8, dtype=torch.uint8)
                    single.pull(transport, 1, 0, 1, out=out).wait(WHERE)
                elif what == "receive":
                    single.expect(transport, 1, Tag(CHANNEL_GRAD, 5), 8)
                    single.receive(transport, 1, Tag(CHANNEL_GRAD, 5), WHERE)
                else:
                    transport.wait_finished(1, WHERE)
            text = str(caught.value)
            for part in ("rank 0", "rank 1", "0.2 s", "'blocks.3.fc'", "step 12", "slice 2/1", "4711 bytes", "deadline_s"):
                assert part in text, (part, text)
            assert (caught.value.rank, caught.value.peer, caught.value.where) == (0, 1, WHERE)
        exchange("end")

    cluster.run(2, body, sizes=[[8, 8]], deadline_s=0.2)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_death_of_a_rank_is_named_on_all_survivors(cluster: Cluster, victim: int) -> None:
    """The survivors wait for each other, not for the dead rank: they must learn of it all the same."""
    waiting = threading.Barrier(3)

    def body(transport: Transport, exchange) -> tuple[int, str] | None:
        rank = transport.rank
        if rank == victim:
            waiting.wait(20)
            cluster.die(transport)
            return None
        other = 3 - rank - victim
        single.expect(transport, other, Tag(CHANNEL_GRAD), 8)
        waiting.wait(20)
        with pytest.raises(PeerLostError) as caught:
            single.receive(transport, other, Tag(CHANNEL_GRAD), WHERE)
        with pytest.raises(PeerLostError):
            single.arrived(transport, other, Tag(CHANNEL_GRAD))
        assert caught.value.where == WHERE and "blocks.3.fc" in str(caught.value)
        return caught.value.peer, str(caught.value)

    results = cluster.run(3, body, deadline_s=30)
    for rank in {0, 1, 2} - {victim}:
        peer, text = results[rank]
        assert peer == victim and f"rank {victim}" in text and f"rank {rank}" in text


def test_chain_of_waits_names_the_rank_that_left(cluster: Cluster) -> None:
    """Rank 2 leaves; rank 1 waits for it; rank 0 waits for rank 1 only, and must hear of rank 2 and not of rank 1."""

    def body(transport: Transport, exchange) -> int:
        if transport.rank == 2:
            return -1
        awaited = 2 if transport.rank == 1 else 1
        single.expect(transport, awaited, Tag(CHANNEL_GRAD), 8)
        with pytest.raises(PeerLostError) as caught:
            single.receive(transport, awaited, Tag(CHANNEL_GRAD), WHERE)
        assert "closed" in str(caught.value) and "log" in str(caught.value)
        return caught.value.peer

    assert cluster.run(3, body) == [2, 2, -1]


def test_what_came_before_a_goodbye_is_still_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "LINGER_S", 0.5)  # the other goodbye, for which p2p's close() waits, comes after it

    def body(transport: Transport, exchange) -> None:
        if transport.rank == 1:
            deposit(transport, 0, Tag(CHANNEL_GRAD), pattern(1, nbytes=500))
            transport.finish(1)
            transport.close()
            exchange("gone")
        else:
            exchange("gone")
            single.expect(transport, 1, Tag(CHANNEL_GRAD), 500)
            single.expect(transport, 1, Tag(CHANNEL_GRAD, 1), 500)
            got = single.receive(transport, 1, Tag(CHANNEL_GRAD), WHERE)
            assert torch.equal(got, pattern(1, nbytes=500))
            single.release(transport, 1, Tag(CHANNEL_GRAD))
            transport.wait_finished(1)
            transport.wait_finished(7)  # who has left reads nothing any more
            transport.finish(1)
            with pytest.raises(PeerLostError, match="closed"):
                single.receive(transport, 1, Tag(CHANNEL_GRAD, 1), WHERE)

    cluster.run(2, body)


def test_abort_reaches_the_peers(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        if transport.rank == 1:
            transport.close("out of patience, für alle")
            exchange("aborted")
        else:
            single.expect(transport, 1, Tag(CHANNEL_GRAD), 8)
            with pytest.raises(PeerLostError, match="out of patience, für alle") as caught:
                single.receive(transport, 1, Tag(CHANNEL_GRAD), WHERE)
            assert caught.value.peer == 1
            exchange("aborted")

    cluster.run(2, body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_double_close_and_use_after_close(cluster: Cluster, world_size: int) -> None:
    def body(transport: Transport, exchange) -> None:
        exchange("all open")
        transport.close()
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            transport.progress()
        with pytest.raises(TransportError, match="closed"):
            transport.publish((0,), 1)

    cluster.run(world_size, body, sizes=[[8] * world_size])


def test_misuse_is_refused(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        rank, other = transport.rank, 1 - transport.rank
        out = None if transport.in_place else torch.empty(0, dtype=torch.uint8)
        with pytest.raises(TransportError, match="twice"):
            transport.expose([[8, 8]])
        with pytest.raises(ValueError, match="rise by one"):
            transport.publish((0,), 2)
        with pytest.raises(ValueError, match=r"\[4, 12\).*8 bytes"):
            single.pull(transport, other, 0, 1, start=4, nbytes=8, out=out)
        with pytest.raises(ValueError, match="no window"):
            single.pull(transport, other, 1, 1, out=out)
        with pytest.raises(ValueError, match="no window"):
            transport.publish((-1,), 1)
        with pytest.raises(ValueError, match="is no peer"):
            single.reserve(transport, rank, 8)
        with pytest.raises(ValueError, match="is no peer"):
            single.arrived(transport, 7, Tag(CHANNEL_GRAD))
        with pytest.raises(ValueError, match="not reserved"):
            single.send(transport, other, Tag(CHANNEL_GRAD), torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(ValueError, match="no message"):
            single.release(transport, other, Tag(CHANNEL_GRAD, 99))
        buffer = single.reserve(transport, other, 8)
        assert buffer is not None
        with pytest.raises(ValueError, match=r"0 \.\. 2\*\*31-1"):
            single.send(transport, other, Tag(-1), buffer)
        single.send(transport, other, Tag(CHANNEL_GRAD), buffer)
        with pytest.raises(ValueError, match="sent before"):
            single.send(transport, other, Tag(CHANNEL_GRAD, 1), buffer)
        # A pull into a buffer where none is needed, and none where one is.
        wrong = torch.empty(8, dtype=torch.uint8) if transport.in_place else None
        with pytest.raises(ValueError, match="out"):
            single.pull(transport, other, 0, 1, out=wrong)
        transport.finish(1)
        with pytest.raises(ValueError, match="is over"):
            single.pull(transport, other, 0, 1, out=out)
        with pytest.raises(ValueError, match="epochs rise"):
            transport.finish(1)
        single.expect(transport, other, Tag(CHANNEL_GRAD), 8)
        single.receive(transport, other, Tag(CHANNEL_GRAD), WHERE)
        exchange("end")

    cluster.run(2, body, sizes=[[8, 8]])


def test_same_tag_twice_in_flight_is_refused(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        if transport.rank == 0:
            for _ in range(2):
                deposit(transport, 1, Tag(CHANNEL_GRAD, 3), torch.zeros(4, dtype=torch.uint8))
        else:
            with pytest.raises(TransportError, match=r"two messages Tag\(channel=2, key=3"):
                wait_until(transport, lambda: False, peer=0, where=WHERE, doing="nothing")
        exchange("end")

    cluster.run(2, body)


def test_different_windows_are_found_at_once(cluster: Cluster) -> None:
    def body(transport: Transport, exchange) -> bool:
        with pytest.raises(MismatchError, match=r"key 1 .*same model"):
            transport.expose([[8, 8], [8, 8 + transport.rank]])
        return True

    assert cluster.run(2, body) == [True, True]
