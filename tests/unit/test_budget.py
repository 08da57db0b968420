"""inbox_bytes is one budget for all peers of a rank, whatever the transport is and however many peers there are."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.room import least_ring
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.transport.budget import LEAST_RING, Room, divide, rings_of
from commfuse_dp.transport.symmetric.core import Layout
from tests.support.transports import CLUSTERS

MIB = 1 << 20


@pytest.mark.parametrize("n", [2, 8, 64, 512])
@pytest.mark.parametrize("kind", ["shm", "tcp", "mpi", "p2p", "symmetric"])
def test_the_budget_holds_for_any_number_of_ranks(kind, n):
    share = divide(32 * MIB, rings_of(kind, n), 0)
    assert share.nbytes <= 32 * MIB
    assert share.nbytes > 31 * MIB and share.ring % 64 == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 8)])
def test_the_hierarchical_order_shares_one_budget(device, hosts, per_host):
    where = Hosts.of([str(rank // per_host) for rank in range(hosts * per_host)])
    share = divide(32 * MIB, rings_of(device, where.world_size, where), 0)
    assert 31 * MIB < share.nbytes <= 32 * MIB


@pytest.mark.parametrize("kind", ["shm", "tcp", "p2p"])
def test_what_is_taken_is_what_is_said(kind):
    n = 3
    share = divide(1 * MIB, rings_of(kind, n), 0)

    def body(transport: Any, exchange: Any) -> int:
        memory = transport._memory
        own = [memory.incoming[peer] for peer in range(n) if peer != transport.rank]
        own += [memory.outgoing[peer] for peer in range(n) if peer != transport.rank and not transport.in_place]
        assert all(ring.numel() == share.ring == transport.message_limit for ring in own)
        exchange("end")
        return sum(ring.numel() for ring in own)

    assert CLUSTERS[kind]().run(n, body, inbox_bytes=share.ring) == [share.nbytes] * n


def test_what_symmetric_memory_holds():
    n = 8
    share = divide(32 * MIB, rings_of("symmetric", n), 0)
    words = 1 << 16
    assert share.nbytes <= Layout(n, share.ring).nbytes + (n - 1) * share.ring <= share.nbytes + words


def test_more_than_the_budget_is_said_before_it_is_taken(caplog):
    room = Room(8 * MIB, 8, 4 * MIB)
    with caplog.at_level(logging.INFO, "commfuse_dp"):
        assert room.ring("shm") == 4 * MIB
        assert "29,360,128 bytes per rank for all peers: 7 x 4,194,304, more than inbox_bytes=8,388,608" in caplog.text
        assert caplog.records[-1].levelno == logging.WARNING
        caplog.clear()
        assert Room(8 * MIB, 8, 0).ring("shm") == 8 * MIB // 7 // 64 * 64
        assert caplog.records[-1].levelno == logging.INFO
    assert divide(8 * MIB, 4, 0, 2 * MIB) == (MIB // 2, 4, 8 * MIB)  # more is of no use
    assert divide(8 * MIB, 4, MIB, 2 * MIB).ring == MIB and divide(2 * MIB, 4, 0, 8 * MIB).ring == MIB // 2
    assert divide(64, 100, 0).ring == 64 and divide(1 << 20, 1 << 20, 0).ring == LEAST_RING


@pytest.mark.parametrize(("free", "aloud"), [(79 * MIB, True), (80 * MIB, False), (None, False)])
def test_a_large_part_of_the_memory_is_said_aloud(caplog, free, aloud):
    """Window, messages and copies together, against what is free for the rank."""
    room = Room(4 * MIB, 4, 0, window=6 * MIB, published=40 * MIB, free=free)
    with caplog.at_level(logging.INFO, "commfuse_dp"):
        room.ring("tcp")
    taken, [record] = room.footprint, caplog.records
    assert (taken.window, taken.published) == (6 * MIB, 10 * MIB) and 19 * MIB < taken.nbytes <= 20 * MIB
    assert str(taken) in record.getMessage() and record.levelno == (logging.WARNING if aloud else logging.INFO)
    assert ("more than 1/4 of the 82,837,504 bytes" in record.getMessage()) is aloud
    room.ring("shm")  # reads in place
    assert room.footprint.window == 0


@pytest.mark.parametrize("slices", [None, 1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_the_least_ring_holds_a_slice_of_every_layer(slices, flat):
    n = 3
    shapes = [(40, 30)] if flat else [(40, 30), (40,)]
    slots: Any = [SimpleNamespace(name="w", shape=shape, local=lambda: torch.zeros(1), requires_grad=True) for shape in shapes]
    policy: Any = SimpleNamespace(compute_dtype=torch.bfloat16, reduce_dtype=None)
    unit = Unit(0, "w", slots, policy, slices, flat_bounds=chunk_bounds(1200, n) if flat else None)
    least = least_ring([unit], n, streams=False)
    unit.bind(n, comfortable=1)  # cut as finely as it may be
    assert unit.largest_slice(torch.float32) <= least <= unit.largest_slice(torch.float32) + 3 * 120
    assert least_ring([unit], 1, streams=False) == 0
