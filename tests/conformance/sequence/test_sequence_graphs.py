"""The ops over a sharded sequence in graphs: torch's own checks of registered ops; compiled equals eager and reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.collectives import close_transports
from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.ops import column_parallel, column_parallel_reference, row_parallel, row_parallel_reference
from commfuse_dp.transport.select import open_transport

D = 4


def operands(rank: int, sizes: Any, bias: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(rank)
    shared = torch.Generator().manual_seed(9)
    own = [torch.randn(2, sizes[rank], D), torch.randn(3, D), torch.randn(5, D), torch.randn(D, 8)]
    biases = [torch.randn(5), torch.randn(D, generator=shared)] if bias else [None, None]
    return [None if t is None else t.double().requires_grad_() for t in (*own, *biases)]


def block(column: Any, row: Any, sizes: Any, save: str, layout: str = "sharded") -> Any:
    column, row = (functools.partial(function, layout=layout) for function in (column, row))

    def run(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, last: torch.Tensor, b: Any, c: Any) -> torch.Tensor:
        y, z = column(x, [w1, w2], [None, b] if b is not None else (), save=save, sizes=sizes)
        return row(torch.sin(torch.cat([y, z], -1)), last, c, sizes=sizes)

    return run


def gradients(function: Any, tensors: Any) -> list[torch.Tensor]:
    out = function(*tensors)
    wanted = [t for t in tensors if t is not None]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.parametrize(("save", "replicated"), [("shard", False), ("gathered", False), ("shard", True)])
def test_torch_accepts_the_ops(save: str, replicated: bool) -> None:
    from commfuse_dp.ops.sequence import graph_ops as ops

    number = ops.place_number(None, "pairwise", None, "test")
    x, w1, w2, last, b, c = operands(0, (3,), True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    args = (x, [w1, w2, b], 2, 0b10, 1, [3], ("shard", "gathered").index(save), replicated, 0b10111, None, 0, number)
    torch.library.opcheck(torch.ops.commfuse.column_parallel.default, args, test_utils=tests)
    y = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.commfuse.gather_sequence.default, (x, 1, 1, None, 0, number), test_utils=tests)
    args = (y, last, c, 1, [3], torch.float64, replicated, 0b111, None, 0, number)
    torch.library.opcheck(torch.ops.commfuse.row_parallel.default, args, test_utils=tests)


def _compiled(rank: int, world_size: int, backend: str) -> None:
    cases = (even_sizes(5, world_size), "shard", "sharded"), (None, "gathered", "sharded"), (None, "shard", "replicated")
    for sizes, *how in cases:
        tensors = operands(rank, sizes or (2,) * world_size, True)
        run = block(column_parallel, row_parallel, sizes, *how)
        eager = gradients(run, tensors)
        compiled = gradients(torch.compile(run, fullgraph=True, backend=backend), tensors)
        plain = gradients(block(column_parallel_reference, row_parallel_reference, sizes, *how), tensors)
        for a, b, c in zip(compiled, eager, plain, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12) and torch.allclose(b, c, rtol=1e-12, atol=1e-12)
    close_transports()
    torch.compiler.reset()


def test_compiled_on_one_rank() -> None:
    _compiled(0, 1, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(("n", "backend"), [(2, "aot_eager"), (3, "inductor")])
def test_compiled_over_ranks(workers: Any, n: int, backend: str) -> None:
    workers(n).run(_compiled, backend, timeout=300)


def _over(rank: int, world_size: int, kind: Any) -> list[torch.Tensor]:
    transport, _ = open_transport(
        kind, group=None, inbox_bytes=1 << 16, deadline_s=60.0, probe=None, device=torch.device("cpu")
    )
    try:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [None if t is None else t.detach().to(dtype).requires_grad_() for t in operands(rank, (3, 0, 2), True)]
            for _ in range(2):
                found.append(gradients(functools.partial(_eager, transport), tensors))
            assert all(torch.equal(a, b) for a, b in zip(*found[-2:], strict=True))
            replicated = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
            replicated[0] = torch.ones(2, 7, D, dtype=dtype, requires_grad=True)
            for _ in range(2):
                found.append(gradients(functools.partial(_eager, transport, layout="replicated"), replicated))
            assert all(torch.equal(a, b) for a, b in zip(*found[-2:], strict=True))
            if dtype == torch.float32 and kind == "shm":
                plain = gradients(
                    block(column_parallel_reference, row_parallel_reference, None, "shard", "replicated"), replicated
                )
                assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found[-1], plain, strict=True))
                plain = gradients(block(column_parallel_reference, row_parallel_reference, (3, 0, 2), "shard"), tensors)
                assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found[-3], plain, strict=True))
        dist.barrier()
        return [tensor for one in found for tensor in one]
    finally:
        transport.close()


def _eager(transport: Any, *tensors: Any, layout: str = "sharded") -> torch.Tensor:
    column = functools.partial(column_parallel, transport=transport)
    sizes = (3, 0, 2) if layout == "sharded" else None
    return block(column, functools.partial(row_parallel, transport=transport), sizes, "shard", layout)(*tensors)


def test_the_same_bits_over_every_transport_and_as_the_reference(workers: Any) -> None:
    results = {kind: workers(3).run(_over, kind, timeout=120) for kind in ("shm", "tcp", "p2p")}
    for rank, tensors in enumerate(results["shm"]):
        for kind in ("tcp", "p2p"):
            assert all(torch.equal(a, b) for a, b in zip(tensors, results[kind][rank], strict=True)), (kind, rank)
