"""Part (b): ranks that share the GPU train with FSDP2, tensor parallelism or both and commfuse_dp.apply; gradients must be
those of one process.

The reference is one process with the whole model and all ranks' batches, in float64 and in the run's own precision. What the
latter differs from the former is what this precision costs without any sharding; CommFuse may differ twice as much.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import checkout
from benchmarks.gpu.part import Options, Reporter, run_part
from benchmarks.gpu.ranks.launching import run_ranks
from benchmarks.gpu.ranks.training_model import STEP_SIZE, Job, batch, build

RUN_S = 40.0  # a run needs 23 to 35 s on an H100 or H200; the first one compiles kernels
# Sums over ranks and slices are done in another order than in one process; in float32 that alone may be all the difference, so
# errors below this part of a parameter's largest gradient are not judged.
FLOOR = {"float32": 2e-5, "bfloat16": 2e-3}


def run(report: Reporter, options: Options) -> None:
    """2 and 4 processes on one GPU: FSDP2, tensor parallelism and both, with apply(), against one process."""
    advice = checkout.advice()
    if advice is not None:
        report.fail(advice)
        return
    transport = "auto"
    kinds = [(2, "bfloat16", 1), (2, "float32", 2), (4, "bfloat16", 2), (2, "float32", 1), (4, "bfloat16", 1)]
    small: dict[str, Any] = {"width": 64, "hidden": 128, "blocks": 2, "tokens": 64, "steps": 2} if options.small else {}
    for ranks, dtype, tensor_parallel in kinds[:3] if options.small else kinds:
        job = Job(ranks, dtype, options.device, transport, tensor_parallel, **small)
        what = f"training with {job.world_size} ranks in {job.dtype}"
        what += f", {tensor_parallel} of them tensor-parallel" if tensor_parallel > 1 else ""
        if report.enough(RUN_S if options.device == "cuda" else 0.0, what):
            with report.guarded(what):
                check(report, job, what)


def check(report: Reporter, job: Job, what: str) -> None:
    """Run the ranks and one process, and compare all gradients of all steps."""
    limit = max(report.clock.left - 2.0, 5.0)
    ranks = run_ranks(
        "benchmarks.gpu.ranks.training",
        job.world_size,
        [job.dumps()],
        limit_s=limit,
        collect=lambda folder: collect(folder, job),
    )
    wide, own = reference(job, torch.float64), reference(job, getattr(torch, job.dtype))
    worst: dict[str, float] = {"ratio": 0.0}
    wrong = 0
    for step in range(job.steps):
        for name, whole in wide["gradients"][step].items():
            got = joined([rank["gradients"][step][name] for rank in ranks], ranks[0]["sharded"].get(name), job, whole.shape)
            if got.shape != whole.shape:
                raise ValueError(f"{name}: shards make {tuple(got.shape)}, the parameter is {tuple(whole.shape)}")
            scale = whole.abs().max().item()
            error = (got.double() - whole).abs().max().item()
            unfused = (own["gradients"][step][name].double() - whole).abs().max().item()
            allowed = 2 * unfused + FLOOR[job.dtype] * scale
            ratio = error / allowed
            worst["ratio"] = max(worst["ratio"], ratio)
            if not ratio <= 1:  # also NaN
                wrong += 1
                if wrong <= 5:
                    report.fail(f"{what}: gradient of {name}, step {step}: error {error:.3g}, allowed {allowed:.3g}")
    losses = [sum(rank["losses"][step] for rank in ranks) / job.batches for step in range(job.steps)]
    loss_error = max(abs(a - b) / abs(b) for a, b in zip(losses, wide["losses"], strict=True))
    if not loss_error < (1e-5 if job.dtype == "float32" else 2e-2):
        report.fail(f"{what}: losses {losses}, one process in float64 {wide['losses']}")
    transports = 1 if 1 in (job.batches, job.tensor_parallel) else 2
    if job.device == "cuda" and ranks[0]["report"].count("transport symmetric") != transports:
        report.fail(f"{what}: not over symmetric memory; the report says: {ranks[0]['report'].splitlines()[0]}")
    report.row(
        kind="training",
        ranks=job.world_size,
        tensor_parallel=job.tensor_parallel,
        dtype=job.dtype,
        steps=job.steps,
        gradients=len(wide["gradients"][0]) * job.steps,
        wrong=wrong,
        worst_error_over_allowed=worst["ratio"],
        loss_relative_error=loss_error,
        host_ms_per_step=min(ranks[0]["host_ms"]),
        report=ranks[0]["report"],
    )


def joined(shards: list[torch.Tensor], dim: int | None, job: Job, shape: Sequence[int]) -> torch.Tensor:
    """A gradient of that shape from all ranks' shards: by rows over data-parallel ranks; dim: along which tensor parallelism
    shards it, None: its ranks have the same."""
    ways = job.tensor_parallel
    rows = list(shape) if dim is None else [size // ways if at == dim else size for at, size in enumerate(shape)]
    parts = [torch.cat([shard.reshape(-1, *rows[1:]) for shard in shards[rank::ways]]) for rank in range(ways)]
    return parts[0] if dim is None else torch.cat(parts, dim)


def reference(job: Job, dtype: torch.dtype) -> dict[str, Any]:
    """One process, whole model, mean over the ranks' batches; bfloat16 by autocast-free casting of weights and activations.

    Every precision starts a step from the weights of the float64 run of the same steps (its own run, repeated), so that errors
    do not add up over the steps.
    """
    model = build(job).to(job.device, torch.float64)
    names = [name for name, _ in model.named_parameters()]
    gradients, losses = [], []
    for step in range(job.steps):
        exact = _mean_gradients(job, model, names, step, torch.float64)
        found = exact if dtype == torch.float64 else _mean_gradients(job, model, names, step, dtype)
        gradients.append({name: grad.double().cpu() for name, grad in found[0].items()})
        losses.append(found[1])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(exact[0][name], alpha=STEP_SIZE)
    return {"gradients": gradients, "losses": losses}


def _mean_gradients(
    job: Job, model: torch.nn.Module, names: list[str], step: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of the mean of the ranks' losses, each computed in `dtype`, added up in float64."""
    copy = build(job).to(job.device, dtype)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in copy.named_parameters()}
    loss_sum = 0.0
    for number in range(job.batches):
        data = batch(job, number, step)
        logits = copy(data[0])
        wide = logits.double() if dtype == torch.float64 else logits.float()
        loss = torch.nn.functional.cross_entropy(wide, data[1])
        found = torch.autograd.grad(loss, list(copy.parameters()))
        for name, grad in zip(names, found, strict=True):
            total[name] += grad.double() / job.batches
        loss_sum += float(loss.detach()) / job.batches
    return total, loss_sum


def collect(folder: Path, job: Job) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(job.world_size)]


if __name__ == "__main__":
    sys.exit(run_part("training", run))
