"""Routes on a host: all ranks in one thread, so that bits, messages and Python frames are the same in every run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.micro.overhead import frames
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.bound import BoundBackward, Record
from commfuse_dp.engine.broken import Breakage
from commfuse_dp.engine.gradients import GradientStream
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.plan import Unit
from commfuse_dp.engine.programs import Programs
from commfuse_dp.engine.routes.outbox import Outbox
from commfuse_dp.engine.routes.steps import Step
from commfuse_dp.errors import Where
from commfuse_dp.program.hosts import Hosts
from commfuse_dp.program.operations import Produce
from commfuse_dp.transport.base import CHANNEL_GRAD, Sending, Tag
from tests.simulated.test_engine import Policy
from tests.support.inproc import InprocTransport, InprocWorld

ROWS, COLUMNS, LAYERS = 12, 16, 4


class Case(NamedTuple):
    world_size: int
    per_host: int = 0  # 0: a chain
    slices: int = 2
    inbox: int = 1 << 16
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    delivered: torch.dtype = torch.float32
    uneven: bool = False


class Sink:
    """A slot that takes its gradient."""

    keeps_delivered = True
    replaced = False

    def __init__(self, name: str, numel: int, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, (ROWS, COLUMNS), dtype
        self._local = torch.zeros(numel)
        self.grad: torch.Tensor | None = None

    def local(self) -> torch.Tensor:
        return self._local

    def published(self) -> bool:
        return False

    def wants(self) -> tuple[bool, torch.dtype]:
        return True, self.dtype

    def deliver(self, grad: torch.Tensor) -> None:
        self.grad = grad


def bounds_of(case: Case, layer: int) -> list[tuple[int, int]]:
    """Flat range of every rank."""
    n = case.world_size
    edges = [ROWS * rank // n * COLUMNS for rank in range(n + 1)]
    if case.uneven:  # one rank owns nothing, cuts lie within rows; or one rank owns all
        edges = [0, *[5 + 31 * rank for rank in range(n - 1)], ROWS * COLUMNS] if layer % 2 else [0] * 2 + [192] * (n - 1)
    return list(itertools.pairwise(edges))


class Rank:
    def __init__(self, rank: int, case: Case, world: InprocWorld) -> None:
        self.case = case
        self.transport = InprocTransport(rank, world)
        if case.per_host:
            self.transport.hosts = Hosts.of([other // case.per_host for other in range(case.world_size)])
        self.sent: list[tuple[int, int]] = []  # destination, bytes
        send = self.transport.send

        def noted(sendings: Sequence[Sending], **more: Any) -> None:
            self.sent += [(sending.dst, sending.buffer.numel()) for sending in sendings]
            send(sendings, **more)

        self.transport.send = noted  # type: ignore[method-assign]
        pool = self.pool = BufferPool(torch.device("cpu"), Ordering())
        self.stream = GradientStream(self.transport, pool, None, Breakage(self.transport), Ordering())
        programs = Programs(self.transport, CommFuseConfig())
        policy = Policy(divide_factor=3.0, reduce_dtype=case.reduce_dtype)
        record = Record(False, case.dtype, (True,), True, case.delivered, 3.0, False)
        self.units = []
        for layer in range(LAYERS):
            bounds = bounds_of(case, layer)
            sink = Sink(f"layer{layer}", bounds[rank][1] - bounds[rank][0], case.delivered)
            unit = Unit(layer, sink.name, [sink], policy, case.slices, flat_bounds=bounds, replicated=not case.per_host)
            unit.bind(case.world_size, comfortable=1 << 20)
            geometry = unit.geometry(case.dtype, (True,))
            bound = BoundBackward(
                unit,
                record,
                geometry,
                (),
                programs.reduction(unit, geometry),
                rank=rank,
                ranks=case.world_size,
                replicas=0,
            )
            order = [op.slice for op in programs.backward(unit, geometry, read=False).compute_lane if isinstance(op, Produce)]
            self.units.append((sink, bound, [geometry.slices[part.owner][part.index] for part in order]))

    def produce(self, layer: int, data: torch.Tensor) -> None:
        _, bound, items = self.units[layer]
        scatter = self.stream.begin(bound, 1)
        for item in items:
            buffer = self.stream.reserve(scatter, item)
            buffer.view(self.case.dtype).copy_(data[item.start : item.stop])
            self.stream.send(scatter, (item,), (buffer,))
        self.stream.poll()


def ranks_of(case: Case) -> list[Rank]:
    world = InprocWorld(case.world_size, inbox_bytes=case.inbox, deadline_s=5.0)
    return [Rank(rank, case, world) for rank in range(case.world_size)]


def partial(case: Case, rank: int, layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * layer + rank)
    return torch.randn(ROWS * COLUMNS, generator=generator).to(case.dtype)


def step(ranks: list[Rank]) -> None:
    for layer in reversed(range(LAYERS)):
        for number, rank in enumerate(ranks):
            rank.produce(layer, partial(rank.case, number, layer))
    for _ in range(400):
        for rank in ranks:
            rank.transport.progress()  # as a rank that waits does
            rank.stream.poll()
        if all(rank.stream.idle for rank in ranks):
            break
    for rank in ranks:
        rank.stream.drain()


def expected(case: Case, layer: int, owner: int) -> torch.Tensor:
    """To the last bit. A chain adds in the dtype of the partials, and divides the result; hosts add in the widest of all."""
    n, (low, high) = case.world_size, bounds_of(case, layer)[owner]
    parts = [partial(case, rank, layer)[low:high] for rank in range(n)]
    if not case.per_host:
        total = parts[(owner + 1) % n]
        for hop in range(2, n + 1):
            total = total + parts[(owner + hop) % n]
        return total.to(case.delivered) / 3.0
    wire = case.reduce_dtype if case.reduce_dtype is not None else case.dtype
    inside = torch.promote_types(torch.float32, wire)
    sums = [
        sum(part.to(inside) for part in parts[first : first + case.per_host]).to(wire)  # type: ignore[attr-defined]
        for first in range(0, n, case.per_host)
    ]
    outside = torch.promote_types(inside, case.delivered)
    return (sum(part.to(outside) for part in sums) / 3.0).to(case.delivered)  # type: ignore[attr-defined]


BF16 = {"dtype": torch.bfloat16, "delivered": torch.float32}
CASES = [
    Case(4),
    Case(5, slices=3, uneven=True),
    Case(3, inbox=512, slices=3),
    Case(4, **BF16),
    Case(4, dtype=torch.bfloat16, delivered=torch.bfloat16, uneven=True),
    Case(4, 2),
    Case(6, 3, uneven=True, slices=3),
    Case(6, 2, inbox=512, slices=3),
    Case(4, 2, reduce_dtype=torch.float32, **BF16),
    Case(4, 2, **BF16),
    Case(6, 2, reduce_dtype=torch.float64, dtype=torch.float32, delivered=torch.float32),
    Case(4, 2, reduce_dtype=torch.float32, dtype=torch.bfloat16, delivered=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_and_messages(case: Case) -> None:
    ranks = ranks_of(case)
    made: list[list[int]] = []
    for _ in range(2):
        step(ranks)
        made.append([rank.pool.allocations for rank in ranks])
        for number, rank in enumerate(ranks):
            for layer, (sink, _, _) in enumerate(rank.units):
                assert sink.grad is not None and torch.equal(sink.grad, expected(case, layer, number)), (layer, number)
    assert made[0] == made[1], "buffers did not go back to the pool"
    n, wire = case.world_size, case.reduce_dtype or case.dtype
    for number, rank in enumerate(ranks):
        sizes: Counter[int] = Counter()
        messages: Counter[int] = Counter()
        for dst, nbytes in rank.sent:
            sizes[dst] += nbytes
            messages[dst] += 1
        for _, bound, _ in rank.units:
            own = [2 * size for size in bound.geometry.segment_bytes]  # of two steps
            count = [2 * len(slices) for slices in bound.geometry.slices]
            for owner in range(n):
                to = (number + 1) % n
                if owner == number:
                    continue
                if case.per_host:  # to the rank of this host at the owner's place, or, if that is this one, over hosts
                    to = number // case.per_host * case.per_host + owner % case.per_host
                    if to == number:
                        sizes[owner] -= own[owner] // case.dtype.itemsize * wire.itemsize
                        messages[owner] -= count[owner]
                        continue
                sizes[to] -= own[owner]
                messages[to] -= count[owner]
        assert not any(sizes.values()) and not any(messages.values()), (number, sizes, messages)


# Frames of a step of all ranks over LAYERS layers, just above what was counted (5,440; 4,597).
FRAMES = {Case(4): 5550, Case(4, 2): 4700}


@pytest.mark.parametrize("case", FRAMES, ids=str)
def test_frames_of_a_step(case: Case) -> None:
    ranks = ranks_of(case)
    for _ in range(2):
        step(ranks)
    found = frames(lambda: step(ranks))
    print(f"\n{case}: {found} frames")
    assert found <= FRAMES[case]


def test_what_finds_no_room_leaves_in_order() -> None:
    """One rank's ring is full: what comes behind waits, also what would fit; other ranks' messages pass."""
    room, sent = {1: 0, 2: 100}, []

    class Ring:
        def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None:
            if room[dst] < nbytes:
                return None
            room[dst] -= nbytes
            return torch.empty(nbytes, dtype=torch.uint8)

        def send(self, sendings: Sequence[Sending]) -> None:
            sent.extend((dst, tag.part, buffer.tolist()) for dst, tag, buffer, *_ in sendings)

    outbox = Outbox(Ring(), Ring(), BufferPool(torch.device("cpu")))
    for part, nbytes in enumerate((8, 4)):
        assert outbox.slot(1, nbytes) is None
        outbox.keep(1, Where("layer", 3, f"slice {part}"), Tag(CHANNEL_GRAD, 0, 0, part), torch.full((nbytes,), part).byte())
    assert outbox.slot(2, 4) is not None and outbox.kept == 2
    room[1] = 6
    assert not outbox.flush() and outbox.slot(1, 2) is None
    assert outbox.oldest() == (Where("layer", 3, "slice 0"), 1)
    room[1] = 12
    assert outbox.flush() and outbox.kept == 0 and outbox.oldest() is None
    assert sent == [(1, 0, [0] * 8), (1, 1, [1] * 4)]


@pytest.mark.parametrize("lockstep", [False, True])
def test_steps_of_a_chain_are_the_same_sequence_on_all_ranks(lockstep: bool) -> None:
    """[Note: Order of a chain]: what a rank sends in its step p, the next one takes in at its following step."""
    case = Case(5, slices=3, uneven=True)
    for layer in range(2):
        steps: list[list[Step]] = []
        for rank in ranks_of(case):
            programs = Programs(rank.transport, CommFuseConfig())
            programs._lockstep = lockstep
            bound = rank.units[layer][1]
            way = programs.reduction(bound.unit, bound.geometry).way
            assert way is not None
            steps.append(list(way.steps.values()))
        most = max(map(len, bound.geometry.slices))
        for number, own in enumerate(steps):
            numbers = [step.goes for step in own]
            assert numbers == sorted(set(numbers))
            if lockstep:  # a step for every slice index and hop, but the last hop of a slice that is not there
                last = len(bound.geometry.slices[number])
                assert len(own) == most * (case.world_size - 1) + last
            sent = {step.goes: step.item for step in steps[number - 1] if step.to == number and not step.item.absent}
            assert {step.came: step.item for step in own if step.sources} == sent
