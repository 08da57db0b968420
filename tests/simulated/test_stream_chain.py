"""Chains on streams in every order that streams, events and words allow: nothing runs before all is enqueued.

test_engine_device.py runs whole programs, with a host that stands where its current stream stands. Here the host never waits,
as on a GPU, so that compute is layers ahead of the sums, whatever a seed makes of the streams.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine import programs
from commfuse_dp.engine.bound import BoundBackward, Record
from commfuse_dp.engine.broken import Breakage
from commfuse_dp.engine.gradients import GradientStream
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import StreamOrdering
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.programs import Programs
from commfuse_dp.engine.routes.steps import Step, Way, way_of
from commfuse_dp.engine.routes.stream import StreamRoute
from commfuse_dp.transport.base import ExchangeFn, Transport
from commfuse_dp.transport.symmetric.messages import Messages
from tests.simulated.test_engine import Policy
from tests.support.cells import slow
from tests.support.fake_device import FakeDevice, FakeWorld, Race, Stuck
from tests.support.fake_symmetric import dying, open_fake
from tests.support.threads import run_ranks

ROWS, COLUMNS, LAYERS = 12, 16, 4
SLICE = (ROWS // 3 + 1) * COLUMNS * 4  # bytes of the largest, if every owner's rows are cut in three


class Enqueued(TorchDispatchMode):
    """What torch is told to write in place becomes work of the current stream; the rest (views, new memory) happens at once."""

    sees_inside_commfuse = True

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {**dict(zip([a.name for a in arguments], args, strict=False)), **kwargs}
        written = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.name in given]
        if not written:
            return func(*args, **kwargs)
        read = [t for t in given.values() if isinstance(t, torch.Tensor)]
        self._device.launch(lambda: func(*args, **kwargs), reads=read, writes=written, what=str(func))
        return written[0]


class Sink:
    """A slot that takes its gradient."""

    keeps_delivered = True
    replaced = False

    def __init__(self, name: str, bounds: list[tuple[int, int]], rank: int) -> None:
        self.name, self.shape = name, (ROWS, COLUMNS)
        self._local = torch.zeros(bounds[rank][1] - bounds[rank][0])
        self.grads: list[torch.Tensor] = []

    def local(self) -> torch.Tensor:
        return self._local

    def published(self) -> bool:
        return False

    def wants(self) -> tuple[bool, torch.dtype]:
        return True, torch.float32

    def deliver(self, grad: torch.Tensor) -> None:
        self.grads.append(grad)


def partial(rank: int, layer: int) -> torch.Tensor:
    return torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(31 * layer + rank))


def bounds_of(n: int, seed: int) -> list[list[tuple[int, int]]]:
    """Per layer, the flat range of every rank: equal ones, one owner, or any."""
    choose = random.Random(seed)
    numel = ROWS * COLUMNS
    found = []
    for layer in range(LAYERS):
        edges = [ROWS * (rank + 1) // n * COLUMNS for rank in range(n - 1)]
        if layer % 3 == 1:
            owner = choose.randrange(n)
            edges = [0] * owner + [numel] * (n - 1 - owner)
        elif layer % 3 == 2:
            edges = sorted(choose.randint(0, numel) for _ in range(n - 1))
        found.append(list(itertools.pairwise([0, *edges, numel])))
    return found


def expected(bounds: list[tuple[int, int]], layer: int, owner: int) -> torch.Tensor:
    """Added along the chain, in its order, to the last bit."""
    n = len(bounds)
    low, high = bounds[owner]
    total = partial((owner + 1) % n, layer)[low:high].clone()
    for hop in range(1, n):
        total = partial((owner + 1 + hop) % n, layer)[low:high] + total
    return total


def run_chains(
    n: int, seed: int, every: list[list[tuple[int, int]]], *, inbox: int, slices: int = 3, slow: frozenset[Any] = frozenset()
) -> None:
    """every: bounds of each layer."""
    world = FakeWorld(n, seed=seed, slow=slow, strict=True)
    mode: Callable[[int], Enqueued] = lambda rank: Enqueued(world.devices[rank])  # noqa: E731

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_fake(world, rank, exchange, inbox_bytes=inbox, deadline_s=20.0)
        with dying(transport):
            run_rank(rank, exchange, transport)
        world.strict = world.deferred = False
        transport.close()

    def run_rank(rank: int, exchange: ExchangeFn, transport: Transport) -> None:
        device = world.devices[rank]
        ordering = StreamOrdering(device)
        pool = BufferPool(torch.device("cpu"), ordering)
        stream = GradientStream(transport, pool, None, Breakage(transport), ordering)
        of_units = Programs(transport, CommFuseConfig())
        sinks = [Sink(f"layer{layer}", bounds, rank) for layer, bounds in enumerate(every)]
        for layer, (sink, bounds) in enumerate(zip(sinks, every, strict=True)):
            unit = Unit(layer, sink.name, [sink], Policy(divide_factor=1.0), slices, flat_bounds=bounds, replicated=True)
            unit.bind(n, comfortable=1 << 20)
            data = partial(rank, layer)
            with mode(rank):
                geometry = unit.geometry(torch.float32, (True,))
                record = Record(False, torch.float32, (True,), True, torch.float32, 1.0, False)
                reduction = of_units.reduction(unit, geometry)
                scatter = stream.begin(BoundBackward(unit, record, geometry, (), reduction, rank=rank, ranks=n, replicas=0), 1)
                for owner in ((rank + 1 + step) % n for step in range(n)):
                    for item in scatter.bound.geometry.slices[owner]:
                        buffer = stream.reserve(scatter, item)
                        buffer.view(torch.float32).copy_(data[item.start : item.stop])
                        stream.send(scatter, (item,), (buffer,))
                stream.poll()
        assert stream.idle
        stream.drain()  # joins
        exchange(None)
        if rank == 0:
            world.run()
        exchange(None)
        for layer, (sink, bounds) in enumerate(zip(sinks, every, strict=True)):
            (grad,) = sink.grads
            assert torch.equal(grad, expected(bounds, layer, rank)), (rank, layer)

    run_ranks(n, body, timeout_s=40)


@pytest.fixture(autouse=True)
def watched_buffers(monkeypatch):
    make = BufferPool._make

    def watched(self: BufferPool, nbytes: int) -> Any:
        buffer, event = make(self, nbytes)
        self._ordering._device.world.keep(buffer)  # type: ignore[attr-defined]
        return buffer, event

    monkeypatch.setattr(BufferPool, "_make", watched)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 6)), 6, 7])
def test_any_order_of_streams_ends_with_the_same_bits(seed):
    """An inbox has room for a third of a layer, or for all of it; one stream runs only when nothing else can."""
    choose = random.Random(seed)
    n = choose.choice([3, 4, 5])
    slow = frozenset({(choose.randrange(n), choose.choice(["main", "reduce", "scatter"]))}) if seed % 3 else frozenset()
    run_chains(n, seed, bounds_of(n, seed), inbox=choose.choice([SLICE, 3 * SLICE]), slices=choose.choice([3, 4]), slow=slow)


# ---- the simulation catches what the order is for ----------------------------------------------------------------------
def _hops_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices of a hop before the next hop: needs room for a hop."""

    def wrong(*args: Any, **kwargs: Any) -> Way:
        way = way_of(*args, **kwargs)
        n = len({step.item.owner for step in way.steps.values()})

        def place(step: Step) -> tuple[int, int]:
            return step.goes % n, step.goes // n

        steps = sorted(way.steps.values(), key=place)
        return way._replace(steps={step.key: step for step in steps}, sums=tuple(sorted(way.sums, key=place)))

    monkeypatch.setattr(programs, "way_of", wrong)


def _no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Messages, "release", lambda self, srcs, tag, *, more=False: None)


def _buffer_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial's buffer goes back before the stream has read it."""

    def run(self: StreamRoute, step: Step) -> None:
        give = self._pool.give
        if step.to is not None:
            device = self._means.ordering._device  # type: ignore[attr-defined]
            with device.on(device.side_stream("main")):
                give(self._own[step.key])
        vars(self._pool)["give"] = lambda buffer: None
        try:
            original(self, step)
        finally:
            del vars(self._pool)["give"]

    original = StreamRoute._run
    monkeypatch.setattr(StreamRoute, "_run", run)


def _unordered_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums do not wait for the stream that computes the partials."""
    real = FakeDevice.wait_event

    def wait_event(self: FakeDevice, stream: Any, event: Any) -> None:
        if stream.name != "reduce":
            real(self, stream, event)

    monkeypatch.setattr(FakeDevice, "wait_event", wait_event)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [(None, None), (_hops_first, Stuck), (_no_credit, Stuck), (_buffer_too_early, Race), (_unordered_sum, Race)],
)
def test_a_mistake_in_a_chain_is_found(monkeypatch, mistake, found):
    if mistake is not None:
        mistake(monkeypatch)
    row = COLUMNS * 4
    equal = [(3 * COLUMNS * rank, 3 * COLUMNS * (rank + 1)) for rank in range(4)]  # three slices of a row each
    with pytest.raises(found) if found is not None else nullcontext():
        run_chains(4, 1, [equal] * 3, inbox=row)
