"""The three ways of training that the demo compares: stock FSDP2, FSDP2 with CommFuse, and compute without communication.

All start from the same weights and see the same batches. Each has an AdamW of its own over this rank's 1/N of the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from commfuse_dp.examples.demo.corpus import Batches
from commfuse_dp.examples.demo.model import build_model, next_byte_loss
from commfuse_dp.examples.demo.settings import DemoSettings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from commfuse_dp.observe import ModuleSpans, SpanRecorder, StepMeter, StockMeter, UnshardedPeak
from commfuse_dp.probe import Probe

FSDP2, COMMFUSE, COMPUTE_ONLY = "fsdp2", "commfuse", "compute_only"


@dataclass
class Variant:
    """One model in training on this rank."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    settings: DemoSettings
    probe: Probe
    report: Any = None  # of commfuse_dp.apply
    losses: list[float] = field(default_factory=list)  # of this rank, a step each

    def __post_init__(self) -> None:
        self.meter = StepMeter(self.probe)
        self.recorder = SpanRecorder(self.probe)
        self.device = self.settings.device

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """To be open around this variant's steps: stock FSDP2's collectives are watched only then."""
        with StockMeter(self.probe) if self.name == FSDP2 and self.device == "cpu" else contextlib.nullcontext():
            yield

    def step(self) -> None:
        """One training step, read by the meter. Phases are recorded if the recorder is attached."""
        inputs, targets = self.batches(len(self.losses), self.device)
        recorder = self.recorder if self.probe.sink is not None else None
        with self.meter.step(), recorder.step(len(self.losses)) if recorder else contextlib.nullcontext():
            with recorder.phase("forward") if recorder else contextlib.nullcontext():
                loss = next_byte_loss(self.model, inputs, targets)
            with recorder.phase("backward") if recorder else contextlib.nullcontext():
                loss.backward()
            with recorder.phase("optimizer") if recorder else contextlib.nullcontext():
                self._update()
            if self.device != "cpu":
                torch.cuda.synchronize()
        self.losses.append(loss.item())

    def _update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, (len(self.losses) + 1) / self.settings.learning_rate_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def record(self, steps: int) -> int:
        """Train `steps` steps with spans; returns the peak of unsharded weight bytes in them."""
        blocks = [(f"block {i}", block) for i, block in enumerate(self.model.blocks)]  # type: ignore[arg-type,var-annotated]
        peak = UnshardedPeak(self.model, lambda: self.probe.counters.window_bytes)
        with self.recorder, ModuleSpans(self.probe, blocks):
            for _ in range(steps):
                self.step()
        with peak:  # a step of its own: looking costs time that would show in the spans
            self.step()
        return max(peak.nbytes, self.probe.counters.window_bytes_peak)

    @torch.no_grad()
    def validate(self, batches: Batches, count: int) -> float:
        """Mean loss of this rank over `count` held-out batches."""
        self.model.eval()
        total = sum(next_byte_loss(self.model, *batches(number, self.device)).item() for number in range(count))
        self.model.train()
        return total / count


class ComputeOnly(Variant):
    """The unsharded model on each rank by itself. Its optimizer updates 1/N of the parameters, as a sharded one does."""

    def __init__(self, model: nn.Module, batches: Batches, settings: DemoSettings, rank: int) -> None:
        self._shards: list[tuple[nn.Parameter, nn.Parameter, int, int]] = []
        for parameter in model.parameters():
            chunk = -(-parameter.shape[0] // settings.world_size)  # fully_shard's rule: short and empty chunks at the end
            start = min(rank * chunk, parameter.shape[0])
            end = min(start + chunk, parameter.shape[0])
            if end > start:
                self._shards.append((parameter, nn.Parameter(parameter.detach()[start:end]), start, end))
        optimizer = _adamw([shard for _, shard, _, _ in self._shards], settings)
        super().__init__(COMPUTE_ONLY, model, optimizer, batches, settings, Probe())

    def _update(self) -> None:
        for parameter, shard, start, end in self._shards:
            shard.grad = None if parameter.grad is None else parameter.grad[start:end]
        super()._update()
        self.model.zero_grad(set_to_none=True)


def build_variants(settings: DemoSettings, rank: int, batches: Batches) -> dict[str, Variant]:
    """Collective. The variants, from equal weights."""
    import commfuse_dp
    from commfuse_dp.config import CommFuseConfig

    device = settings.device
    mesh = init_device_mesh(device, (settings.world_size,))

    def sharded() -> nn.Module:
        model = build_model(settings).to(device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    stock = sharded()
    fused = sharded()
    config = CommFuseConfig.model_validate({"transport": settings.transport, "order": settings.order})
    report = commfuse_dp.apply(fused, config)
    return {
        FSDP2: Variant(FSDP2, stock, _adamw(stock.parameters(), settings), batches, settings, Probe()),
        COMMFUSE: Variant(COMMFUSE, fused, _adamw(fused.parameters(), settings), batches, settings, report.probe, report),
        COMPUTE_ONLY: ComputeOnly(build_model(settings).to(device), batches, settings, rank),
    }


def _adamw(parameters: Any, settings: DemoSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.1, fused=True)
