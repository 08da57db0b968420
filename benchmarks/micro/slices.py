"""What slices cost against whole GEMMs: CPU time of fused linears at many ranks over that of plain ones.

    OMP_NUM_THREADS=1 python -m benchmarks.micro.slices [--alone] [--ranks 2,8,16,32] [--tokens 512] [--json FILE]

Ranks are threads of one process that train linears of 768 x 3072 and 3072 x 768 with FSDP2 over shared memory. Rank 0 measures
the CPU time of its thread, so that waiting for others does not count: the forward and the backward of one linear, with all that
CommFuse does in them, over the same linear unsharded, which rank 0 runs in turn with it. `joined` is CommFuse as it is; `apart`
gives every slice a GEMM of its own (commfuse_dp/ops/joined.py joins slices of few rows). Medians of the ratios of single steps.

--alone: the products of one rank and nothing else: all slices are here, partials go to buffers that stay, nobody else runs. All
kinds in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.ops import products
from commfuse_dp.ops.joined import Joining
from commfuse_dp.ops.operands import Visit, WholeProducts
from commfuse_dp.ops.pieces import Piece

SHAPES = {"768 x 3072": (3072, 768), "3072 x 768": (768, 3072)}  # weight [out, in]: in, out
WARM_UP = 2  # steps


def apart(rows: int, tokens: int) -> Joining:
    """Stands for `joining`: nothing is joined."""
    return Joining(0, 0)


class Slices:
    """A `ShardedOperand` of rank 0 whose slices are all in memory."""

    name, transposed, has_bias, trainable, split_rows = "alone", False, False, (True,), ()
    whole: WholeProducts | None = None

    def __init__(self, weight: torch.Tensor, world_size: int) -> None:
        self.out_features, self.in_features = weight.shape
        self.anchor = torch.zeros(1)
        rows = -(-self.out_features // world_size)
        parts = [part.clone() for part in weight.split(rows)]
        self._params = [[Piece(0, rows * number, part)] for number, part in enumerate(parts)]
        self._partials = [[Piece(0, rows * number, torch.empty_like(part))] for number, part in enumerate(parts)]

    def expect_backward(self) -> None:
        return

    def gather(self, consume: Visit) -> None:
        for pieces in self._params:
            consume(None, pieces)

    def exchange(self, consume: Visit | None, produce: Visit | None) -> None:
        assert consume is not None and produce is not None
        for params, partials in zip(self._params[1:] + self._params[:1], self._partials[1:] + self._partials[:1], strict=True):
            produce(None, partials)
            consume(None, params)


def alone(world_size: int, shape: tuple[int, int], tokens: int, steps: int) -> dict[str, list[float]]:
    """Kind -> [forward, backward, both] of the products of one rank over whole GEMMs."""
    inputs, outputs = shape
    weight, x, grad = torch.randn(outputs, inputs), torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    operand = Slices(weight, world_size)

    def sliced() -> tuple[float, float]:
        start = time.thread_time()
        products.linear_forward(x, operand)
        turn = time.thread_time()
        products.linear_backward(grad, x, operand, True)
        return turn - start, time.thread_time() - turn

    def whole() -> tuple[float, float]:
        start = time.thread_time()
        torch.nn.functional.linear(x, weight)
        turn = time.thread_time()
        torch.mm(grad, weight)
        torch.mm(grad.t(), x)
        return turn - start, time.thread_time() - turn

    found: dict[str, list[list[float]]] = {"joined": [], "apart": []}
    for number in range(WARM_UP + steps):
        for kind, ratios in found.items():
            with mock.patch.object(products, "joining", apart) if kind == "apart" else contextlib.nullcontext():
                ours = sliced()
            stock = whole()
            if number >= WARM_UP:
                ratios.append([a / b for a, b in zip((*ours, sum(ours)), (*stock, sum(stock)), strict=True)])
    return {kind: [statistics.median(values) for values in zip(*ratios, strict=True)] for kind, ratios in found.items()}


def passes(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """CPU seconds of this thread in (forward, backward)."""
    start = time.thread_time()
    y = model(x)
    turn = time.thread_time()
    y.backward(torch.ones_like(y))
    return turn - start, time.thread_time() - turn


def rank_main(rank: int, whole: nn.Module, tokens: int, steps: int, turns: threading.Barrier, found: list[Any]) -> None:
    net = copy.deepcopy(whole)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    commfuse_dp.apply(net, CommFuseConfig(transport="shm", inbox_bytes=32 << 20, prefetch_bytes=32 << 20))
    generator = torch.Generator().manual_seed(rank)
    for number in range(WARM_UP + steps):
        x = torch.randn(tokens, whole[0].in_features, generator=generator).requires_grad_()
        fused = passes(net, x)
        turns.wait()
        if rank == 0:
            plain = passes(whole, x.detach().requires_grad_())
            if number >= WARM_UP:
                found.append([a / b for a, b in zip((*fused, sum(fused)), (*plain, sum(plain)), strict=True)])
        turns.wait()
    commfuse_dp.remove(net)


def as_threads(world_size: int, body: Callable[[int], None]) -> None:
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 looks for it when groups are destroyed
        multi_threaded_pg.ThreadLocalWorld.comms = []
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]


def measure(world_size: int, shape: tuple[int, int], tokens: int, steps: int) -> list[float]:
    """[forward, backward, both] over whole GEMMs."""
    inputs, outputs = shape
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
    found: list[list[float]] = []
    turns = threading.Barrier(world_size)
    as_threads(world_size, lambda rank: rank_main(rank, whole, tokens, steps, turns, found))
    return [statistics.median(values) for values in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--ranks", default="2,8,16,32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"torch {torch.__version__}, {options.tokens} tokens; over whole GEMMs: forward, backward, both")
    for name, shape in SHAPES.items():
        for world_size in map(int, options.ranks.split(",")):
            if options.alone:
                kinds = alone(world_size, shape, options.tokens, options.steps)
            else:
                kinds = {"joined": measure(world_size, shape, options.tokens, options.steps)}
                with mock.patch.object(products, "joining", apart):
                    kinds["apart"] = measure(world_size, shape, options.tokens, options.steps)
            rows.append({"layer": name, "ranks": world_size, **kinds})
            texts = [" ".join(f"{value:5.2f}" for value in kinds[kind]) for kind in ("joined", "apart")]
            print(f"{name}  {world_size:>3} ranks   joined {texts[0]}   apart {texts[1]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
