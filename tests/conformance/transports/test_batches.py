"""The interface moves batches: what a call with several peers, keys or slices does."""

from __future__ import annotations

import pytest
import torch

from commfuse_dp.transport.base import CHANNEL_GRAD, PullRequest, Sending, Tag, Transport
from tests.support import single
from tests.support.transports import CLUSTERS, Cluster, pattern

RANKS = 3
TAG = Tag(CHANNEL_GRAD, 1)


@pytest.fixture(params=["inproc", "shm", "tcp"])
def host(request: pytest.FixtureRequest) -> Cluster:
    """Whoever waits here is the CPU: of batches in streams see tests/simulated/test_together.py."""
    return CLUSTERS[request.param]()


def test_twelve_methods_and_two_flags() -> None:
    methods = [name for name, value in vars(Transport).items() if callable(value) and not name.startswith("_")]
    flags = [name for name, value in vars(Transport).items() if value is False]
    assert len(methods) <= 12 and len(flags) <= 2, (methods, flags)


def test_one_pull_for_all_owners_and_keys(host: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        rank, seen = transport.rank, []
        for epoch in (1, 2, 3):
            transport.wait_finished(epoch - 1)
            for key in (0, 1):
                transport.segments[key].copy_(pattern(rank, key, epoch, nbytes=96))
            transport.publish((0, 1), epoch, last=True)
            exchange("published")
            transport.progress()  # takes in that it is
            wanted = [(owner, key) for owner in range(RANKS) for key in (0, 1)]
            outs = [None if transport.in_place else torch.empty(64, dtype=torch.uint8) for _ in wanted]
            transfers = transport.pull(
                epoch, [PullRequest(*slice_, 32, 64, out) for slice_, out in zip(wanted, outs, strict=True)]
            )
            for (owner, key), transfer in zip(wanted, transfers, strict=True):
                assert torch.equal(transfer.wait(), pattern(owner, key, epoch, nbytes=96)[32:])
            seen.append([transfer.data for transfer in transfers])
            transport.finish(epoch)
            exchange("read")
        if transport.in_place:  # there without a wait, in the same place as before
            assert all(a is not None and a is b for a, b in zip(seen[1], seen[2], strict=True))
        received = transport.probe.counters.param_bytes_received
        assert received == 3 * 2 * 64 * (RANKS - 1), received

    host.run(RANKS, body, sizes=[[96] * RANKS] * 2)


def test_a_pull_that_cannot_have_all_at_once_has_read_nothing(host: Cluster) -> None:
    """Its caller may ask again, slice by slice."""

    def body(transport: Transport, exchange) -> None:
        peer, counters = (transport.rank + 1) % RANKS, transport.probe.counters
        for epoch in (1, 2, 3):
            transport.wait_finished(epoch - 1)
            transport.publish((0,), epoch)
            exchange("the first")
            transport.progress()  # takes in that it is published
            outs = [None if transport.in_place else torch.empty(64, dtype=torch.uint8) for _ in range(2)]
            before = counters.param_bytes_received
            transfers = transport.pull(epoch, [PullRequest(peer, key, 0, 64, outs[key]) for key in (0, 1)])
            if transport.in_place:
                assert all(transfer.data is None for transfer in transfers)
                assert counters.param_bytes_received == before
            exchange("asked")
            transport.publish((1,), epoch)
            for transfer in transfers:
                transfer.wait()
            assert counters.param_bytes_received == before + 128
            transport.finish(epoch)

    host.run(RANKS, body, sizes=[[96] * RANKS] * 2)


def test_a_reservation_ends_at_the_first_rank_without_room(host: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        first, second = [peer for peer in range(RANKS) if peer != transport.rank]
        whole = transport.reserve((second,), (4096,))
        assert len(whole) == 1
        found = transport.reserve((first, second, first), (64, 64, 64))
        assert [buffer.numel() for buffer in found] == [64]
        transport.send((Sending(first, TAG, found[0].fill_(7)),))
        transport.send((Sending(second, TAG, whole[0].fill_(9)),))
        exchange("sent")
        for peer in (first, second):
            transport.receive((peer,), TAG)
            transport.release((peer,), TAG)

    host.run(RANKS, body)


def test_nothing_is_received_until_all_of_it_is_here(host: Cluster) -> None:
    def body(transport: Transport, exchange) -> None:
        rank = transport.rank
        if rank == 1:
            send(transport, 0)
        exchange("one of two")
        if rank == 0:
            assert [single.receive(transport, 1, TAG)[0].item()] == [1]
            assert transport.receive((1, 2), TAG, wait=False) == []
            assert transport.receive((1,), TAG, wait=False)
        exchange("asked")
        if rank == 2:
            send(transport, 0)
        if rank == 0:
            assert [got[0].item() for got in transport.receive((1, 2), TAG)] == [1, 2]
            assert [got[0].item() for got in transport.receive((2, 1), TAG, wait=False)] == [2, 1]
            transport.release((1, 2), TAG)
            with pytest.raises(ValueError, match="released twice"):
                transport.release((2,), TAG)
            assert transport.recovery is not None and transport.recovery.held == 0
        exchange("end")

    def send(transport: Transport, dst: int) -> None:
        (buffer,) = transport.reserve((dst,), (8,))
        transport.send((Sending(dst, TAG, buffer.fill_(transport.rank)),))

    host.run(RANKS, body)
