"""One rank of the tensor-parallel benchmark: all variants, alternating in rotated order, over one transport.

Started by `benchmarks.launch.run_case` as `python -m benchmarks.tp.worker CASE.json RESULT.json`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.case import BenchmarkError, CaseResult, VariantRecord
from benchmarks.sleeping import SleepingDevice
from benchmarks.tp.llama import LlamaVariant
from benchmarks.tp.models import Shape, forward, least_bytes, weights
from benchmarks.tp.stock import stock
from benchmarks.tp.variants import OURS, Compute, Seams, Slicing, Vanilla
from benchmarks.worker import PROGRESS, Trial, check_losses, facts_of, gather_objects, meet, run_rounds
from commfuse_dp.launch.ranks import run_as_rank
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.select import open_transport


@dataclass
class TpCase:
    """Settings of one launch, equal on all ranks."""

    world_size: int = 2
    variants: tuple[str, ...] = ()
    op: str = "mlp"
    passes: str = "forward"
    tokens: int = 1024
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    dp: int = 1  # of op llama: ranks = dp x tp
    layers: int = 2
    plan: str = "sequence"  # of op llama: with sequence parallelism, or with replicated activations
    vocabulary: int = 2048
    sleep_gflops: float | None = None  # compute is replaced by sleeping, at this speed
    slices_per_rank: int | None = None
    transport: str = "tcp"
    steps: int = 3
    rounds: int = 7
    warmup: int = 2
    seed: int = 0
    deadline_s: float = 120.0
    ranks_per_host: int = 1
    device: str = "cpu"
    job: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.tokens, self.width, self.hidden, self.heads)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> TpCase:
        data = json.loads(path.read_text())
        data["variants"] = tuple(data["variants"])
        return cls(**data)


class TpVariant:
    """One variant on this rank; what worker._block times."""

    def __init__(self, name: str, case: TpCase, rank: int, transport: Transport) -> None:
        self.name = name
        self.notes: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        self._case = case
        shards = weights(case.op, case.shape, rank, case.world_size, case.seed)
        generator = torch.Generator().manual_seed(case.seed + 1)
        whole = torch.randn(case.tokens, case.width, generator=generator)
        self._x = whole.chunk(case.world_size)[rank].clone().requires_grad_(case.passes == "both")
        self._dy = torch.full_like(self._x, 1 / case.tokens)
        self._shards = shards
        self._seams: Seams | None = None
        self._model: torch.nn.Module | None = None
        if name == "dtensor":
            self._model = stock(case.op, case.shape, shards, case.world_size)
        elif name.startswith("slicing-"):
            self._seams = Slicing(transport, int(name.partition("-")[2]))
        elif name in OURS:
            self._seams = OURS[name](transport, case.slices_per_rank)
        else:
            self._seams = {"compute": Compute, "vanilla": Vanilla}[name](transport)

    def step(self) -> None:
        case = self._case
        with torch.set_grad_enabled(case.passes == "both"):
            if self._model is not None:
                y = self._model(self._x)
            else:
                assert self._seams is not None
                y = forward(case.op, self._x, self._shards, self._seams, case.shape, case.world_size)
        if case.passes == "both":
            y.backward(self._dy)
            self.losses.append(self._x.grad.square().mean())  # type: ignore[union-attr]
            self._x.grad = None
            for weight in self._model.parameters() if self._model is not None else self._shards.values():
                weight.grad = None
        else:
            self.losses.append(y.square().mean())

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        yield

    def exposed_ns(self) -> int | None:
        return 0 if self.name == "compute" else self._seams.exposed_ns() if self._seams is not None else None

    def end(self) -> None:
        """A layer is not a step."""

    def finish(self) -> None:
        if isinstance(self._seams, Slicing):
            self._seams.close()


def main(case_file: str, result_file: str) -> None:
    case = TpCase.load(Path(case_file))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=case.deadline_s))
    rank = dist.get_rank()

    def say(text: str) -> None:
        if rank == 0:
            print(PROGRESS + text, flush=True)

    device = SleepingDevice(case.sleep_gflops) if case.sleep_gflops else None
    transport, _ = open_transport(
        case.transport,  # type: ignore[arg-type]
        group=None,
        inbox_bytes=64 << 20,
        deadline_s=case.deadline_s,
        probe=Probe(),
        device=torch.device("cpu"),
    )
    result = measure(case, rank, transport, say, device)
    meet()
    transport.close()
    dist.destroy_process_group()
    if rank == 0:
        result.save(Path(result_file))


def measure(case: TpCase, rank: int, transport: Transport, say: Any, device: SleepingDevice | None = None) -> CaseResult:
    trials = []
    for name in case.variants:
        variant: Any = LlamaVariant(name, case, rank) if case.op == "llama" else TpVariant(name, case, rank, transport)
        for _ in range(case.warmup):
            slept = device.slept_s if device is not None else 0.0
            variant.step()
            variant.notes["slept_ms"] = 1e3 * (device.slept_s - slept) if device is not None else None
        trials.append(Trial(name, variant, variant.notes))
    say(f"warm: {', '.join(case.variants)}")
    run_rounds(trials, case, say)  # type: ignore[arg-type]
    for trial in trials:
        trial.finish()
    check_losses(trials, rank)
    everyone = gather_objects([trial.blocks for trial in trials])
    records = [
        VariantRecord(
            name=trial.name,
            blocks=[[everyone[r][k][turn] for r in range(case.world_size)] for turn in range(case.rounds)],
            notes=trial.notes,
            losses=[float(loss) for loss in trial.losses],
        )
        for k, trial in enumerate(trials)
    ]
    least = least_bytes(case.op, case.shape, case.world_size, case.passes, "vanilla")
    if not records:
        raise BenchmarkError("no variant was asked for")
    return CaseResult(0, 0, minimum_bytes=least, variants=records, facts=facts_of(case))  # type: ignore[arg-type]


if __name__ == "__main__":
    run_as_rank(functools.partial(main, *sys.argv[1:]))
