"""An exception anywhere in a step, on all ranks or on one: the step after it is right, and nothing of the broken one is left.

The exception is raised at the n-th time that a step comes to a place, for every place and all n, on one group of ranks without
a new start in between. Each rank must raise exactly once for each incident (far before the deadline, whose error is another):
its own exception, or a BrokenStepError that names the rank, the layer and the cause; then all go on, with the gradients of
autograd over whole weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.inproc import Faults, InprocWorld
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
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import CLUSTERS

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
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_every_place_of_a_step(alone, stride):
    true = run("copying", 3, every(SITES, 20, stride), alone=alone, nbytes=4096)
    assert min(true) > 100 // stride


@pytest.mark.parametrize(
    ("kind", "alone"), [("shm", True), ("tcp", False), ("p2p", True), slow("shm", False), slow("tcp", True), slow("p2p", False)]
)
def test_between_real_transports(kind, alone):
    true = run(kind, 2, every(SITES, 8, 3), alone=alone, nbytes=1 << 14)
    assert min(true) > 15


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_where_ranks_wait_for_credit(alone):
    """Room for one slice per peer."""
    true = run("copying", 3, every(("produce", "sent", "sum", "hook"), 9, 2), alone=alone, nbytes=264, slices=3)
    assert min(true) > 10


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_chains(alone):
    """ZeRO-1/2: sums travel through all ranks."""
    sites = ("produce", "produced", "reserved", "sent", "deliver", "hook")
    true = run("copying", 3, every(sites, 8), alone=alone, nbytes=4096, layout="replicated", slices=1)
    assert min(true) > 15


@pytest.mark.parametrize("alone", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all", "one"])
def test_two_levels(alone):
    true = run("hosts", 4, every(SITES, 8, 3), alone=alone, nbytes=4096)
    assert min(true) > 15


@pytest.mark.parametrize(
    ("nbytes", "alone"),
    [
        pytest.param(512, False, id="512-all", marks=pytest.mark.slow),
        pytest.param(512, True, id="512-one"),
        pytest.param(4096, False, id="4096-all"),
        pytest.param(4096, True, id="4096-one", marks=pytest.mark.slow),
    ],
)
def test_with_plain_collectives_under_way(alone, nbytes):
    """What FSDP2 keeps for itself goes over the same rings: an all-gather is pending while the step is broken off."""
    true = run("copying", 3, every(SITES, 12, 3), alone=alone, nbytes=nbytes, collectives=True)
    assert min(true) > 20
