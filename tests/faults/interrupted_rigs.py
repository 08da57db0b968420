"""Models that CommFuse serves, on one rank, whose steps are interrupted and compared with the framework's own.

Each step has parameters and a batch of its own: what is left of an older step, or missing, is seen in its gradients.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import ATTACHMENT, TENSOR_ATTACHMENT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.errors import CommFuseError
from commfuse_dp.transport.base import Transport
from tests.parity.deepspeed import pair as zero
from tests.parity.fsdp2.models import shard_layers
from tests.parity.tensor_parallel.block import WIDTH, FeedForward
from tests.support.interrupting import Interruption

VERSIONS = 3  # of parameters and batch
WIDTHS = (6, 37, 5)
PATIENCE_S = 20.0  # in which a signal that was held back must have come

WRONG, SWALLOWED = "WRONG", "SWALLOWED"  # what an attempt may end with, beside "ok" and exceptions


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

    def cycle(self, number: int, fraction: float | None, handle: Callable[..., object], *, meet: bool) -> tuple[str, list[str]]:
        """Place, and what each attempt ended with.

        fraction: of the places of a step, where this rank is interrupted. meet: ranks wait for each other after that step."""
        told, interruption = [], None
        version = number % VERSIONS
        if fraction is None:
            told.append(self.attempt(version))
        else:
            interruption = Interruption(1 + int(fraction * self.places), handle)
            try:
                told.append(self.attempt(version, interruption))
                if interruption.where and not told[0].startswith("KeyboardInterrupt"):
                    told[0] += self._late()
            except KeyboardInterrupt:  # a signal that was held back may come at any line behind the step
                told = [f"{told[0] if told else 'ok'}, KeyboardInterrupt behind it"]
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
    """DeepSpeed's ZeRO-3, which has no float64. It keeps nothing whole: biases and norms are fetched by DeepSpeed itself."""

    rtol = 1e-4

    def _start(self, served: bool) -> list[torch.Tensor]:
        self._stack = contextlib.ExitStack()
        case = zero.Case(zero.settings(3, zero={"stage3_param_persistence_threshold": 0}), block=self._settings)
        self._zero = self._stack.enter_context(zero.started(self.rank, self.world_size, case, fused=served))
        self.model = self._zero.module
        return [p.ds_tensor.detach() for p in self.model.parameters()]

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
