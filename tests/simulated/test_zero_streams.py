"""Gradients of fused layers on their way through DeepSpeed's streams, over the simulated device, which finds every race.

DeepSpeed itself needs a real accelerator for streams of its own. What stands here in its place does with gradients what its
optimizers do, on the streams on which they do it (read in deepspeed 0.19.8: stage3.py partition_grads, has_overflow and
independent_gradient_partition_epilogue; stage_1_and_2.py reduce_ipg_grads); what is tested is what stands between the two:
slots, `collect` and compat.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.deepspeed import compat, flat_compat
from commfuse_dp.integrations.deepspeed.apply import collect
from commfuse_dp.integrations.deepspeed.deferred import DeferredGather, FlatGroup
from commfuse_dp.integrations.deepspeed.weights import PartitionedWeight, ReplicatedWeight, ZeroPolicy
from torch import nn

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.ordering import StreamOrdering
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.room import least_ring
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.ops.linear import fused_linear, replicated_linear
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.transport.base import ExchangeFn, Transport
from tests.support.cells import slow
from tests.support.fake_device import FakeDevice, FakeStream, FakeWorld, Race
from tests.support.fake_symmetric import dying, open_fake
from tests.support.threads import run_ranks
from tests.support.watched import Watched

LAYERS, SHARED, SCALE, RATE = 4, 1, 8.0, 0.01  # layer SHARED's weight is read by other code, too
HERE = threading.local()  # .device: of the rank whose thread it is


class Named(SimpleNamespace):
    """Named values that can be referred to weakly."""


class Handle:
    """A stream as torch has it."""

    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self.device, self.stream = device, stream

    def wait_stream(self, other: Handle) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Any:
        return self.device.record(self.stream)

    def wait_event(self, event: Any) -> None:
        self.device.wait_event(self.stream, event)


class Accelerator:
    def is_synchronized_device(self) -> bool:
        return False

    def current_stream(self) -> Handle:
        return Handle(HERE.device, HERE.device.current_stream())


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """DeepSpeed's accelerator, and a pool whose buffers the simulation looks at."""
    monkeypatch.setattr(compat, "accelerator", Accelerator)
    make = BufferPool._make

    def watched(self: BufferPool, nbytes: int) -> Any:
        buffer, event = make(self, nbytes)
        HERE.device.world.keep(buffer)
        return buffer, event

    monkeypatch.setattr(BufferPool, "_make", watched)


class Optimizer:
    """What both stages have. Works on streams of its own beside the current one."""

    gradient_accumulation_dtype = torch.float64
    use_grad_accum_attribute = False
    partition_gradients = True

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.own = device.side_stream("deepspeed")
        self.reduce_and_partition_stream = self.reduction_stream = Handle(device, self.own)
        self.micro_step_id = 0

    @contextmanager
    def beside(self, *, behind: bool) -> Any:
        """On the optimizer's stream. behind: the current one, as stock DeepSpeed has it where gradients go into its bucket."""
        if behind:
            self.reduce_and_partition_stream.wait_stream(Accelerator().current_stream())
        with self.device.on(self.own):
            yield

    def get_param_comm_dtype(self, param: Any) -> torch.dtype:
        return torch.float64


class Stage3(Optimizer):
    def __init__(self, device: FakeDevice, params: list[Any]) -> None:
        super().__init__(device)
        self.flat = torch.zeros(sum(param.ds_tensor.numel() for param in params), dtype=torch.float64)
        device.world.keep(self.flat)
        sizes = [param.ds_tensor.numel() for param in params]
        self.buffers = dict(zip(map(id, params), self.flat.split(sizes), strict=True))

    def partition_grads(self, params: list[Any], grads: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = []
        for param, grad in zip(params, grads, strict=True):
            param.grad = None
            if param.ds_tensor.numel():
                buffer = self.buffers[id(param)].narrow(0, 0, grad.numel())
                buffer.copy_(grad) if self.micro_step_id == 0 else buffer.add_(grad.view(buffer.shape))
                buffers.append(buffer)
        return buffers

    def has_overflow(self) -> torch.Tensor:
        with self.beside(behind=False):  # stock DeepSpeed does not wait here
            return torch.isinf(self.flat).any()


class Stage2(Optimizer):
    def __init__(self, device: FakeDevice, params: list[nn.Parameter], world_size: int) -> None:
        super().__init__(device)
        self.params, self.world_size = params, world_size

    def _use_compact_grad_partition_buffer(self, group: int) -> bool:
        return False

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def setup_buckets(self) -> None:
        pass

    def reduce_ipg_grads(self) -> None:
        with self.beside(behind=True):
            for param in self.params:
                if param.grad is not None:
                    param.grad.div_(self.world_size)  # the sum over ranks is none of this test's affair


def data(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)


WIDTH = 6


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 3 for _ in range(LAYERS)]


def extra(rank: int, number: int) -> torch.Tensor:
    """Gradient of the whole weight SHARED by other code: of DeepSpeed's reducing, so the same on all ranks."""
    return torch.full((WIDTH, WIDTH), 0.25 + number, dtype=torch.float64)


def expected(micro: int, windows: int, n: int) -> list[torch.Tensor]:
    """Weights after `windows` optimizer steps of `micro` microbatches each, by autograd over whole weights."""
    wholes = weights()
    for window in range(windows):
        total = [torch.zeros_like(w) for w in wholes]
        for number in range(window * micro, (window + 1) * micro):
            for rank in range(n):
                leaves = [w.clone().requires_grad_() for w in wholes]
                x = data(rank, number)
                for leaf in leaves:
                    x = torch.tanh(F.linear(x, leaf))
                x.sum().backward()
                for at, leaf in zip(total, leaves, strict=True):
                    at += leaf.grad / n
            total[SHARED] += 2 * extra(0, number) / SCALE
        wholes = [w - RATE * at for w, at in zip(wholes, total, strict=True)]
    return wholes


def stage3_rank(transport: Transport, config: CommFuseConfig, *, micro: int, windows: int, uneven: bool) -> list[torch.Tensor]:
    rank, n, device = transport.rank, transport.world_size, HERE.device
    wholes = weights()
    bounds = chunk_bounds(WIDTH * WIDTH, n)
    if uneven:  # parts of rows
        bounds = tuple(itertools.pairwise([0, *(min(WIDTH * WIDTH, 7 * (at + 1)) for at in range(n - 1)), WIDTH * WIDTH]))
    low, high = bounds[rank]
    params = [
        Named(
            ds_tensor=whole.view(-1)[low:high].clone(),
            ds_shape=whole.shape,
            shape=whole.shape,
            requires_grad=True,
            grad=None,
            _commfuse_unfetched=True,
        )
        for whole in wholes
    ]
    optimizer = Stage3(device, params)
    for param in params:
        device.world.keep(param.ds_tensor)
    begins = compat.sum_partitions(Transaction(), optimizer)
    holders = [Named(_parameters={"weight": param}) for param in params]
    slots = [
        PartitionedWeight(f"layer{i}", holder, param, optimizer, bounds, rank)
        for i, (holder, param) in enumerate(zip(holders, params, strict=True))
    ]
    units = [
        Unit(i, slot.name, [slot], ZeroPolicy(optimizer, params[i], 3), None, flat_bounds=bounds)
        for i, slot in enumerate(slots)
    ]
    engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
    operands = [UnitOperand(engine, unit) for unit in units]
    assert all((operand.whole is not None) == (not uneven and config.kernels != "blas") for operand in operands)

    def read_by_others(number: int) -> None:
        """DeepSpeed reduces and partitions the gradient of other code, in the middle of a backward or at its end."""
        with optimizer.beside(behind=True):
            optimizer.partition_grads([params[SHARED]], [extra(rank, number).view(-1)[low:high]])

    def epilogue(number: int) -> None:
        collect(engine, optimizer, 3, [], [])
        with optimizer.beside(behind=False):  # what is left in the bucket
            optimizer.partition_grads([params[SHARED]], [extra(rank, number).view(-1)[low:high]])
        device.wait_event(device.current_stream(), device.record(optimizer.own))  # stock: synchronizes its stream

    queue = torch.autograd.Variable._execution_engine.queue_callback
    for window in range(windows):
        for step in range(micro):
            number = window * micro + step
            optimizer.micro_step_id = step
            begins()
            engine.begin_step()
            x = data(rank, number)
            for layer, operand in enumerate(operands):
                x = torch.tanh(fused_linear(x, operand, 0))
                if layer == SHARED:
                    x.register_hook(lambda grad, number=number: read_by_others(number) or grad)
            engine.end_forward(True)
            loss = x.sum() * SCALE
            loss.register_hook(lambda grad, number=number: queue(lambda: epilogue(number)) or grad)  # before the engine's own
            loss.backward()
        overflow = optimizer.has_overflow()
        device.wait_event(device.current_stream(), device.record(optimizer.own))
        assert not overflow
        optimizer.flat.mul_(1 / SCALE)
        for param in params:
            param.ds_tensor.sub_(RATE * optimizer.buffers[id(param)])
    found = [param.ds_tensor.clone() for param in params]
    engine.close()
    return [whole.view(-1)[low:high] for whole in expected(micro, windows, n)], found


def run_stage3(n: int, *, seed: int = 1, kernels: str = "auto", uneven: bool = False, slices: int | None = None) -> None:
    world = FakeWorld(n, seed=seed, deferred=False, stands=True)

    def body(rank: int, exchange: ExchangeFn) -> None:
        HERE.device = world.devices[rank]
        config = CommFuseConfig(prefetch_bytes=1 << 10, inbox_bytes=1 << 12, kernels=kernels, slices_per_rank=slices)
        transport = open_fake(world, rank, exchange, inbox_bytes=config.inbox_bytes, deadline_s=20.0)
        with dying(transport), Watched(world.devices[rank]):
            wanted, found = stage3_rank(transport, config, micro=2, windows=2, uneven=uneven)
        for a, b in zip(wanted, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)

    run_ranks(n, body)


@pytest.mark.parametrize(
    ("n", "kernels", "uneven", "slices"),
    [(2, "auto", False, None), (3, "blas", True, 2), slow(3, "auto", False, 2), slow(2, "auto", True, None)],
)
def test_zero3_gradients_are_ordered_whoever_looks_at_them(monkeypatch, n, kernels, uneven, slices):
    """Accumulation, a loss scale, an epilogue before the engine's own end of the backward, a weight that gets gradients from
    both sides, the overflow check on DeepSpeed's stream, and the next step's publication of what the optimizer wrote."""
    counted: list[str] = []
    wgrad = Gemms.wgrad

    def noted(self: Gemms, *args: Any, **kwargs: Any) -> None:
        counted.append("wgrad")
        wgrad(self, *args, **kwargs)

    monkeypatch.setattr(Gemms, "wgrad", noted)
    run_stage3(n, kernels=kernels, uneven=uneven, slices=slices)
    assert bool(counted) == (kernels == "auto" and not uneven)  # flat ranges of whole rows: one kernel


def replicated_rank(transport: Transport, config: CommFuseConfig, *, windows: int) -> None:
    rank, n, device = transport.rank, transport.world_size, HERE.device
    params = [nn.Parameter(whole.clone()) for whole in weights()]
    optimizer = Stage2(device, params, n)
    size = WIDTH * WIDTH
    per_layer = [  # one owner, and one that is cut in the middle of a row
        [(0, 0) if at < layer % n else (0, size) if at == layer % n else (size, size) for at in range(n)]
        if layer % 2
        else list(itertools.pairwise([0, 7, *[size] * (n - 1)]))
        for layer in range(LAYERS)
    ]
    places = [flat_compat.FlatPlace(0, tuple(bounds)) for bounds in per_layer]
    holders = [Named(_parameters={"weight": param}) for param in params]
    slots = [
        ReplicatedWeight(f"layer{i}", holder, param, optimizer, places[i], rank)
        for i, (holder, param) in enumerate(zip(holders, params, strict=True))
    ]
    units = [
        Unit(i, slot.name, [slot], ZeroPolicy(optimizer, params[i], 2), 2, flat_bounds=places[i].bounds, replicated=True)
        for i, slot in enumerate(slots)
    ]
    engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
    operands = [UnitOperand(engine, unit) for unit in units]
    wholes = weights()
    for number in range(windows):
        engine.begin_step()
        x = data(rank, number)
        for param, operand in zip(params, operands, strict=True):
            x = torch.tanh(replicated_linear(x, param, operand))
        engine.end_forward(True)
        loss = x.sum() * SCALE
        params[SHARED].grad = extra(rank, number) * n  # of other code: DeepSpeed's bucket has it, and divides
        device.world.keep(params[SHARED].grad)
        loss.backward()
        collect(engine, optimizer, 2, slots, params)
        total = [torch.zeros_like(w) for w in wholes]
        for other in range(n):
            leaves = [w.clone().requires_grad_() for w in wholes]
            y = data(other, number)
            for leaf in leaves:
                y = torch.tanh(F.linear(y, leaf))
            y.sum().backward()
            for at, leaf in zip(total, leaves, strict=True):
                at += leaf.grad / n * SCALE
        total[SHARED] += extra(rank, number)
        for param, wanted, bounds in zip(params, total, per_layer, strict=True):
            low, high = bounds[rank]
            if high > low:
                assert torch.allclose(param.grad.view(-1)[low:high], wanted.view(-1)[low:high], rtol=1e-10, atol=1e-10)
            param.grad = None
    engine.close()


def run_replicated(n: int) -> None:
    world = FakeWorld(n, seed=n, deferred=False, stands=True)

    def body(rank: int, exchange: ExchangeFn) -> None:
        HERE.device = world.devices[rank]
        config = CommFuseConfig(prefetch_bytes=1 << 10, inbox_bytes=1 << 10)
        transport = open_fake(world, rank, exchange, inbox_bytes=config.inbox_bytes, deadline_s=20.0)
        with dying(transport), Watched(world.devices[rank]):
            replicated_rank(transport, config, windows=2)

    run_ranks(n, body)


@pytest.mark.parametrize("n", [2, 3])
def test_zero2_gradients_are_handed_over_behind_the_sums_and_deepspeeds_own(n):
    run_replicated(n)


# ---- the simulation catches what these tests are for -------------------------------------------------------------------
def _no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are all enqueued, so nothing seems to be left to wait for."""
    monkeypatch.setattr(Engine, "settle", lambda self: None if self.gradients.idle else self.gradients.drain())


def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's stream looks for overflow behind nothing."""
    monkeypatch.setattr(compat, "after_current", lambda optimizer: None)


def _two_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries of one microbatch from two streams."""
    monkeypatch.setattr(Handle, "wait_event", lambda self, event: None)
    monkeypatch.setattr(Handle, "wait_stream", lambda self, other: self.device.wait_event(self.stream, other.record_event()))


def _given_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own partial's buffer is given back as if compute were the last to use it."""
    give = BufferPool.give

    def hasty(self: BufferPool, buffer: torch.Tensor, mark: Any = None) -> None:
        with HERE.device.on(HERE.device.side_stream("main")):
            give(self, buffer)

    monkeypatch.setattr(BufferPool, "give", hasty)


@pytest.mark.parametrize("mistake", [_no_join, _unseen, _two_writers, _given_early])
def test_a_mistake_under_zero3_is_a_race(monkeypatch, mistake):
    mistake(monkeypatch)
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)  # a host that stands may hide it
    with pytest.raises(Race):
        for seed in range(3):
            run_stage3(2, seed=seed)


def test_an_unseen_reduction_under_zero2_is_a_race(monkeypatch):
    monkeypatch.setattr(compat, "see_reductions", lambda optimizer: None)
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)
    with pytest.raises(Race):
        run_replicated(2)


def test_a_join_speaks_for_the_stream_that_calls_it():
    """DeepSpeed's stream joins first: compute has to join all the same, and what a sum reads is kept until then."""
    world = FakeWorld(1)
    device = world.devices[0]
    ordering, summed = StreamOrdering(device), torch.zeros(4)
    with ordering.reducing():
        device.launch(lambda: summed.add_(1), writes=[summed])
        ordering.hold(summed)
    for stream in (device.side_stream("deepspeed"), device.side_stream("main")):
        assert ordering._held
        with device.on(stream):
            ordering.join()
            device.launch(lambda: None, reads=[summed])
    assert not ordering._held
    enqueued = device.counts["wait"]
    ordering.join()
    assert device.counts["wait"] == enqueued  # once is enough
    world.run()


# ---- the deferred all-gather -------------------------------------------------------------------------------------------
def run_deferred(n: int, forget: bool) -> None:
    world = FakeWorld(n, seed=n, deferred=False, stands=True)
    sizes = [5, 3]

    def body(rank: int, exchange: ExchangeFn) -> None:
        device = world.devices[rank]
        transport = open_fake(world, rank, exchange, inbox_bytes=1 << 12, deadline_s=20.0)
        wholes = [torch.zeros(n * size) for size in sizes]
        for whole in wholes:
            world.keep(whole)
        with dying(transport), Watched(device):
            gather = DeferredGather(transport, [FlatGroup(whole, size) for whole, size in zip(wholes, sizes, strict=True)])
            for step in range(1, 4):
                for index, (whole, size) in enumerate(zip(wholes, sizes, strict=True)):
                    whole[rank * size : (rank + 1) * size] = 100.0 * step + rank  # the optimizer
                    gather.start(index)
                for index, (whole, size) in enumerate(zip(wholes, sizes, strict=True)):
                    if not forget:
                        gather.require(index, 0, n * size, "weight")
                    seen = whole.clone()
                    assert seen.tolist() == [100.0 * step + owner for owner in range(n) for _ in range(size)]
            gather.close()

    run_ranks(n, body)


@pytest.mark.parametrize("n", [2, 3])
def test_the_deferred_gather_is_ordered_by_streams(n):
    run_deferred(n, forget=False)


def test_a_weight_read_before_it_has_come_is_found(monkeypatch):
    monkeypatch.setattr("tests.support.fake_device.STANDS", 0.0)
    with pytest.raises(AssertionError):  # a Race, or the old values, whichever rank comes first
        run_deferred(2, forget=True)


def test_room_is_what_the_layers_need():
    """Never too little for `check_room`, whatever the layout."""
    slots = [SimpleNamespace(name="w", shape=(40, 30), local=lambda: torch.zeros(1), requires_grad=True)]
    policy: Any = SimpleNamespace(compute_dtype=None, reduce_dtype=None)
    for n, slices, flat in itertools.product((2, 3, 7), (None, 1, 9, 200), (None, chunk_bounds(1200, 7))):
        n = 7 if flat is not None else n
        unit = Unit(0, "w", slots, policy, slices, flat_bounds=flat)  # type: ignore[arg-type]
        room = least_ring([unit], n, streams=True)
        unit.bind(n, comfortable=100)
        owed = max(unit.geometry(torch.float32, (True,)).owed)
        assert 2 * owed <= room <= 2 * owed + 64 * 2 * 300
        assert least_ring([unit], 1, streams=True) == 0
    chained = Unit(0, "w", slots, policy, 1, flat_bounds=chunk_bounds(1200, 7), replicated=True)  # type: ignore[arg-type]
    assert least_ring([chained], 7, streams=True) == 0
