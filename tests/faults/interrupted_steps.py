"""Steps of stock FSDP2 served by CommFuse, one of which is interrupted at a numbered place of our own code.

A cycle is what a user's loop does that catches the exception and goes on:

    step k         one attempt; interrupted on some ranks, at a place each
    step k + 1     until it succeeds: a rank that went through with step k alone raises once before
    step k + 2     must succeed

Each step has parameters and a batch of its own, and its gradients are compared with stock FSDP2's for these, in float64: what
is left of an older step, or missing, is seen. Ranks then compare what they have left behind.

    python -m tests.faults.interrupted_steps --count 500 --seed 3 transport=tcp      a table of what came of each
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import ATTACHMENT, TENSOR_ATTACHMENT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import commfuse_dp
from commfuse_dp import BrokenStepError, CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.errors import CommFuseError, DeadlineError
from commfuse_dp.transport.base import Transport
from tests.parity.deepspeed import pair as zero
from tests.parity.fsdp2.models import shard_layers
from tests.parity.tensor_parallel.block import WIDTH, FeedForward
from tests.support.interrupting import Interruption, handler_of_the_process, raise_anyway

VERSIONS = 3
WIDTHS = (6, 37, 5)
PATIENCE_S = 1.0  # in which a signal that was held back must have come

RECOVERED, NAMED, MISSED, COMPLETE = "recovered", "raised, named", "not reached", "complete"
HUNG, WRONG, LEAKED, SWALLOWED, OTHER = "HUNG", "WRONG", "LEAKED", "SWALLOWED", "OTHER"
DEFECTS = (HUNG, WRONG, LEAKED, SWALLOWED, OTHER)


class Net(nn.Module):
    """Linears with a norm between them, odd widths: shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c = WIDTHS
        self.layers = nn.ModuleList([nn.Linear(a, b), nn.LayerNorm(b), nn.Linear(b, b, bias=False), nn.Linear(b, c)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Plan(NamedTuple):
    """What is interrupted: fractions of the places of a step, by rank; None: this rank is not."""

    fractions: tuple[float | None, ...]


class Cycle(NamedTuple):
    """What came of a plan."""

    plan: Plan
    outcome: str
    places: tuple[str, ...]  # by rank
    told: tuple[str, ...]  # by rank: what each attempt ended with


def plans(seed: int, count: int, world_size: int) -> list[Plan]:
    """Alternately one rank and all of them, at places drawn over the whole step."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        everyone = number % 3 == 2
        victim = draw.randrange(world_size)
        found.append(Plan(tuple(draw.random() if everyone or rank == victim else None for rank in range(world_size))))
    return found


class Rig(ABC):
    """One rank: a model that is served, and what the framework alone computes. A step's parameters and batch follow from its
    version."""

    rtol = 1e-10
    model: nn.Module

    def __init__(self, rank: int, world_size: int, settings: dict[str, Any]) -> None:
        self.rank, self.world_size, self._settings = rank, world_size, settings
        self._wanted: list[list[torch.Tensor]] = []
        self.serve()

    @abstractmethod
    def _start(self, served: bool) -> list[torch.Tensor]:
        """A new model in `self.model`; its parameters, as far as they are here."""

    @abstractmethod
    def _backward(self, generator: torch.Generator) -> None:
        """Forward and backward on this rank's part of a batch."""

    def _gradients(self) -> list[torch.Tensor | None]:
        """As far as they are here."""
        return [None if p.grad is None else local(p.grad) for p in self.model.parameters()]

    @abstractmethod
    def _held(self) -> dict[str, int]:
        """What is held here, but for messages."""

    @property
    @abstractmethod
    def transport(self) -> Transport: ...

    def serve(self) -> None:
        """A new model."""
        if not self._wanted:
            self._begin(served=False)
            for version in range(VERSIONS):
                self._run(version)
                self._wanted.append([found.clone() for found in self._gradients() if found is not None])
            self.end()
        self._begin(served=True)
        for _ in range(2):
            for version in range(VERSIONS):
                assert (told := self.attempt(version)) == "ok", told
        counting = Interruption(0)
        assert self.attempt(0, counting) == "ok"
        self.places = counting.seen
        assert self.left_behind() == "", self.left_behind()

    def _begin(self, *, served: bool) -> None:
        torch.manual_seed(7)
        self._params = self._start(served)
        self._base = [p.clone() for p in self._params]

    def end(self) -> None:
        """Also of a model whose ranks have parted."""
        with contextlib.suppress(CommFuseError):
            commfuse_dp.remove(self.model)

    def _clear(self) -> None:
        self.model.zero_grad()

    def _give_up(self) -> None:
        """What the framework asks for after a step that was broken off."""
        return

    def _run(self, version: int, interruption: Interruption | None = None) -> None:
        with torch.no_grad():
            for param, base in zip(self._params, self._base, strict=True):
                param.copy_(base * (1.0 + 0.25 * version))
        self._clear()
        generator = torch.Generator().manual_seed(100 * version)
        with interruption if interruption is not None else contextlib.nullcontext():
            self._backward(generator)

    def attempt(self, version: int, interruption: Interruption | None = None) -> str:
        """A step, of which forward and backward are interrupted; what it ended with."""
        try:
            self._run(version, interruption)
        except (Exception, KeyboardInterrupt) as error:
            self._give_up()
            return f"{type(error).__name__}: {error}"
        bound = self.rtol * max(float(wanted.abs().max()) for wanted in self._wanted[version] if wanted.numel())
        for number, (found, wanted) in enumerate(zip(self._gradients(), self._wanted[version], strict=True)):
            if found is None:
                return f"{WRONG}: parameter {number} has no gradient"
            if found.numel() and (off := float((found - wanted).abs().max())) > bound:
                return f"{WRONG}: parameter {number} differs by {off:.2g}, allowed are {bound:.2g}"
        return "ok"

    def left_behind(self) -> str:
        """What is held though no step is under way, once all ranks have come here. Collective."""
        recovery = self.transport.recovery
        assert recovery is not None
        for _ in range(50):
            self.transport.progress()
            held = torch.tensor(recovery.held)
            dist.all_reduce(held)
            if not held:
                break
        found = {"messages": int(held), **self._held()}
        return ", ".join(f"{count} {what}" for what, count in found.items() if count)

    def cycle(self, number: int, plan: Plan, handle: Callable[..., object], *, meet: bool) -> tuple[str, list[str]]:
        """Place, and what each attempt ended with. meet: ranks wait for each other after the interrupted one."""
        fraction = plan.fractions[self.rank]
        told, interruption = [], None
        version = number % VERSIONS
        if fraction is None:
            told.append(self.attempt(version))
        else:
            interruption = Interruption(1 + int(fraction * self.places), handle)
            told.append(self.attempt(version, interruption))
            if interruption.where and not told[0].startswith("KeyboardInterrupt"):
                told[0] += self._late()
        if meet:
            dist.barrier()
        for later in (version + 1, version + 2):
            told.append(self.attempt(later % VERSIONS))
            if told[-1].startswith("BrokenStepError") and len(told) == 2:
                told[-1] += " (again)"
                told.append(self.attempt(later % VERSIONS))
        return interruption.where if interruption is not None else "", told

    def _late(self) -> str:
        """The signal was held back: it comes now, outside of the step, if it was not lost."""
        limit = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < limit:
                time.sleep(0.001)
        except KeyboardInterrupt:
            return ", KeyboardInterrupt behind it"
        return f", {SWALLOWED}"


def _held_by(engine: Engine) -> dict[str, int]:
    window = engine.parameters._window
    return {
        "bytes of buffers": engine.buffers.held - engine.buffers._spare,
        "backwards": sum(unit.pending_backwards for unit in engine.units),
        "gradients": int(engine.has_accumulated) + len(engine.gradients._queue),
        "collectives": sum(len(port.under_way) for port in engine.ports),
        "bytes of the window": min(window.used, 0) if window is not None else 0,
    }


class ShardedRig(Rig):
    """FSDP2."""

    def _start(self, served: bool) -> list[torch.Tensor]:
        self.model = Net().double()
        shard_layers(self.model)
        if served:
            commfuse_dp.apply(self.model, CommFuseConfig(**self._settings))
        return [local(p.detach()) for p in self.model.parameters()]

    def _backward(self, generator: torch.Generator) -> None:
        x = torch.randn(self.world_size, 4, WIDTHS[0], generator=generator, dtype=torch.float64)
        self.model(x[self.rank]).square().mean().backward()

    def _give_up(self) -> None:
        if self._settings.get("exclude"):  # what stays in FSDP2's own groups
            self.model.reset_iter_state()

    @property
    def engine(self) -> Engine:
        return vars(self.model)[ATTACHMENT].engine  # type: ignore[no-any-return]

    @property
    def transport(self) -> Transport:
        return self.engine.transport

    def _held(self) -> dict[str, int]:
        return _held_by(self.engine)


class Feeding(nn.Module):
    """Blocks of tensor parallelism, without collectives of PyTorch's own: who waits in one hears of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(bias=True) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class TensorRig(Rig):
    """PyTorch's tensor parallelism."""

    def _start(self, served: bool) -> list[torch.Tensor]:
        self.model = Feeding().double()
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("tp",))
        for block in self.model.blocks:
            plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel(output_layouts=Shard(1))}
            inputs = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            parallelize_module(block, mesh, {"": inputs, **plan})
        if served:
            commfuse_dp.apply(self.model, CommFuseConfig(**self._settings))
        return [local(p.detach()) for p in self.model.parameters()]

    def _backward(self, generator: torch.Generator) -> None:
        x = torch.randn(2, 3 * self.world_size, WIDTH, generator=generator, dtype=torch.float64)
        self.model(x.chunk(self.world_size, dim=1)[self.rank]).square().mean().backward()

    def _gradients(self) -> list[torch.Tensor | None]:
        """Of weights: a bias of a row-parallel layer has that of this rank's positions."""
        return [None if p.grad is None else local(p.grad) for p in self.model.parameters() if p.ndim > 1]

    @property
    def transport(self) -> Transport:
        return vars(self.model)[TENSOR_ATTACHMENT].transport  # type: ignore[no-any-return]

    def _held(self) -> dict[str, int]:
        return {}


class ZeroRig(Rig):
    """DeepSpeed's ZeRO-3, which has no float64. All that it fetches itself is kept whole: what is on its way to one rank only
    when that is interrupted, DeepSpeed does not find again."""

    rtol = 1e-4

    def _start(self, served: bool) -> list[torch.Tensor]:
        self._stack = contextlib.ExitStack()
        case = zero.Case(zero.settings(3), block=self._settings)
        self._zero = self._stack.enter_context(zero.started(self.rank, self.world_size, case, fused=served))
        self.model = self._zero.module
        return [p.ds_tensor.detach() for p in self.model.parameters() if not p.ds_persist]  # others are kept whole beside it

    def end(self) -> None:
        with contextlib.suppress(CommFuseError):
            self._stack.close()

    def _clear(self) -> None:
        """There is no optimizer step, in which a rank that has gone through alone would wait for its peers."""
        self._zero.zero_grad()
        self._zero.optimizer.zero_grad()

    def _backward(self, generator: torch.Generator) -> None:
        number = int(generator.initial_seed())
        self._zero.backward(zero.loss_of(self._zero, zero.batch(self.rank, number)))

    def _gradients(self) -> list[torch.Tensor | None]:
        from deepspeed.utils import safe_get_local_grad

        return [safe_get_local_grad(p) for p in self.model.parameters()]

    @property
    def engine(self) -> Engine:
        from commfuse_dp.integrations.deepspeed import engine_of

        engine = engine_of(self._zero)
        assert engine is not None
        return engine

    @property
    def transport(self) -> Transport:
        return self.engine.transport

    def _held(self) -> dict[str, int]:
        return _held_by(self.engine)


RIGS = {"fsdp2": ShardedRig, "tensor parallel": TensorRig, "zero": ZeroRig}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def judge(plan: Plan, places: Sequence[str], told: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """The outcome of a cycle, by what all ranks tell."""
    everything = [text for one in told for text in one]
    if any(text.startswith(DeadlineError.__name__) for text in everything):
        return HUNG
    if any(WRONG in text for text in everything):
        return WRONG
    if all(one[-2:] == ["ok", "ok"] for one in told):
        if any(left):
            return LEAKED
        if any(SWALLOWED in text for text in everything):
            return SWALLOWED
        if not any(places):
            return MISSED
        allowed = ("ok", KeyboardInterrupt.__name__, BrokenStepError.__name__)
        if not all(text.startswith(allowed) for text in everything):
            return OTHER
        return RECOVERED if any(BrokenStepError.__name__ in text for text in everything) or "ok" not in told[0][0] else COMPLETE
    bad = [one for one in told if one[-1] != "ok"]
    if len(bad) == len(told) and all("KeyboardInterrupt" in one[-1] for one in told):
        return NAMED
    return OTHER


def run(
    rank: int,
    world_size: int,
    kind: str,
    chosen: Sequence[Plan],
    settings: dict[str, Any],
    anyway: bool = False,
    meet: bool = False,
) -> list[Cycle]:
    """On each rank. kind: of RIGS. anyway: exceptions are raised, whatever handler there is."""
    handle = raise_anyway if anyway else handler_of_the_process
    found = []
    with interruptible():
        rig = RIGS[kind](rank, world_size, settings)
        for number, plan in enumerate(chosen):
            try:
                place, told = rig.cycle(number, plan, handle, meet=meet)
            except KeyboardInterrupt:  # it came between two attempts
                place, told = "?", [f"{OTHER}: interrupted between attempts"]
            good = told[-2:] == ["ok", "ok"]
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, (place, told))
            all_good = good and all(one[-2:] == ["ok", "ok"] for _, one in everyone)
            left: list[Any] = [""] * world_size
            if all_good:
                dist.all_gather_object(left, rig.left_behind())
            outcome = judge(plan, [one for one, _ in everyone], [one for _, one in everyone], left)
            more = [f"left: {one}" if one else "" for one in left]
            told_all = tuple(" | ".join([*one, *filter(None, [extra])]) for (_, one), extra in zip(everyone, more, strict=True))
            found.append(Cycle(plan, outcome, tuple(one for one, _ in everyone), told_all))
            if not all_good or any(left):
                rig.end()
                rig.serve()
        rig.end()
    return found


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Workers ignore Ctrl-C, which is the session's business: here they have what every program begins with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def table(cycles: Sequence[Cycle]) -> str:
    """Outcomes and how often, then each defect once with its place."""
    lines = [f"{outcome}: {count}" for outcome, count in sorted(Counter(cycle.outcome for cycle in cycles).items())]
    seen: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], Cycle] = {}
    for cycle in cycles:
        if cycle.outcome in DEFECTS:
            for place in cycle.places:
                if place:
                    seen[cycle.outcome, place] += 1
                    example.setdefault((cycle.outcome, place), cycle)
    for (outcome, place), count in sorted(seen.items()):
        lines.append(f"  {outcome} {count}x {place}")
        lines += [f"      rank {rank}: {text[:420]}" for rank, text in enumerate(example[outcome, place].told)]
    return "\n".join(lines)


def main() -> None:
    import argparse

    from tests.support.workers import Workers

    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=RIGS, default="fsdp2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--anyway", action="store_true")
    parser.add_argument("--meet", action="store_true")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("settings", nargs="*", help="key=value of CommFuseConfig")
    options = parser.parse_args()
    settings: dict[str, Any] = {"transport": "shm", "deadline_s": 4.0, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20}
    for text in options.settings:
        key, _, value = text.partition("=")
        if key == "exclude":
            settings[key] = (value,)
            continue
        settings[key] = int(value) if value.isdigit() else value == "True" if value in ("True", "False") else value
    pools, found = Workers(), []
    begun = time.monotonic()
    chosen = plans(options.seed, options.count, options.ranks)
    try:
        for start in range(0, len(chosen), options.batch):
            batch = chosen[start : start + options.batch]
            found += pools(options.ranks).run(
                run, options.kind, batch, settings, options.anyway, options.meet, timeout=options.patience
            )[0]
    finally:
        pools.close()
        print(f"{len(found)} cycles in {time.monotonic() - begun:.1f} s, seed {options.seed}, {settings}")
        print(table(found))


if __name__ == "__main__":
    main()
