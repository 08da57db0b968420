"""A small training step over ranks as threads that raises wherever it is told to, and goes on afterwards."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from commfuse_dp.collectives import summation
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.collective_port import CollectivePort
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import BrokenStepError
from commfuse_dp.ops.linear import fused_linear, replicated_linear
from commfuse_dp.transport.base import Transport
from tests.simulated.test_engine import WIDTH, Policy, Slot, Step, data, expected, weights
from tests.support.threads import ExchangeFn

LAYERS = 3
EVEN = ("consume", "consumed", "forward", "hook")  # every rank comes there equally often
SITES = (
    "consume",  # before a GEMM of forward or dgrad
    "consumed",
    "produce",  # before a GEMM of wgrad, with a place in the owner's inbox reserved
    "produced",
    "reserved",  # just after the transport has given a place
    "sent",
    "sum",
    "deliver",
    "forward",  # between layers: code of the user's
    "hook",  # a gradient hook of the user's
)


class Injected(Exception):
    """Raised in the middle of a step."""


class InjectedInterrupt(KeyboardInterrupt):
    """Likewise, as Ctrl-C raises it."""


class Injection(NamedTuple):
    site: str
    number: int  # the n-th time there, from 0
    kind: type[BaseException]


class Injector:
    """Of one rank."""

    def __init__(self) -> None:
        self._plan: Injection | None = None
        self._seen: Counter[str] = Counter()
        self.fired = False

    @contextmanager
    def planned(self, plan: Injection | None) -> Iterator[None]:
        self._plan, self.fired = plan, False
        self._seen.clear()
        try:
            yield
        finally:
            self._plan = None

    def at(self, site: str) -> None:
        plan = self._plan
        if plan is None or plan.site != site:
            return
        self._seen[site] += 1
        if self._seen[site] == plan.number + 1:
            self.fired = True
            raise plan.kind("in the middle")


_current = threading.local()  # .injector: of the rank whose thread it is
_sum = summation.sum_in_rank_order


def raising_sum(*args: Any, **more: Any) -> Any:
    """Stands for `sum_in_rank_order` in the engine's modules: raises before, or leaves half a sum behind."""
    injector = getattr(_current, "injector", None)
    if injector is not None:
        injector.at("sum")
    return _sum(*args, **more)


SUMMING = ("commfuse_dp.engine.sums", "commfuse_dp.engine.routes.route")


class _Operand(UnitOperand):
    def __init__(self, engine: Engine, unit: Unit, injector: Injector) -> None:
        super().__init__(engine, unit)
        self._injector = injector
        gather, exchange = self.gather, self.exchange

        def injected_gather(consume: Any) -> None:
            gather(self._around(consume, "consume", "consumed"))

        def injected_exchange(consume: Any, produce: Any, **more: Any) -> None:
            exchange(self._around(consume, "consume", "consumed"), self._around(produce, "produce", "produced"), **more)

        self.gather, self.exchange = injected_gather, injected_exchange  # type: ignore[assignment]

    def _around(self, callback: Callable[..., None] | None, before: str, after: str) -> Any:
        def around(item: Any, pieces: Any) -> None:
            assert callback is not None
            self._injector.at(before)
            callback(item, pieces)
            self._injector.at(after)

        return around if callback is not None else None


class _Slot(Slot):
    injector: Injector

    def deliver(self, grad: torch.Tensor) -> None:
        self.injector.at("deliver")
        super().deliver(grad)


class Rig:
    """One rank: an engine, its layers, and optionally a plain collective in every step."""

    def __init__(
        self,
        transport: Transport,
        exchange: ExchangeFn,
        *,
        nbytes: int,
        layout: str = "rows",
        slices: int = 2,
        collectives: bool = False,
    ) -> None:
        self.rank, self.n, self.exchange = transport.rank, transport.world_size, exchange
        self.transport = transport
        self.injector = _current.injector = Injector()
        self._watch(transport)
        self.params = weights(LAYERS, 9, layout == "rows")
        flat = [(0, 7), (7, 25), *[(25, 25)] * self.n][: self.n] if layout == "replicated" else None
        self.replicated = layout == "replicated"
        self.slots = [
            [_Slot(f"{i}.{j}", p, self.rank, self.n, flat=flat) for j, p in enumerate(layer)]
            for i, layer in enumerate(self.params)
        ]
        for slot in self._all_slots():
            slot.injector = self.injector
        config = CommFuseConfig(inbox_bytes=nbytes, prefetch_bytes=nbytes, slices_per_rank=slices)
        units = [
            Unit(i, f"layer{i}", own, Policy(), slices, flat_bounds=flat, replicated=self.replicated)
            for i, own in enumerate(self.slots)
        ]
        self.engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
        self.operands = [_Operand(self.engine, unit, self.injector) for unit in units]
        self.port = CollectivePort(self.engine, "a group", "Begin anew.") if collectives else None
        self.number = 0

    def _all_slots(self) -> Iterator[_Slot]:
        for layer in self.slots:
            yield from layer

    def _watch(self, transport: Any) -> None:
        reserve, send = transport.reserve, transport.send

        def reserved(*arguments: Any) -> list[torch.Tensor]:
            found = reserve(*arguments)
            if found:
                self.injector.at("reserved")
            return found

        def sent(*arguments: Any, **more: Any) -> None:
            send(*arguments, **more)
            self.injector.at("sent")

        transport.reserve, transport.send = reserved, sent

    def _layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.replicated:
            return replicated_linear(x, self.params[index][0], self.operands[index])
        return fused_linear(x, self.operands[index], 0)

    def step(self, number: int) -> None:
        """Forward and backward of the batch of that number."""
        for slot in self._all_slots():
            slot.grad = None
        gathered, work = None, None
        self.engine.begin_step()
        if self.port is not None:
            gathered = torch.zeros(self.n * 40, dtype=torch.float64)
            work = self.port.all_gather(gathered, torch.full((40,), self.rank + number, dtype=torch.float64))
        x = data(self.rank, number)
        for index in range(LAYERS):
            x = torch.tanh(self._layer(index, x))
            self.injector.at("forward")
            x.register_hook(self._hook)
        if work is not None:
            work.wait()
            want = torch.arange(self.n, dtype=torch.float64).add_(number).repeat_interleave(40)
            assert torch.equal(gathered, want)
        self.engine.end_forward(True)
        x.sum().backward()
        if self.port is not None:
            out = torch.empty(40, dtype=torch.float64)
            self.port.reduce_scatter(out, torch.ones(self.n * 40, dtype=torch.float64), None)
            assert (out == self.n).all()

    def _hook(self, grad: torch.Tensor) -> None:
        self.injector.at("hook")

    def check(self, number: int) -> None:
        """The gradients of `step` against autograd over whole weights."""
        reference = expected(self.params, [Step([])] * number + [Step(list(range(LAYERS)))], self.n)
        for layer, wanted in zip(self.slots, reference, strict=True):
            for slot, total in zip(layer, wanted, strict=True):
                found = slot.grad if slot.grad is not None else torch.zeros_like(slot.local())
                assert torch.allclose(found, slot.shard(total), rtol=1e-10, atol=1e-10), slot.name

    def incident(self, plan: Injection | None) -> tuple[bool, list[BaseException]]:
        """A step in which `plan` comes true on this rank, and a good one behind it.

        Returns whether it came true, and what was raised: in the step, or at the start of the next. A rank that raised nothing
        in the step may raise once at the start of the next, which is then begun again, by it alone."""
        raised: list[BaseException] = []
        with self.injector.planned(plan):
            try:
                self.step(self.number)
            except (Injected, InjectedInterrupt, BrokenStepError) as error:
                raised.append(error)
        fired = self.injector.fired
        self.number += 1
        try:
            self.step(self.number)
        except BrokenStepError as error:
            assert not raised, f"raised twice: {raised[0]!r} and {error!r}"
            raised.append(error)
            self.step(self.number)
        self.check(self.number)
        self.number += 1
        assert self.engine.gradients.idle
        return fired, raised

    def settle(self, exchange: ExchangeFn) -> None:
        """All ranks: nothing of any of them is left in an inbox."""
        while True:
            self.transport.progress(0.001)
            if not any(exchange(self.transport.recovery.held)):
                return


def run_incidents(rig: Rig, plans: Sequence[Injection], *, alone: bool) -> int:
    """Every plan on all ranks, or on one of them in turn; returns how many came true. Asserts what each rank raised."""
    true = 0
    for number, plan in enumerate(plans):
        mine = plan if not alone or number % rig.n == rig.rank else None
        fired, raised = rig.incident(mine)
        everyone = rig.exchange(fired)
        true += any(everyone)
        assert len(raised) == any(everyone), (plan, everyone, raised)
        if raised:
            if fired:
                assert isinstance(raised[0], plan.kind), (plan, raised)
            elif not alone:  # shards are uneven, and so is how often a rank comes to a place
                assert plan.site not in EVEN and isinstance(raised[0], BrokenStepError), (plan, raised)
            else:
                error = raised[0]
                assert isinstance(error, BrokenStepError), (plan, raised)
                culprit = number % rig.n
                assert f"rank {culprit}" in str(error), (plan, error)
                if plan.site not in ("forward", "hook"):  # the engine saw it: cause and layer
                    assert plan.kind.__name__ in str(error) and "layer" in str(error), (plan, error)
        rig.settle(rig.exchange)
    return true


__all__ = ["SITES", "SUMMING", "WIDTH", "Injected", "InjectedInterrupt", "Injection", "Rig", "raising_sum", "run_incidents"]
