"""One rank of the training part: FSDP2 and commfuse_dp.apply, plain SGD; stores the gradients of every step.

Started as `python -m benchmarks.gpu.training_rank FOLDER JOB`, the job as JSON.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.gpu import checkout
from benchmarks.gpu.training_model import STEP_SIZE, Job, batch, build, loss_of
from commfuse_dp.launch.ranks import die_with_parent


def main(folder: str, job_text: str) -> None:
    die_with_parent()
    checkout.prepare()
    job = Job.loads(job_text)
    rank = int(os.environ["RANK"])
    if job.device == "cuda":
        torch.cuda.set_device(0)  # all ranks share the one GPU
    # NCCL refuses two ranks on one GPU: what is left to torch.distributed goes through gloo.
    dist.init_process_group("cpu:gloo,cuda:gloo" if job.device == "cuda" else "gloo", timeout=timedelta(seconds=job.deadline_s))
    try:
        result = train(job, rank)
        torch.save(result, Path(folder, f"rank{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(job: Job, rank: int) -> dict[str, Any]:
    """Gradients of this rank's shards (on the host), losses, what ran, host time of a step's enqueueing."""
    import commfuse_dp

    mesh = init_device_mesh(job.device, (job.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh}
    if job.dtype == "bfloat16":
        options["mp_policy"] = policy
    model = build(job).to(job.device)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    config = commfuse_dp.CommFuseConfig(
        transport=job.transport, deadline_s=job.deadline_s, prefetch_bytes=8 << 20, inbox_bytes=8 << 20
    )
    report = commfuse_dp.apply(model, config)
    gradients, losses, host_ms = [], [], []
    for step in range(job.steps):
        data = batch(job, rank, step)
        if job.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(model, data)
        loss.backward()
        host_ms.append(1e3 * (time.perf_counter() - start))
        with torch.no_grad():
            kept = {}
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                assert grad is not None, f"{name} has no gradient"
                assert isinstance(grad, DTensor) and isinstance(parameter, DTensor)
                local = grad.to_local()
                kept[name] = local.float().cpu().clone()
                parameter.to_local().sub_(local, alpha=STEP_SIZE)
                parameter.grad = None
        gradients.append(kept)
        losses.append(float(loss.detach()))
    text = str(report)
    commfuse_dp.remove(model)
    return {"gradients": gradients, "losses": losses, "report": text, "host_ms": host_ms}


if __name__ == "__main__":
    main(*sys.argv[1:])
