"""The programs that real engines run: taken from them, proved, and compared with what the engines compute and send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine import programs as engine_programs
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Geometry, Unit
from commfuse_dp.ops.linear import fused_linear, replicated_linear
from commfuse_dp.program import layer
from commfuse_dp.program.layout import Slice, chunk_bounds
from commfuse_dp.program.operations import Consume, Problem, Produce, Program
from commfuse_dp.program.verify import VerificationError, verify
from commfuse_dp.transport.base import CHANNEL_GRAD, ExchangeFn, Transport
from tests.simulated.test_engine import Policy, Slot
from tests.support.cells import slow
from tests.support.copying import CopyingTransport
from tests.support.hosts import open_hierarchical, shuffled_hosts
from tests.support.inproc import InprocWorld
from tests.support.threads import run_ranks

WIDTH, LAYERS = 4, 3


class Case(NamedTuple):
    world_size: int
    rows: int = 9
    slices: int = 1
    order: str = "pairwise"
    layout: str = "rows"  # "zero3": flat ranges; "replicated": flat ranges, of gradients only
    per_host: int = 0


CASES = [
    Case(1),
    Case(2, slices=3),
    Case(3, rows=10, slices=2),
    Case(4, rows=5, slices=4),  # shards of 2, 2, 1 and no rows
    Case(4, order="ring", slices=2),
    Case(3, layout="zero3", rows=7, slices=2),
    Case(4, layout="replicated", rows=6, slices=2),
    Case(4, per_host=2, slices=2),
    Case(6, per_host=3, rows=5),
]
LARGE = [Case(64, rows=150), Case(64, rows=63, slices=4, order="ring"), Case(64, layout="replicated", rows=40)]


def opener(case: Case, kind: type = CopyingTransport) -> Callable[[int, ExchangeFn], Transport]:
    n = case.world_size
    world = InprocWorld(n, inbox_bytes=1 << 14, deadline_s=20.0)
    if not case.per_host:
        return lambda rank, exchange: kind(rank, world)
    identities = shuffled_hosts(n, case.per_host, seed=1)
    return lambda rank, exchange: open_hierarchical(rank, identities, world, exchange, inbox_bytes=1 << 14, copying=True)


def engine_of(case: Case, transport: Transport) -> tuple[Engine, list[torch.Tensor]]:
    """An engine over linears of `rows` x WIDTH and back, and their whole weights."""
    rank, n = transport.rank, case.world_size
    shapes = [(case.rows, WIDTH) if number % 2 == 0 else (WIDTH, case.rows) for number in range(LAYERS)]
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    config = CommFuseConfig(slices_per_rank=case.slices, order=case.order, inbox_bytes=1 << 14)
    units = []
    for number, weight in enumerate(whole):
        flat = list(chunk_bounds(weight.numel(), n)) if case.layout != "rows" else None
        slot = Slot(f"{number}.weight", weight, rank, n, flat=flat)
        replicated = case.layout == "replicated"
        units.append(Unit(number, f"layer{number}", [slot], Policy(), case.slices, flat_bounds=flat, replicated=replicated))
    return Engine(transport, units, config, device=torch.device("cpu"), replicas=None), whole


def gradients_of(unit: Unit) -> Geometry:
    return unit.geometry(torch.float64, (True,))


def programs_of(engine: Engine) -> list[list[Program]]:
    """[forward, backward, backward of a frozen layer, backward of one whose input needs no gradient] of each unit."""
    found = []
    for unit in engine.units:
        geometry = gradients_of(unit)
        if unit.replicated:
            found.append([engine.programs.backward(unit, geometry, read=False)])
            continue
        kinds: list[tuple[Geometry | None, bool]] = [(geometry, True), (None, True), (geometry, False)]
        backward = [engine.programs.backward(unit, layout, read=read) for layout, read in kinds]
        found.append([engine.programs.forward(unit), *backward])
    return found


def taken(case: Case) -> list[list[list[Program]]]:
    """[rank][unit][kind], from engines that have fixed their layouts."""
    open_transport = opener(case)

    def body(rank: int, exchange: ExchangeFn) -> list[list[Program]]:
        engine, _ = engine_of(case, open_transport(rank, exchange))
        engine.ensure_exposed()
        found = programs_of(engine)
        engine.close()
        return found

    return run_ranks(case.world_size, body)


@pytest.mark.parametrize("case", [*CASES, *map(slow, LARGE)], ids=str)
def test_programs_of_engines_are_proved(case: Case) -> None:
    ranks = taken(case)
    for of_unit in zip(*ranks, strict=True):
        for of_kind in zip(*of_unit, strict=True):
            verify(of_kind)
    if case.world_size < 64:  # a step: all forwards, then the backwards that train and read
        steps = []
        for units in ranks:
            there = [] if case.layout == "replicated" else [kinds[0] for kinds in units]
            back = [kinds[0 if case.layout == "replicated" else 1] for kinds in reversed(units)]
            steps.append(layer.step([*there, *back]))
        verify(steps, ends=False)


# ---- what engines do is what their programs say ----------------------------------------------------------------------
class Done(NamedTuple):
    """One rank's step, as it was seen: per unit."""

    consumed: dict[int, list[tuple[int, int]]]  # (owner, index), forward and then backward
    produced: dict[int, list[tuple[int, int]]]
    sent: dict[tuple[int, int], list[int]]  # (unit, destination) -> numbers of messages


def watched(engine: Engine, transport: Transport) -> Done:
    done = Done(defaultdict(list), defaultdict(list), defaultdict(list))
    gather, exchange, reserve, send = engine.gather, engine.exchange, engine.gradients.reserve, transport.send

    def noting(unit: Unit, consume: Any) -> Any:
        def seen(item: Any, pieces: Any) -> None:
            done.consumed[unit.index].append((item.owner, item.index))
            consume(item, pieces)

        return seen if consume is not None else None

    def seen_gather(unit: Unit, consume: Any) -> None:
        gather(unit, noting(unit, consume))

    def seen_exchange(unit: Unit, consume: Any, *rest: Any, **more: Any) -> None:
        exchange(unit, noting(unit, consume), *rest, **more)

    def seen_reserve(scatter: Any, item: Any) -> torch.Tensor:
        done.produced[scatter.unit.index].append((item.owner, item.index))
        return reserve(scatter, item)

    def seen_send(sendings: Any, **more: Any) -> None:
        for dst, tag, *_ in sendings:
            if tag.channel == CHANNEL_GRAD:
                done.sent[tag.key, dst].append(tag.part)
        send(sendings, **more)

    engine.gather, engine.exchange = seen_gather, seen_exchange  # type: ignore[method-assign]
    engine.gradients.reserve, transport.send = seen_reserve, seen_send  # type: ignore[assignment, method-assign]
    return done


def run_step(case: Case) -> list[tuple[Done, list[list[Program]]]]:
    open_transport = opener(case)

    def body(rank: int, exchange: ExchangeFn) -> tuple[Done, list[list[Program]]]:
        transport = open_transport(rank, exchange)
        engine, whole = engine_of(case, transport)
        done = watched(engine, transport)
        operands = [UnitOperand(engine, unit) for unit in engine.units]
        engine.begin_step()
        x = torch.randn(2, WIDTH, dtype=torch.float64).requires_grad_()
        for number, operand in enumerate(operands):
            x = replicated_linear(x, whole[number], operand) if engine.units[number].replicated else fused_linear(x, operand, 0)
        engine.end_forward(True)
        x.sum().backward()
        found = programs_of(engine)
        engine.close()
        return done, found

    return run_ranks(case.world_size, body)


def computed(program: Program, kind: type) -> list[tuple[int, int]]:
    parts = [op.slice if isinstance(op, Produce) else op.piece.slice for op in program.compute_lane if isinstance(op, kind)]
    return [(part.owner, part.index) for part in parts]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_does_what_its_programs_say(case: Case) -> None:
    for done, units in run_step(case):
        for number, kinds in enumerate(units):
            backward = kinds[0] if case.layout == "replicated" else kinds[1]
            if case.layout != "replicated":
                assert done.consumed[number] == computed(kinds[0], Consume) + computed(backward, Consume)
            assert done.produced[number] == computed(backward, Produce)
            numbers = numbered(backward, case)
            for (unit, dst), parts in done.sent.items():
                if unit == number:
                    assert sorted(parts) == sorted(numbers.pop(dst))
            assert not any(numbers.values()), "the program sends what the engine did not"


def numbered(program: Program, case: Case) -> dict[int, list[int]]:
    """Messages of gradients by destination, numbered as the engine does."""
    problem = next(problem for problem in program.problems if problem.collective == "reduce_scatter")
    every = [part for owner in range(case.world_size) for part in problem.slices(owner)]
    owners = problem.scatter_owners(program.rank)

    def number(part: Slice) -> int:
        if problem.way == "ring":
            return part.index * case.world_size + owners.index(part.owner)
        return every.index(part) if problem.way == "hosts" else part.index

    found: dict[int, list[int]] = defaultdict(list)
    for link, lane in program.send_lanes.items():
        if link.channel == "gradients":
            found[link.peer] += [number(op.piece.slice) for op in lane]
    return found


# ---- a mistake in what engines run is found ------------------------------------------------------------------------------
def _own_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "scatter_owners", Problem.gather_owners)


def _one_rank_turns_round(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = engine_programs.Programs.__init__

    def turned(self: engine_programs.Programs, transport: Transport, config: CommFuseConfig) -> None:
        straight(self, transport, config)
        self._order = "ring" if transport.rank == 1 else self._order

    monkeypatch.setattr(engine_programs.Programs, "__init__", turned)


def _a_slice_less(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = engine_programs.Programs.backward

    def shorter(self: engine_programs.Programs, unit: Unit, gradients: Any, *, read: bool) -> Program:
        found = backward(self, unit, gradients, read=read)
        return Program(found.problems, found.rank, found.operations[1:]) if self.rank == 2 else found

    monkeypatch.setattr(engine_programs.Programs, "backward", shorter)


@pytest.mark.parametrize("mistake", [_own_first, _one_rank_turns_round, _a_slice_less])
def test_a_mistake_is_found(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(VerificationError):
        test_programs_of_engines_are_proved(Case(4, slices=2))
