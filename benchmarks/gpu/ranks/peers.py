"""One rank of the comparison with torch's fused ops, on a GPU that all share.

Arguments: folder of the result; 1 if small; "commfuse" or "torch".

Both sides do the same thing: gather the rows of W from all ranks and multiply (y = x @ W.T), and multiply and scatter the rows
of dW = dy.T @ x, summed over the ranks. torch's ops gather the left operand, so there the product is W @ x.T.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import checkout
from benchmarks.gpu.clock import GpuClock
from benchmarks.gpu.products import Product, worst_error
from benchmarks.gpu.shapes import LLAMA, Shape
from commfuse_dp.launch.ranks import die_with_parent

ROUNDS = 9
SMALL = Shape("small", 256, 512, 1024)


def main(folder: str, small: str, side: str) -> None:
    die_with_parent()
    checkout.prepare()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo", timeout=timedelta(seconds=60))
    try:
        result = Comparison(rank, size, SMALL if small == "1" else LLAMA[1]).run(side)
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, result)
        if rank == 0:
            Path(folder, "peers.json").write_text(json.dumps(everyone))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Comparison:
    """Operands on all ranks, in symmetric memory where a peer reads or writes them."""

    def __init__(self, rank: int, size: int, shape: Shape) -> None:
        from commfuse_dp.device.cuda import CudaDevice
        from commfuse_dp.transport.symmetric.memory import TorchSymmetricMemory

        self.rank, self.size, self.shape = rank, size, shape
        self.where = torch.device("cuda", 0)
        self.device = CudaDevice(self.where)
        self.clock = GpuClock(self.where)
        self.memory = TorchSymmetricMemory(None, self._exchange, self.where, overlapping=True)
        self.rows = shape.out_features // size
        self.slice_bytes = 2 * self.rows * shape.in_features
        self.epoch = 0

    def _exchange(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def _bf16(self, block: torch.Tensor, place: int = 0) -> torch.Tensor:
        """One slice in a block of bytes."""
        return block.narrow(0, place * self.slice_bytes, self.slice_bytes).view(torch.bfloat16).view(self.rows, -1)

    def run(self, side: str) -> dict[str, Any]:
        """Milliseconds of a side's two products, errors against one product, and why one does not apply."""
        found: dict[str, Any] = {}
        sides: tuple[tuple[str, Callable[[], tuple[Callable[[], Any], Callable[[], float]]]], ...] = (
            ("gather_commfuse", self.our_gather),
            ("gather_torch", self.torch_gather),
            ("scatter_commfuse", self.our_scatter),
            ("scatter_torch", self.torch_scatter),
        )
        for name, make in sides:
            if not name.endswith(side):
                continue
            problem: str | None = None
            try:
                call, error = make()
            except Exception as failure:  # torch's private ops may refuse a group, a device, a shape
                problem = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200] if str(failure) else ''}"
            problems = [text for text in self._exchange(problem) if text is not None]
            if problems:
                found[name] = {"problem": problems[0]}
                continue
            found[name] = {"ms": self._time(call), "error": error()}
        return found

    def _time(self, call: Callable[[], Any]) -> float:
        times = []
        for turn in range(ROUNDS + 2):
            torch.cuda.synchronize()
            dist.barrier()
            start, stop = self.clock.one(call)
            torch.cuda.synchronize()
            if turn >= 2:
                times.append(start.elapsed_time(stop))
        return statistics.median(times)

    def our_gather(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        """Copies from peers' memory into windows; the kernel turns to each slice behind its word."""
        pad = torch.zeros(self.size, dtype=torch.int32, device=self.where)
        product = Product("forward", self.shape, self.size, torch.bfloat16, self.where, pad=pad, own=self.rank)
        blocks = self.memory.allocate(self.slice_bytes, "the weights of the comparison")
        self._bf16(blocks[self.rank]).copy_(product.sources[self.rank])
        torch.cuda.synchronize()
        dist.barrier()
        for rank in product.awaited:
            product.windows[rank].fill_(float("nan"))
        side = self.device.side_stream("gather")
        kernel = product.by_kernel(None)

        def call() -> None:
            self.epoch += 1
            self.device.wait_event(side, self.device.record(self.device.current_stream()))
            for rank in product.awaited:
                window = product.windows[rank].view(-1).view(torch.uint8)
                self.device.copy(window, blocks[rank].narrow(0, 0, self.slice_bytes), side)
                self.device.write_value(side, pad, rank, self.epoch)
            kernel(self.epoch)

        return call, lambda: worst_error(product.y, product.oracle())

    def torch_gather(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        from torch.distributed import _symmetric_memory  # noqa: F401  registers the ops

        product = Product("forward", self.shape, self.size, torch.bfloat16, self.where, own=self.rank)
        shard, right = product.sources[self.rank].contiguous(), product.x.t()
        group = dist.group.WORLD
        assert group is not None
        outputs: list[torch.Tensor] = []

        def call() -> None:
            outputs[:] = torch.ops.symm_mem.fused_all_gather_matmul(shard, [right], 0, group.group_name)[1]

        call()
        torch.cuda.synchronize()
        return call, lambda: worst_error(outputs[0].t(), product.oracle())

    def our_scatter(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        """The kernel signals finished slices; copies into the owners' inboxes, words there; one sum in rank order."""
        from commfuse_dp.kernels.inbox_sum import inbox_sum

        local = torch.zeros(self.size, dtype=torch.int32, device=self.where)
        product = Product("wgrad", self.shape, self.size, torch.bfloat16, self.where, pad=local, own=self.rank, seed=self.rank)
        inboxes = self.memory.allocate(self.size * self.slice_bytes, "the inboxes of the comparison")
        words = [block.narrow(0, 0, 4 * self.size).view(torch.int32) for block in self.memory.allocate(4 * self.size, "words")]
        side = self.device.side_stream("scatter")
        kernel = product.by_kernel(None)
        partials = [self._bf16(inboxes[self.rank], rank) for rank in range(self.size)]
        partials[self.rank] = product.grads[self.rank]
        out = torch.empty(self.rows, self.shape.in_features, dtype=torch.float32, device=self.where)

        def call() -> None:
            self.epoch += 1
            self.device.wait_event(side, self.device.record(self.device.current_stream()))
            kernel(self.epoch)
            for rank in product.awaited:
                self.device.wait_value(side, local, rank, self.epoch)
                place = inboxes[rank].narrow(0, self.rank * self.slice_bytes, self.slice_bytes)
                self.device.copy(place, product.grads[rank].view(-1).view(torch.uint8), side)
                self.device.write_value(side, words[rank], self.rank, self.epoch)
            for rank in product.awaited:
                self.device.wait_value(self.device.current_stream(), words[self.rank], rank, self.epoch)
            inbox_sum(out, partials, implementation="kernel")

        return call, lambda: worst_error(out, self._summed())

    def torch_scatter(self) -> tuple[Callable[[], Any], Callable[[], float]]:
        from torch.distributed import _symmetric_memory  # noqa: F401  registers the ops

        product = Product("wgrad", self.shape, self.size, torch.bfloat16, self.where, own=self.rank, seed=self.rank)
        left = product.dy.t().contiguous()
        group = dist.group.WORLD
        assert group is not None
        output: list[torch.Tensor] = []

        def call() -> None:
            output[:] = [torch.ops.symm_mem.fused_matmul_reduce_scatter(left, product.x, "sum", 0, group.group_name)]

        call()
        torch.cuda.synchronize()
        return call, lambda: worst_error(output[0], self._summed())

    def _summed(self) -> torch.Tensor:
        """This rank's rows of the sum over all ranks, in float64."""
        total = torch.zeros(self.rows, self.shape.in_features, dtype=torch.float64, device=self.where)
        for rank in range(self.size):
            other = Product("wgrad", self.shape, self.size, torch.bfloat16, self.where, seed=rank)
            mine = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
            total += other.dy[:, mine].t().double() @ other.x.double()
        return total


if __name__ == "__main__":
    main(*sys.argv[1:])
