"""Attention over ranks in processes: against its unfused references, the same bits over every transport, in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp import collectives, ops
from commfuse_dp.transport.select import open_transport
from tests.support.cells import slow

SIZES = {2: (7, 4), 3: (5, 0, 6)}
FUNCTIONS = ("ulysses_attention", "ring_attention", "row_parallel_attention")


def _inputs(name: str, rank: int, n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors of this rank, and the gradient of its result."""
    torch.manual_seed(rank)
    heads, groups, own, whole = 2 * n, n, SIZES[n][rank], sum(SIZES[n])
    if name == "row_parallel_attention":
        q, k, v = torch.randn(2, 2, whole, 4), torch.randn(2, 1, whole, 4), torch.randn(2, 1, whole, 4)
        tensors, grad = [q, k, v, torch.randn(6, 8)], torch.randn(2, own, 6)
    else:
        tensors = [torch.randn(2, own, count, 4) for count in (heads, groups, groups)]
        grad = torch.randn(2, own, heads, 4)
    return [tensor.requires_grad_() for tensor in tensors], grad


def _results(rank: int, n: int, transport: Any, suffix: str = "") -> list[torch.Tensor]:
    found = []
    for name in FUNCTIONS:
        for causal in (True, False):
            tensors, grad = _inputs(name, rank, n)
            y = getattr(ops, name + suffix)(*tensors, causal=causal, sizes=SIZES[n], slices_per_rank=2, transport=transport)
            y.backward(grad)
            found += [y.detach(), *(tensor.grad for tensor in tensors)]
    return found  # type: ignore[return-value]


def _against_reference(rank: int, world_size: int) -> None:
    fused, plain = _results(rank, world_size, None), _results(rank, world_size, None, "_reference")
    for number, (a, b) in enumerate(zip(fused, plain, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, number
        assert (a - b).norm() <= 1e-6 * b.norm().clamp(min=1.0), number
    collectives.close_transports()


@pytest.mark.parametrize("n", [2, 3])
def test_fused_equals_reference(workers: Any, n: int) -> None:
    workers(n).run(_against_reference, timeout=120)


def _over(rank: int, world_size: int, kind: Any, inbox_bytes: int) -> list[torch.Tensor]:
    transport, _ = open_transport(
        kind, group=None, inbox_bytes=inbox_bytes, deadline_s=60.0, probe=None, device=torch.device("cpu")
    )
    try:
        first, again = (_results(rank, world_size, transport) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        dist.barrier()
        return first
    finally:
        transport.close()


def test_the_same_bits_over_every_transport(workers: Any) -> None:
    results = [workers(2).run(_over, kind, size, timeout=120) for kind, size in (("shm", 1 << 20), ("tcp", 1 << 16))]
    for ours, others in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


# ---- graphs ----------------------------------------------------------------------------------------------------------
def _compiled(rank: int, world_size: int, name: str) -> None:
    group = dist.new_group(list(range(world_size)))
    function = getattr(ops, name)

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        y = function(*tensors, causal=True, sizes=SIZES[world_size], group=group)
        return y * 2 + function(*tensors, causal=True, sizes=SIZES[world_size], group=group)  # equal calls in one graph

    def step(run: Any) -> list[torch.Tensor]:
        tensors, grad = _inputs(name, rank, world_size)
        y = run(*tensors)
        y.backward(grad)
        return [y.detach(), *(tensor.grad for tensor in tensors)]  # type: ignore[list-item]

    eager, graph = step(block), step(torch.compile(block, backend="aot_eager", fullgraph=True))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(eager, graph, strict=True))
    torch.compiler.reset()
    collectives.close_transports()


@pytest.mark.parametrize("name", [FUNCTIONS[0], *map(slow, FUNCTIONS[1:])])
def test_in_a_graph(workers: Any, name: str) -> None:
    """In one graph without a break, for a group of its own."""
    workers(2).run(_compiled, name, timeout=120)


@pytest.mark.parametrize("name", ["ulysses", "ring_attention", "row_attention"])
@pytest.mark.parametrize("keep", [True, False])
def test_opcheck(name: str, keep: bool) -> None:
    """The registered ops and their backward, in a world of one rank."""
    op = getattr(torch.ops.commfuse, name)
    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=keep) for _ in range(3))
    if name == "row_attention":
        weight = torch.randn(6, 8, requires_grad=keep)
        args = (q, k, v, weight, 1, torch.float32, True, 0.5, [5], 2, "pairwise", 0, keep, 0)
    else:
        args = (q, k, v, "bhsd", True, 0.5, [5], 2, "pairwise", 0, keep, 0)
    tests = ("test_schema", "test_faketensor", *(("test_autograd_registration", "test_aot_dispatch_dynamic") if keep else ()))
    torch.library.opcheck(op.default, args, test_utils=tests)
