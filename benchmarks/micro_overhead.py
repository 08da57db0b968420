"""Host time that a fused linear adds, per layer and pass, on shapes too small to matter: CPU seconds of the calling thread.

    torchrun --nproc-per-node 2 benchmarks/micro_overhead.py [--transport shm] [--layers 64]

Compares a stack of tiny linears (8 tokens, 16 x 16) under CommFuse with the same stack unsharded. CPU time of the thread,
not wall time, so that waiting for the peer does not count; medians over many steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commfuse_dp


def measure(model: nn.Module, steps: int) -> tuple[float, float]:
    """Median CPU seconds of (forward, backward)."""
    x = torch.randn(8, 16)
    forward, backward = [], []
    for _ in range(steps):
        dist.barrier()
        start = time.thread_time()
        y = model(x).sum()
        middle = time.thread_time()
        y.backward()
        backward.append(time.thread_time() - middle)
        forward.append(middle - start)
        model.zero_grad()
    return statistics.median(forward[5:]), statistics.median(backward[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def stack(count: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(count)])

    def fused(count: int) -> tuple[float, float]:
        model = stack(count)
        fully_shard(model)
        commfuse_dp.apply(model, commfuse_dp.CommFuseConfig(transport=arguments.transport))
        result = measure(model, arguments.steps)
        commfuse_dp.remove(model)
        return result

    # The difference of two depths leaves out what a step costs once (publication, hooks of the root, the loss).
    few = arguments.layers // 4
    rows = {}
    for name, run in {"plain": lambda n: measure(stack(n), arguments.steps), "fused": fused}.items():
        shallow, deep = run(few), run(arguments.layers)
        rows[name] = [(d - s) / (arguments.layers - few) * 1e6 for s, d in zip(shallow, deep, strict=True)]
    if dist.get_rank() == 0:
        added = [fused - plain for fused, plain in zip(rows["fused"], rows["plain"], strict=True)]
        print(json.dumps({"transport": arguments.transport, "world_size": dist.get_world_size(), "torch": torch.__version__}))
        print(
            f"us a layer: plain forward {rows['plain'][0]:.1f} backward {rows['plain'][1]:.1f}; "
            f"fused forward {rows['fused'][0]:.1f} backward {rows['fused'][1]:.1f}; "
            f"added forward {added[0]:.1f} backward {added[1]:.1f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
