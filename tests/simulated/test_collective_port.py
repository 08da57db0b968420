"""Plain collectives of the engine over ranks as threads: sums, and peers that leave as soon as their part is done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.routes.outbox import Reserver
from commfuse_dp.errors import PeerLostError, Where
from commfuse_dp.transport.waiting import wait_until
from tests.support.inproc import InprocTransport, InprocWorld
from tests.support.threads import run_ranks

WORLD = 3


def port_of(transport: InprocTransport) -> CollectivePort:
    return CollectivePort(
        Engine(transport, [], CommFuseConfig(), device=torch.device("cpu"), replicas=None), "a group", "Begin anew."
    )


def partials(rank: int) -> torch.Tensor:
    return torch.arange(WORLD * 4, dtype=torch.float32) * (rank + 1)


def in_turn(transport: InprocTransport, blocked: int, until: threading.Event) -> None:
    """No credit towards rank `blocked` until the event."""
    reserve = transport.reserve

    def later(dsts: Sequence[int], sizes: Sequence[int], room: int = 0) -> list[torch.Tensor]:
        return reserve(dsts, sizes, room) if tuple(dsts) != (blocked,) or until.is_set() else []

    transport.reserve = later  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [(1, 0), (0, 1), (1, 2), (2, 0)])
@pytest.mark.parametrize("what", ["reduce-scatter", "all-gather"])
def test_a_peer_that_is_done_may_leave(late, what):
    """The third rank has all it needs and closes, while one of the others still waits for its neighbour."""
    sender, receiver = late
    leaver = 3 - sender - receiver
    left = threading.Event()
    world = InprocWorld(WORLD, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: Any) -> torch.Tensor:
        transport = world.transport(rank)
        port = port_of(transport)
        if rank == sender:
            in_turn(transport, receiver, left)
        try:
            if what == "reduce-scatter":
                out = torch.empty(4)
                port.reduce_scatter(out, partials(rank), None)
            else:
                out = torch.empty(4 * WORLD)
                port.all_gather(out, torch.full((4,), float(rank))).wait()
        finally:
            transport.close()
            if rank == leaver:
                left.set()
        return out

    results = run_ranks(WORLD, body, timeout_s=30.0)
    total = sum(partials(rank) for rank in range(WORLD))
    for rank, got in enumerate(results):
        want = total.view(WORLD, 4)[rank] if what == "reduce-scatter" else torch.arange(3.0).repeat_interleave(4)
        assert torch.equal(got, want)


def test_a_peer_that_leaves_early_is_named():
    world = InprocWorld(WORLD, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: Any) -> None:
        transport = world.transport(rank)
        port = port_of(transport)
        port.all_gather(torch.empty(WORLD), torch.ones(1)).wait()
        exchange("open")
        try:
            if rank != 2:
                with pytest.raises(PeerLostError, match="rank 2") as caught:
                    port.reduce_scatter(torch.empty(4), partials(rank), None)
                assert caught.value.peer == 2
                exchange("end")
            else:
                transport.close()
                exchange("end")
        finally:
            transport.close()

    run_ranks(WORLD, body, timeout_s=30.0)


@pytest.mark.parametrize("share", [0.05, 0.6, 3.0], ids=["small", "most of an inbox", "three inboxes"])
def test_an_all_gather_of_any_size_moves_before_its_wait(share):
    """Sent as far as credit goes when it begins; then with whatever else the ranks do (here: layers, which poll)."""
    inbox = 1 << 16
    world = InprocWorld(2, inbox_bytes=inbox, deadline_s=60.0)
    n = int(inbox * share) // 4

    def body(rank: int, exchange: Any) -> tuple[int, bool]:
        transport = world.transport(rank)
        engine = Engine(transport, [], CommFuseConfig(inbox_bytes=inbox), device=torch.device("cpu"), replicas=None)
        port = CollectivePort(engine, "a group", "Begin anew.")
        out = torch.empty(2 * n)
        work = port.all_gather(out, torch.full((n,), float(rank + 1)))
        begun = engine.probe.counters.param_bytes_sent
        for _ in range(20):
            exchange("a layer")
            port.progress()
        done = work.is_completed()
        work.wait()
        assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(n))
        exchange("end")
        engine.close()
        return begun, done

    for begun, done in run_ranks(2, body):
        assert begun >= min(4 * n, inbox // 2) and done


def test_a_gradient_does_not_overtake_a_collective():
    """See [Note: Program order in a ring]: an inbox full of what comes later could never be emptied."""
    inbox = 4096
    world = InprocWorld(2, inbox_bytes=inbox, deadline_s=60.0)

    def body(rank: int, exchange: Any) -> None:
        engine = Engine(world.transport(rank), [], CommFuseConfig(), device=torch.device("cpu"), replicas=None)
        port = CollectivePort(engine, "a group", "Begin anew.")
        engine.ensure_exposed()
        exchange("open")
        if rank == 0:
            out = torch.empty(2 * 2 * inbox, dtype=torch.uint8)
            work = port.all_gather(out, torch.ones(2 * inbox, dtype=torch.uint8))
            assert port.sends_to(1) and Reserver(engine.transport).try_reserve(1, 0) is None  # no room is left at all
            assert engine.gradients.slots.try_reserve(1, 64) is None
        exchange("full")
        if rank == 1:
            out = torch.empty(2 * 2 * inbox, dtype=torch.uint8)
            work = port.all_gather(out, torch.ones(2 * inbox, dtype=torch.uint8))
        work.wait()
        assert out.all() and not port.sends_to(1 - rank)
        slots, peer = engine.gradients.slots, 1 - rank
        wait_until(engine.transport, lambda: slots.try_reserve(peer, 64) is not None, peer=peer, where=Where(), doing="credit")
        exchange("end")
        engine.close()

    run_ranks(2, body)
