"""One rank of the training part: FSDP2, tensor parallelism or both and commfuse_dp.apply, plain SGD; stores all gradients.

Started as `python -m benchmarks.gpu.ranks.training FOLDER JOB`, the job as JSON.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.gpu import checkout
from benchmarks.gpu.ranks.training_model import STEP_SIZE, Job, Net, batch, build, loss_of
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
    """Gradients of this rank's shards (on the host) and along which dimension tensor parallelism shards them; losses (of tensor
    parallelism: this rank's part); what ran; host time of a step's enqueueing."""
    import commfuse_dp

    mesh = init_device_mesh(job.device, (job.batches, job.tensor_parallel), mesh_dim_names=("data", "tensor"))
    model = build(job).to(job.device)
    sharded = parallelize(model, mesh["tensor"]) if job.tensor_parallel > 1 else {}
    if job.batches > 1:
        options: dict[str, Any] = {"mesh": mesh["data"]}
        if job.dtype == "bfloat16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    config = commfuse_dp.CommFuseConfig(
        transport=job.transport, deadline_s=job.deadline_s, prefetch_bytes=8 << 20, inbox_bytes=8 << 20
    )
    report = commfuse_dp.apply(model, config)
    gradients, losses, host_ms = [], [], []
    for step in range(job.steps):
        number, part = divmod(rank, job.tensor_parallel)
        data = [ids.chunk(job.tensor_parallel)[part] for ids in batch(job, number, step)]
        if job.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(model, data) / job.tensor_parallel
        loss.backward()
        host_ms.append(1e3 * (time.perf_counter() - start))
        with torch.no_grad():
            kept = {}
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                assert grad is not None, f"{name} has no gradient"
                local, values = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (grad, parameter))
                kept[name] = local.float().cpu().clone()
                if job.tensor_parallel > 1 and name not in sharded:  # of its own tokens
                    dist.all_reduce(kept[name], group=mesh["tensor"].get_group())
                values.sub_(kept[name].to(values.device), alpha=STEP_SIZE)
                parameter.grad = None
        gradients.append(kept)
        losses.append(float(loss.detach()))
    text = str(report)
    commfuse_dp.remove(model)
    return {"gradients": gradients, "losses": losses, "report": text, "host_ms": host_ms, "sharded": sharded}


def parallelize(model: Net, mesh: DeviceMesh) -> dict[str, int]:
    """Tensor parallelism for the blocks; between them every rank has its part of the tokens. Parameter -> sharded dimension."""
    dims = {}
    tokens = Shard(0)
    for number, layer in enumerate(model.layers):
        plan = {"up": ColwiseParallel(input_layouts=tokens), "down": RowwiseParallel(output_layouts=tokens)}
        parallelize_module(layer, mesh, plan, src_data_rank=None)  # all ranks have built the same
        dims.update({f"layers.{number}.up.weight": 0, f"layers.{number}.down.weight": 1})
    return dims


if __name__ == "__main__":
    main(*sys.argv[1:])
