"""Replay is invisible: random programs whose facts change between steps give the same bits, and the right ones, whether each
layer's backward is bound anew or replayed. On host transports and on the simulated device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.bound import MOST_PROGRAMS, Binder, BoundBackward, Record
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.probe import Counters
from commfuse_dp.transport.base import ExchangeFn, Transport
from tests.simulated.test_engine import Policy, Slot, data, plain_linear, weights
from tests.support.copying import CopyingTransport
from tests.support.fake_device import FakeWorld
from tests.support.fake_symmetric import open_fake
from tests.support.inproc import Faults, InprocTransport, InprocWorld
from tests.support.threads import run_ranks
from tests.support.watched import Watched

RANKS, LAYERS, STEPS = 3, 3, 12
KINDS = ("in place", "copying", "device", "device, small window")


# shift: what has been added to all parameters so far, as an optimizer does between steps.
STEADY: dict[str, Any] = {"reduce": True, "divisor": None, "frozen": (), "turned": False, "shift": 0.0}


def changes(seed: int) -> list[dict[str, Any]]:
    """What is different in each step; most change nothing."""
    choose = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(STEPS):
        facts: dict[str, Any] = found[-1].copy() if found else STEADY.copy()
        what = choose.choice(("", "reduce", "divisor", "frozen", "turned", "shift"))
        if what == "divisor":
            facts["divisor"] = choose.choice((None, 1.0, 2.0))
        elif what == "frozen":
            facts["frozen"] = choose.choice(((), ("1.0", "1.1"), ("0.1", "2.0")))
        elif what == "shift":
            facts["shift"] += choose.choice((-0.5, 0.25))
        elif what:
            facts[what] = not facts[what]
        found.append(facts)
    found[-1] = {**found[-1], "reduce": True}
    return found


def opener(kind: str, seed: int) -> Callable[[int, ExchangeFn], Transport]:
    if kind.startswith("device"):
        devices = FakeWorld(RANKS, seed=seed, deferred=False, stands=True)
        return lambda rank, exchange: open_fake(devices, rank, exchange, inbox_bytes=1 << 16, deadline_s=20.0)
    world = InprocWorld(RANKS, inbox_bytes=4096, deadline_s=20.0, faults=Faults(seed=seed, max_delay=2))
    transport = InprocTransport if kind == "in place" else CopyingTransport
    return lambda rank, exchange: transport(rank, world)


def run(kind: str, seed: int, steps: list[dict[str, Any]], *, replay: bool) -> list[tuple[list[torch.Tensor], Counters]]:
    """Of every rank: its gradients and what was counted."""
    params = weights(LAYERS, seed, bias=True)
    open_transport = opener(kind, seed)

    def body(rank: int, exchange: ExchangeFn) -> tuple[list[torch.Tensor], Counters]:
        transport = open_transport(rank, exchange)
        if transport.device is None:
            return train(rank, transport)
        with Watched(transport.device):  # type: ignore[arg-type]
            return train(rank, transport)

    def train(rank: int, transport: Transport) -> tuple[list[torch.Tensor], Counters]:
        policy = Policy()
        slots = [[Slot(f"{i}.{j}", p, rank, RANKS) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
        units = [Unit(i, f"layer{i}", layer, policy, 2) for i, layer in enumerate(slots)]
        # All of a layer comes together, or slice by slice.
        config = CommFuseConfig(replay=replay, **({"prefetch_bytes": 1 << 9} if kind == "device, small window" else {}))
        engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
        operands = [UnitOperand(engine, unit) for unit in units]
        for number, facts in enumerate(steps):
            policy.reduce_grads, policy.divide_factor = facts["reduce"], facts["divisor"]
            for slot in (slot for layer in slots for slot in layer):
                slot.requires_grad = slot.name not in facts["frozen"]
                slot.local().add_(facts["shift"] - (steps[number - 1]["shift"] if number else 0.0))
            engine.begin_step()
            x = data(rank, number).requires_grad_()
            order = list(range(LAYERS))
            for layer in reversed(order) if facts["turned"] else order:
                x = torch.tanh(fused_linear(x, operands[layer], 0))
            engine.end_forward(True)
            x.sum().backward()
        engine.reduce_accumulated()
        found = [slot.grad if slot.grad is not None else torch.zeros_like(slot.local()) for layer in slots for slot in layer]
        counters = transport.probe.counters.snapshot()
        engine.close()
        return found, counters

    return run_ranks(RANKS, body, timeout_s=60)


def expected(seed: int, steps: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Whole gradients, by autograd. What is accumulated is divided by the divisor of the step that reduces it."""
    params = weights(LAYERS, seed, bias=True)
    names = [(layer, part) for layer in range(LAYERS) for part in range(2)]
    totals = {name: torch.zeros_like(params[name[0]][name[1]]) for name in names}
    waiting = {name: torch.zeros_like(params[name[0]][name[1]]) for name in names}
    for number, facts in enumerate(steps):
        trained = [name for name in names if f"{name[0]}.{name[1]}" not in facts["frozen"]]
        for rank in range(RANKS):
            whole = [[(p + facts["shift"]).requires_grad_() for p in layer] for layer in params]
            x = data(rank, number)
            for layer in reversed(range(LAYERS)) if facts["turned"] else range(LAYERS):
                x = torch.tanh(plain_linear(x, whole[layer]))
            x.sum().backward()
            for layer, part in trained:
                waiting[layer, part] += whole[layer][part].grad
        if facts["reduce"]:  # also what was accumulated of parameters that are trained no more
            reduce_into(totals, waiting, names, facts["divisor"])
    reduce_into(totals, waiting, names, steps[-1]["divisor"])
    return [totals[name] for name in names]


def reduce_into(totals: dict[Any, Any], waiting: dict[Any, Any], names: list[Any], divisor: float | None) -> None:
    for name in names:
        totals[name] += waiting[name] / (divisor or float(RANKS))
        waiting[name].zero_()


CELLS = [(kind, seed) for kind in KINDS for seed in (3, 8)]
QUICK = [*CELLS[:4], ("device, small window", 8)]
MARKED = [cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]


@pytest.mark.parametrize(("kind", "seed"), MARKED)
def test_replay_gives_the_same_bits(kind: str, seed: int) -> None:
    steps = changes(seed)
    bound, replayed = run(kind, seed, steps, replay=False), run(kind, seed, steps, replay=True)
    whole = expected(seed, steps)
    params = [p for layer in weights(LAYERS, seed, bias=True) for p in layer]
    for rank, ((anew, without), (again, counted)) in enumerate(zip(bound, replayed, strict=True)):
        for one, other, total, param in zip(anew, again, whole, params, strict=True):
            assert torch.equal(one, other)
            assert torch.allclose(other, Slot("", param, rank, RANKS).shard(total), rtol=1e-11, atol=1e-11), (rank, steps)
        assert without.replayed == 0 and counted.replayed > 0
        assert without.bound == counted.bound + counted.replayed
        assert counted.grad_bytes_sent == without.grad_bytes_sent


def test_equal_steps_are_bound_once() -> None:
    steady = [STEADY] * STEPS
    for _, counted in run("in place", 1, steady, replay=True):
        assert (counted.bound, counted.replayed) == (LAYERS, LAYERS * (STEPS - 1))


def test_programs_do_not_pile_up() -> None:
    """A divisor that is another one in every step, as a script might set it."""
    steps = [{**STEADY, "divisor": 1.0 + n} for n in range(2 * MOST_PROGRAMS + 1)]
    most = 0
    bind = Binder._bind

    def watched(self: Binder, unit: Unit, record: Record) -> Any:
        nonlocal most
        most = max(most, *(len(kept) for kept in self._bound.values()))
        return bind(self, unit, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Binder, "_bind", watched)
        run("in place", 1, steps, replay=True)
    assert 1 < most <= MOST_PROGRAMS


@pytest.mark.parametrize("field", ["divisor", "include", "reduce"])
def test_a_fact_that_is_overlooked_is_found(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[int, Record] = {}
    backward = Binder.backward

    def blind(self: Binder, unit: Unit, record: Record) -> Any:
        kept = first.setdefault(id(unit), record)
        return backward(self, unit, record._replace(**{field: getattr(kept, field)}))

    monkeypatch.setattr(Binder, "backward", blind)
    with pytest.raises(Exception):  # noqa: B017  (whatever it breaks: a comparison, a shape, a wait)
        test_replay_gives_the_same_bits("in place", 3)


def test_slices_of_one_size_in_one_slot_keep_their_rows() -> None:
    """An inbox of few slices gives the same slot to one slice after another."""
    unit = Unit(0, "layer", [Slot("weight", torch.zeros(8, 2), 0, 2)], Policy(), 2)
    unit.bind(2, comfortable=1 << 20)
    geometry = unit.geometry(torch.float32, (True,))
    record = Record(False, None, (True,), False, None, None, False)
    bound = BoundBackward(unit, record, geometry, (), None, rank=0, ranks=2, replicas=0)
    slot = torch.zeros(16, dtype=torch.uint8)
    first, second = geometry.slices[1]
    for _ in range(2):
        assert bound.slot_pieces(first, slot)[0].row_start == 4 and bound.slot_pieces(second, slot)[0].row_start == 6
    assert len(bound.slot_views) == 2
