"""The engine over a lockstep transport: random programs on the simulated device, uneven shards above all.

Every pull is also a send, so ranks that walked differently would stand for each other (`Stuck`), exchange other bytes than the
peer expects (`Unmatched`, wrong gradients, the checksums) or read too early (`Race`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.parameters import ParameterStream
from commfuse_dp.engine.partials import PartialGradients
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import DeadlineError, MismatchError
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.transport.base import GRAD_LANE, PARAM_LANE, ExchangeFn, Transport
from commfuse_dp.transport.grouped.messages import Inboxes, Messages
from commfuse_dp.transport.grouped.transport import Brought, NcclTransport
from commfuse_dp.transport.streams.staging import StagingRing
from tests.simulated.test_engine import Policy, Slot, Step, base_case, cases, data, expected, run_program, weights
from tests.support.cells import slow
from tests.support.fake_device import FakeWorld, Race, Stuck
from tests.support.fake_grouped import FakeBoard, Unmatched
from tests.support.fake_nccl import die, open_fake_nccl
from tests.support.threads import run_ranks
from tests.support.watched import Watched


def run_lockstep(case: dict[str, Any], **settings: Any) -> FakeBoard:
    world = FakeWorld(case["world_size"], seed=case["seed"], deferred=False, stands=True)
    board = FakeBoard(world)
    opened: list[NcclTransport] = []

    def open_transport(rank: int, exchange: ExchangeFn) -> Transport:
        transport = open_fake_nccl(board, rank, exchange, inbox_bytes=case["bytes"], **settings)
        opened.append(transport)
        return transport

    def watching(transport: Transport) -> AbstractContextManager[object]:
        return Watched(world.devices[transport.rank])

    try:
        run_program(case, open_transport, watching)
    finally:
        for transport in opened:
            die(transport)
    assert not any(board.open.values()), "an exchange without partner"
    return board


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(cases(), st.sampled_from(["auto", "blas"]))
def test_random_programs(case, kernels):
    """A window of two slices at least: a device needs room for all that a layer owes to one rank, twice."""
    run_lockstep({**case, "bytes": max(case["bytes"], 600), "kernels": kernels})


def uneven(**more: Any) -> dict[str, Any]:
    """Five rows on three or four ranks, in two slices: 2 2 1, or 2 2 1 and nothing. The window holds a few slices."""
    return base_case(bytes=600, steps=[Step([0, 1, 2, 3, 1])] * 3, **more)


@pytest.mark.parametrize(
    ("world_size", "order"),
    [(2, "pairwise"), (3, "ring"), slow(2, "ring"), slow(3, "pairwise"), slow(4, "pairwise"), slow(4, "ring")],
)
def test_all_ranks_take_the_same_steps(world_size, order):
    """Each in the direction and on the lane of all others; nobody exchanges more than the slices that there are."""
    board = run_lockstep(uneven(world_size=world_size, order=order, kernels="blas"))
    sign = 1 if order == "pairwise" else -1
    for rank, calls in board.calls.items():
        for lane, to, source in calls:
            for peer in to:  # a parameter goes to whom this rank turns to last, a gradient to whom it turns to first
                shift = (rank - peer if lane == PARAM_LANE else peer - rank) * sign % world_size
                assert not source or (source[0] - rank if lane == PARAM_LANE else rank - source[0]) * sign % world_size == shift
    totals = {lane: sum(len(to) for calls in board.calls.values() for at, to, _ in calls if at == lane) for lane in (0, 1)}
    slices = sum(min(2, rows) for rows in ([3, 2], [2, 2, 1], [2, 2, 1, 0])[world_size - 2])  # of all owners of a layer
    assert totals[GRAD_LANE] == 3 * 4 * slices * (world_size - 1)  # steps, layers (one is used twice, but sent once)
    uses = 3 * 10 * slices * (world_size - 1)  # forward and backward
    assert uses / 2 <= totals[PARAM_LANE] <= uses


@pytest.mark.parametrize(("world_size", "seed"), [(4, 2), slow(3, 1), slow(4, 5), slow(5, 6)])
def test_chains_take_the_same_steps(world_size, seed):
    """ZeRO-1/2, ranges of any length: a rank that has nothing to pass on takes the step all the same."""
    case = base_case(layout="replicated", bias=False, world_size=world_size, seed=seed, slices=3, bytes=600, kernels="blas")
    run_lockstep(case)


# ---- the simulation catches what these tests are for -------------------------------------------------------------------
def _own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank goes by the sizes of its own slices."""
    mirror = ParameterStream._mirror
    monkeypatch.setattr(
        ParameterStream, "_mirror", lambda self, key: mirror(self, key)._replace(weight=self._locate(key).nbytes)
    )


def _no_absent_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank passes over slices that an owner does not have."""
    gather = ParameterStream.gather

    def present(self: ParameterStream, unit: Any, consume: Any, *, keep: bool) -> None:
        reading = self._readings[unit.index]
        reading.forward = [visit for visit in reading.forward if not visit.item.absent]
        gather(self, unit, consume, keep=keep)

    monkeypatch.setattr(ParameterStream, "gather", present)


def _no_absent_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = PartialGradients.fill
    monkeypatch.setattr(
        PartialGradients, "fill", lambda self, item, produce: None if item.absent else fill(self, item, produce)
    )


def _not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment leaves without waiting for its packing."""
    publish = NcclTransport.publish

    def hasty(self: NcclTransport, *arguments: Any, **more: Any) -> None:
        publish(self, *arguments, **more)
        self._packed.clear()

    monkeypatch.setattr(NcclTransport, "publish", hasty)


def _no_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM reads the window without waiting for the exchange."""
    monkeypatch.setattr(Brought, "wait", lambda self, where=None: self._out)


def _old_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window buffer is written again under its reader."""
    take_later = BufferPool.take_later

    def hasty(self: BufferPool, nbytes: int) -> Any:
        buffer, event = take_later(self, nbytes)
        return buffer, vars(self).setdefault("first", event)

    monkeypatch.setattr(BufferPool, "take_later", hasty)


def _no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum reads a partial without waiting for the exchange."""

    def receive(self: Messages, src: int, tag: Any, where: Any) -> torch.Tensor:
        landing = self._landed[src, tag]
        landing.read = True
        return landing.data

    monkeypatch.setattr(Messages, "_receive", receive)


def _crowded_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial lands where a sum still reads."""
    land = Inboxes.land

    def hasty(self: Inboxes, *args: Any) -> Any:
        landing = land(self, *args)
        landing.behind.clear()
        return landing

    monkeypatch.setattr(Inboxes, "land", hasty)


def _crowded_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM writes where an exchange still reads."""
    reserve = StagingRing.reserve
    monkeypatch.setattr(StagingRing, "reserve", lambda self, *wanted: (reserve(self, *wanted)[0], None))


def _not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial leaves before it is computed."""
    send = Messages._send

    def hasty(self: Messages, dst: int, tag: Any, buffer: torch.Tensor, when: Any) -> None:
        device = self._core.device
        wait, device.wait_event = device.wait_event, lambda stream, event: None  # type: ignore[method-assign]
        try:
            send(self, dst, tag, buffer, when)
        finally:
            device.wait_event = wait  # type: ignore[method-assign]

    monkeypatch.setattr(Messages, "_send", hasty)


RACES = [
    _not_packed,
    _no_arrival,
    _old_buffer,
    _no_message,
    _crowded_inbox,
    _crowded_staging,
    _not_computed,
]
OTHERS = [_own_budget, _no_absent_parameters, _no_absent_gradients]


@pytest.mark.parametrize("mistake", RACES, ids=lambda mistake: mistake.__name__.strip("_"))
def test_a_mistake_is_a_race(monkeypatch, mistake):
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)  # a host that stands may hide it
    monkeypatch.setattr("tests.support.fake_device.PATIENCE_S", 1.0)
    mistake(monkeypatch)
    with pytest.raises(Race):
        run_lockstep(uneven(kernels="blas"))


@pytest.mark.parametrize("mistake", OTHERS, ids=lambda mistake: mistake.__name__.strip("_"))
def test_ranks_that_walk_differently_are_found(monkeypatch, mistake):
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)  # a host that stands may hide it
    monkeypatch.setattr("tests.support.fake_device.PATIENCE_S", 1.0)
    mistake(monkeypatch)
    # ValueError: a rank asks for what comes in a step that it has not taken, before its peers are stuck.
    found = (Unmatched, Stuck, DeadlineError, MismatchError, AssertionError, ValueError)
    with pytest.raises(found, match=r"rank \d|partner"):
        run_lockstep(uneven(kernels="blas"), deadline_s=1.0)


# ---- exceptions and measurement ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("trigger", [0, 2])
def test_a_backward_broken_off_is_forgotten_by_the_next_step(trigger, inside):
    """All ranks raise at the same place: between two layers, or in the middle of the slices of one."""
    n, params = 3, weights(4, 9, True)
    wanted = expected(params, [Step([]), Step([0, 1, 2, 3])], n)
    board = FakeBoard(FakeWorld(n, seed=4, deferred=False))

    def fail(*_: Any) -> None:
        raise ValueError("in the middle")

    def body(rank: int, exchange: ExchangeFn) -> None:
        engine, slots, operands = open_engine(board, rank, exchange, params, prefetch_bytes=600, slices_per_rank=2)
        transport = engine.transport
        for number, broken in enumerate((True, False)):
            engine.begin_step()
            x = data(rank, number)
            for layer, operand in enumerate(operands):
                x = torch.tanh(fused_linear(x, operand, 0))
                if broken and layer == trigger and not inside:
                    x.register_hook(fail)
            engine.end_forward(True)
            if not broken:
                x.sum().backward()
                continue
            sends = [0]

            def some(*arguments: Any, sends: list[int] = sends, send: Any = transport.send, **more: Any) -> None:
                sends[0] += 1
                fail() if sends[0] == 3 + trigger else send(*arguments, **more)

            if inside:
                transport.send = some  # type: ignore[method-assign]
            with pytest.raises(ValueError, match="in the middle"):
                x.sum().backward()
            vars(transport).pop("send", None)
            for layer in slots:
                for slot in layer:
                    slot.grad = None  # as zero_grad does
        for layer, reference in zip(slots, wanted, strict=True):
            for slot, total in zip(layer, reference, strict=True):
                found = slot.grad if slot.grad is not None else torch.zeros_like(slot.local())
                assert torch.allclose(found, slot.shard(total), rtol=1e-10, atol=1e-10)
        engine.close()

    run_ranks(n, body)


def open_engine(board: FakeBoard, rank: int, exchange: ExchangeFn, params: Any, **more: Any) -> tuple[Engine, Any, Any]:
    """The engine, its slots by layer, and its operands."""
    transport = open_fake_nccl(board, rank, exchange, inbox_bytes=4096)
    config = CommFuseConfig(**{"inbox_bytes": 4096, "prefetch_bytes": 4096, "kernels": "blas", "slices_per_rank": 1, **more})
    n = board.world.world_size
    slots = [[Slot(f"{i}.{j}", p, rank, n) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
    units = [Unit(i, f"layer{i}", layer, Policy(), config.slices_per_rank) for i, layer in enumerate(slots)]
    engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
    return engine, slots, [UnitOperand(engine, unit) for unit in units]


@pytest.mark.parametrize("cost", [0, 5000])
def test_waits_are_measured_by_layer(cost):
    """Exchanges take as long as they are told; nothing else takes any time."""
    costs = lambda stream, what, nbytes: cost if what == "exchange" else 0  # noqa: E731
    board = FakeBoard(FakeWorld(2, seed=4, deferred=False, costs=costs))

    def body(rank: int, exchange: ExchangeFn) -> dict[str, int]:
        engine, _, operands = open_engine(board, rank, exchange, weights(2, 9, True))
        engine.probe.watch()
        engine.begin_step()
        x = data(rank, 0)
        for operand in operands:
            x = torch.tanh(fused_linear(x, operand, 0))
        engine.end_forward(True)
        x.sum().backward()
        engine.probe.settle()
        engine.close()
        return dict(engine.probe.exposed_by_layer)

    for exposed in run_ranks(2, body):
        if cost:
            assert exposed["layer0"] == cost and exposed["layer0 (tail)"] == cost
        else:
            assert not any(exposed.values())
