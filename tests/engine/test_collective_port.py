"""Plain collectives of the engine over ranks as threads: sums, and peers that leave as soon as their part is done."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.errors import PeerLostError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.inproc import InprocTransport, InprocWorld
from tests.support.threads import run_ranks

WORLD = 3


def port_of(transport: InprocTransport) -> CollectivePort:
    engine = SimpleNamespace(
        transport=transport,
        rank=transport.rank,
        world_size=transport.world_size,
        config=SimpleNamespace(order="pairwise"),
        gradients=SimpleNamespace(relieve=lambda: None),
        ensure_exposed=lambda: None,
        step=0,
        probe=Probe(),
    )
    return CollectivePort(cast(Engine, engine))


def partials(rank: int) -> torch.Tensor:
    return torch.arange(WORLD * 4, dtype=torch.float32) * (rank + 1)


def in_turn(transport: InprocTransport, blocked: int, until: threading.Event) -> None:
    """No credit towards rank `blocked` until the event."""
    reserve = transport.try_reserve

    def later(dst: int, nbytes: int) -> torch.Tensor | None:
        return reserve(dst, nbytes) if dst != blocked or until.is_set() else None

    transport.try_reserve = later  # type: ignore[method-assign]


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
        transport.expose([])
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
        transport.expose([])
        exchange("open")
        try:
            if rank != 2:
                with pytest.raises(PeerLostError, match="rank 2") as caught:
                    port_of(transport).reduce_scatter(torch.empty(4), partials(rank), None)
                assert caught.value.peer == 2
                exchange("end")
            else:
                transport.close()
                exchange("end")
        finally:
            transport.close()

    run_ranks(WORLD, body, timeout_s=30.0)
