"""An exception anywhere in a step, on all ranks or on one: the step after it is right, and nothing of the broken one is left.

The exception is raised at the n-th time that a step comes to a place, for every place and all n, on one group of ranks without
a new start in between. Each rank must raise exactly once for each incident (far before the deadline, whose error is another):
its own exception, or a BrokenStepError that names the rank, the layer and the cause; then all go on, with the gradients of
autograd over whole weights.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

import pytest
import torch

from commfuse_dp.transport.base import Transport
from tests.simulated.broken_steps import (
    SITES,
    SUMMING,
    Injected,
    InjectedInterrupt,
    Injection,
    Rig,
    raising_sum,
    run_incidents,
)
from tests.support.cells import slow
from tests.support.copying import CopyingTransport
from tests.support.hosts import open_hierarchical
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import CLUSTERS

REAL = ("shm", "tcp", "p2p")
Opener = Callable[[int, ExchangeFn], Transport]


def opener(kind: str, n: int, nbytes: int, seed: int = 0) -> Opener:
    if kind == "copying":
        world = InprocWorld(n, inbox_bytes=nbytes, deadline_s=60.0, faults=Faults(seed=seed, max_delay=4))
        return lambda rank, exchange: CopyingTransport(rank, world)
    if kind == "hosts":
        world = InprocWorld(n, inbox_bytes=nbytes, deadline_s=60.0, faults=Faults(seed=seed, max_delay=2))
        identities = [str(rank // 2) for rank in range(n)]
        return lambda rank, exchange: open_hierarchical(
            rank, identities, world, exchange, inbox_bytes=nbytes, copying=True, deadline_s=60.0
        )
    return CLUSTERS[kind]().opener(n, nbytes, 60.0)


@pytest.fixture(autouse=True)
def sums_that_raise(monkeypatch):
    for name in SUMMING:
        monkeypatch.setattr(importlib.import_module(name), "sum_in_rank_order", raising_sum)


def run(kind: str, n: int, plans: list[Injection], *, alone: bool, nbytes: int, **options: object) -> list[int]:
    open_transport = opener(kind, n, nbytes)

    def body(rank: int, exchange: ExchangeFn) -> int:
        rig = Rig(open_transport(rank, exchange), exchange, nbytes=nbytes, **options)
        try:
            return run_incidents(rig, plans, alone=alone)
        finally:
            rig.engine.close()

    return run_ranks(n, body, timeout_s=300.0)


def every(sites: tuple[str, ...], times: int, stride: int = 1) -> list[Injection]:
    kinds = (Injected, InjectedInterrupt)
    return [Injection(site, n, kinds[(n // stride) % 2]) for site in sites for n in range(0, times, stride)]


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("stride", [slow(1), slow(5), 10])
def test_every_place_of_a_step(alone, stride):
    true = run("copying", 3, every(SITES, 20, stride), alone=alone, nbytes=4096)
    assert min(true) > 100 // stride


@pytest.mark.parametrize(
    ("kind", "alone", "stride"),
    [
        ("shm", True, 7),
        ("tcp", False, 7),
        ("p2p", True, 8),
        *(slow(*cell, 3) for cell in itertools.product(REAL, (True, False))),
    ],
)
def test_between_real_transports(kind, alone, stride):
    true = run(kind, 2, every(SITES, 8, stride), alone=alone, nbytes=1 << 14)
    assert min(true) > 45 // stride


@pytest.mark.parametrize("stride", [slow(2), 5])
@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_where_ranks_wait_for_credit(alone, stride):
    """Room for one slice per peer."""
    true = run("copying", 3, every(("produce", "sent", "sum", "hook"), 9, stride), alone=alone, nbytes=264, slices=3)
    assert min(true) > 20 // stride


@pytest.mark.parametrize("stride", [slow(1), 3])
@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_chains(alone, stride):
    """ZeRO-1/2: sums travel through all ranks."""
    sites = ("produce", "produced", "reserved", "sent", "deliver", "hook")
    true = run("copying", 3, every(sites, 8, stride), alone=alone, nbytes=4096, layout="replicated", slices=1)
    assert min(true) > 15 // stride


@pytest.mark.parametrize(("alone", "stride"), [slow(False, 3), slow(True, 3), (True, 8)])
def test_two_levels(alone, stride):
    true = run("hosts", 4, every(SITES, 8, stride), alone=alone, nbytes=4096)
    assert min(true) > 45 // stride


@pytest.mark.parametrize(
    ("nbytes", "alone", "stride"),
    [
        pytest.param(512, False, 3, id="512-all", marks=pytest.mark.slow),
        pytest.param(512, True, 3, id="512-one-3", marks=pytest.mark.slow),
        pytest.param(512, True, 8, id="512-one"),
        pytest.param(4096, False, 3, id="4096-all-3", marks=pytest.mark.slow),
        pytest.param(4096, False, 8, id="4096-all"),
        pytest.param(4096, True, 3, id="4096-one", marks=pytest.mark.slow),
    ],
)
def test_with_plain_collectives_under_way(alone, nbytes, stride):
    """What FSDP2 keeps for itself goes over the same rings: an all-gather is pending while the step is broken off."""
    true = run("copying", 3, every(SITES, 12, stride), alone=alone, nbytes=nbytes, collectives=True)
    assert min(true) > 60 // stride


def test_no_gradient_of_a_lost_step_is_delivered_later():
    """Partials come after the user has cleared the gradients, and another stream's wait sums what has come."""
    world = InprocWorld(2, inbox_bytes=4096, deadline_s=60.0)

    def body(rank: int, exchange: ExchangeFn) -> None:
        rig = Rig(world.transport(rank), exchange, nbytes=4096)
        hook = rig._hook

        def holding(grad: torch.Tensor) -> None:
            """From the beginning of the backward on nothing that this rank sends arrives."""
            world.hold(rank, 1 - rank)
            hook(grad)

        try:
            rig.step(0)
            rig._hook = holding
            with rig.injector.planned(Injection("hook", 1, Injected)), pytest.raises(Injected):
                rig.step(1)
            rig._hook = hook
            slots = [slot for layer in rig.slots for slot in layer]
            for slot in slots:
                slot.grad = None
            exchange(None)
            world.let_go(rank, 1 - rank)
            while not rig.engine.gradients.idle:
                rig.transport.progress(0.01)
                rig.engine.gradients.make_progress()
            assert all(slot.grad is None for slot in slots)
            exchange(None)
            rig.step(2)
            rig.check(2)
        finally:
            rig.engine.close()

    run_ranks(2, body)
