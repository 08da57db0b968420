"""The engine over several hosts: random programs of test_engine.py over transport hierarchical; what crosses hosts, counted.

Hosts are pretended: inside one the in-process transport, late by random numbers of polls; between them real TCP connections.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.probe import Counters
from commfuse_dp.transport.base import ExchangeFn, Transport
from commfuse_dp.transport.hierarchical.relays import Relays
from commfuse_dp.transport.hierarchical.transport import HierarchicalTransport
from tests.simulated.test_engine import Policy, Slot, Step, base_case, cases, data, run_program, weights
from tests.support.cells import slow
from tests.support.hosts import open_hierarchical, shuffled_hosts
from tests.support.inproc import Faults, InprocWorld
from tests.support.threads import run_ranks


def opener(case: dict[str, Any]) -> Callable[[int, ExchangeFn], Transport]:
    n, per_host = case["world_size"], case["per_host"]
    identities = shuffled_hosts(n, per_host, case["seed"])
    faults = Faults(seed=case["seed"], max_delay=case["delay"])
    deadline_s = case.get("deadline_s", 20.0)
    world = InprocWorld(n, inbox_bytes=case["bytes"], deadline_s=deadline_s, faults=faults)
    return lambda rank, exchange: open_hierarchical(
        rank, identities, world, exchange, inbox_bytes=case["bytes"], copying=case["copying"], deadline_s=deadline_s
    )


SHAPES = [(2, 2), (2, 3), (3, 2)]


@settings(max_examples=6)
@given(cases(), st.sampled_from(SHAPES))
def test_random_programs_over_hosts_give_the_gradients_of_autograd(case, shape):
    case = {**case, "world_size": shape[0] * shape[1], "per_host": shape[1]}
    run_program(case, opener(case))


@pytest.mark.slow
@settings(max_examples=16)
@given(cases(), st.sampled_from(SHAPES))
def test_more_random_programs_over_hosts(case, shape):
    case = {**case, "world_size": shape[0] * shape[1], "per_host": shape[1]}
    run_program(case, opener(case))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_no_deadlock_with_credit_for_one_slice_per_level(seed):
    case = base_case(world_size=4, per_host=2, seed=seed, slices=3, steps=[Step([0, 1, 2, 3])] * 4)
    run_program(case, opener(case))


def run_steps(transport: Transport, policy: Policy, steps: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Gradients of three linears after so many steps of the same data, one after the other."""
    rank, n = transport.rank, transport.world_size
    params = [[p.to(dtype) for p in layer] for layer in weights(3, 5, True)]
    slots = [[Slot(f"{i}.{j}", p, rank, n) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
    units = [Unit(i, f"layer{i}", layer, policy, 1) for i, layer in enumerate(slots)]
    engine = Engine(transport, units, CommFuseConfig(), device=torch.device("cpu"), replicas=None)
    operands = [UnitOperand(engine, unit) for unit in units]
    for step in range(steps):
        engine.begin_step()
        x = data(rank, step).to(policy.compute_dtype or dtype)
        for operand in operands:
            x = torch.tanh(fused_linear(x, operand, 0))
        engine.end_forward(True)
        x.sum().backward()
    engine.close()
    return [slot.grad for layer in slots for slot in layer if slot.grad is not None]


@pytest.mark.parametrize(("hosts", "per_host"), [slow(2, 2), (3, 2), slow(2, 3)])
def test_a_shard_crosses_to_a_host_once_and_so_does_a_host_s_sum(hosts, per_host):
    n, steps = hosts * per_host, 3
    identities = [str(rank // per_host) for rank in range(n)]
    world = InprocWorld(n, inbox_bytes=4096, deadline_s=20.0)

    def body(rank: int, exchange: ExchangeFn) -> tuple[Counters, list[int]]:
        transport = open_hierarchical(rank, identities, world, exchange, inbox_bytes=4096)
        run_steps(transport, Policy(), steps)
        return transport.probe.across, [sum(row[rank] for row in transport.sizes)]

    results = run_ranks(n, body)
    shards = [size for _, (size,) in results]
    for rank, (across, _) in enumerate(results):
        rail = [r for r in range(n) if r % per_host == rank % per_host and r != rank]
        assert across.param_bytes_received == steps * sum(shards[r] for r in rail)
        assert across.grad_bytes_received == steps * (hosts - 1) * shards[rank]
        assert across.grad_bytes_sent == steps * sum(shards[r] for r in rail)


def test_results_do_not_depend_on_arrival():
    """Bitwise: the sums are nested in rank order, whatever comes first; bf16 partials, sums between hosts in float32."""
    policy = Policy(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for seed in range(3):
        world = InprocWorld(4, inbox_bytes=1024, deadline_s=20.0, faults=Faults(seed=seed, max_delay=7 * seed))

        def body(rank: int, exchange: ExchangeFn, world: InprocWorld = world) -> list[torch.Tensor]:
            transport = open_hierarchical(rank, ["a", "a", "b", "b"], world, exchange, inbox_bytes=1024)
            return run_steps(transport, policy, 2, torch.float32)

        found.append(run_ranks(4, body))
    for other in found[1:]:
        for grads, theirs in zip(found[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(grads, theirs, strict=True))


def test_a_shard_that_comes_late_is_waited_for_by_all_ranks_of_the_host(monkeypatch):
    """The I/O threads of host b's gateways are held back: nobody may read a relay before it is there."""
    delivered = HierarchicalTransport._relayed
    chance = random.Random(3)

    def late(self: HierarchicalTransport, relay: int, epoch: int) -> None:
        import time

        time.sleep(chance.random() * 0.01)
        delivered(self, relay, epoch)

    monkeypatch.setattr(HierarchicalTransport, "_relayed", late)
    case = base_case(world_size=4, per_host=2, copying=False)
    run_program(case, opener(case))


def test_the_programs_would_find_a_relay_of_the_wrong_host(monkeypatch):
    """Planted: shards of hosts at distance 1 and 2 are mixed up."""
    case = base_case(world_size=6, per_host=2, deadline_s=1.0)
    right = Relays.at

    def mixed_up(self: Relays, owner: int, key: int) -> tuple[int, int]:
        source, found = right(self, owner, key)
        return source, key * 3 + (0, 2, 1)[found - key * 3]

    monkeypatch.setattr(Relays, "at", mixed_up)
    with pytest.raises(Exception):  # noqa: B017  (wrong numbers, or wrong sizes)
        run_program(case, opener(case))
