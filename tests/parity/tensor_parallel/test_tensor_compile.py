"""Served layers inside torch.compile: as stock, by the same ops and with the same bytes as outside, one graph for equal blocks.

Backend aot_eager, as in tests/parity/fsdp2/test_compile.py. Blocks are given `x + 0`: torch 2.13 itself fails on a compiled
block whose input is the embedding's result as DTensor returns it (an AsyncCollectiveTensor), with and without CommFuse."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import commfuse_dp
from tests.parity.tensor_parallel.block import Llama, batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients, mesh_of
from tests.parity.tensor_parallel.test_tensor_parallel import close, train
from tests.support import graphs
from tests.support.cells import INDUCTOR
from tests.support.serving import applied


def _each(model: Llama, backend: str) -> None:
    for block in model.layers:
        block.compile(backend=backend)


def _checkpointed(model: Llama, backend: str) -> None:
    _each(model, backend)
    model.run_block = lambda block, x: checkpoint(block, x + 0, use_reentrant=False)


def _whole(model: Llama, backend: str) -> None:
    model.compile(backend=backend)


def _inner(model: Llama, backend: str) -> None:
    """The hook that gathers is a graph by itself."""
    for block in model.layers:
        block.feed_forward.compile(backend=backend)


def _replace(model: Llama, backend: str, forward: Callable[..., torch.Tensor]) -> None:
    for block in model.layers:
        block.feed_forward.forward = MethodType(forward, block.feed_forward)
    _each(model, backend)


def _broken(model: Llama, backend: str) -> None:
    """Graphs end between the gather and the layers, and between these."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        y = self.w1(x)
        torch._dynamo.graph_break()
        return self.w2(F.silu(y) * self.w3(x))

    _replace(model, backend, forward)


def _read(model: Llama, backend: str) -> None:
    """Others use the gathered input, too."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x * 1) + 0 * self.w1(x))

    _replace(model, backend, forward)


def _sent(model: nn.Module, tokens: torch.Tensor) -> tuple[int, int]:
    """Bytes that tensor parallelism's transport sends in a step."""
    probe = attachment_of(model, TENSOR_ATTACHMENT).transport.probe.counters
    before = probe.snapshot()
    gradients(model, tokens)
    since = probe.since(before)
    return since.param_bytes_sent, since.grad_bytes_sent


def _trained(rank: int, n: int, layers: int, backend: str, settings: dict[str, Any]) -> None:
    graphs.fresh()
    mesh, tokens = mesh_of(n), batch(0)
    stock, model = parallelize(whole(layers=layers), mesh), parallelize(whole(layers=layers), mesh)
    for one in (stock, model):
        one.run_block = lambda block, x: block(x + 0)
    with applied(model, **settings):
        gradients(model, tokens)  # ranks compare what is new to them
        eager = _sent(model, tokens)
        _each(model, backend)
        close(train(model, 2), train(stock, 2), 1e-9)
        assert _sent(model, tokens) == eager
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1, counters
        (handle,) = {int(part._group.in_graphs.layer) for part in model.layers[0].attention._forward_pre_hooks.values()}
    if layers > 2:
        alike(gradients(model, tokens), gradients(stock, tokens))  # graphs notice that the layers are stock's again
    with pytest.raises(RuntimeError, match=r"compile the model again|is closed"):
        torch.ops.commfuse.gather_sequence(torch.zeros(2, 3, 4), 1, n, torch.tensor(handle), rank, 0)


@pytest.mark.slow
def test_a_block_trains_as_stock(workers: Any) -> None:
    workers(2).run(_trained, 1, "aot_eager", {}, timeout=200)


@pytest.mark.slow
def test_more_blocks_than_dynamo_recompiles_share_a_graph(workers: Any) -> None:
    workers(3).run(_trained, 9, "aot_eager", {"save_activations": "gathered", "transport": "tcp"}, timeout=200)


@pytest.mark.slow
@INDUCTOR
def test_inductor(workers: Any) -> None:
    workers(2).run(_trained, 2, "inductor", {}, timeout=400)


WAYS = (_checkpointed, _whole, _inner, _broken, _read)


def _ways(rank: int, n: int, way: Callable[[Llama, str], None]) -> None:
    graphs.fresh()
    mesh, tokens = mesh_of(n), batch(0)
    stock, model = parallelize(whole(), mesh), parallelize(whole(), mesh)
    model.run_block = lambda block, x: block(x + 0)
    wanted = gradients(stock, tokens)
    with applied(model):
        way(model, "aot_eager")
        for _ in range(2):
            alike(gradients(model, tokens), wanted)
        with torch.no_grad():
            assert torch.allclose(model(tokens[:, :8]), stock(tokens[:, :8]), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_compiling(workers: Any, way: Callable[[Llama, str], None]) -> None:
    workers(2).run(_ways, way, timeout=200)


def _low(rank: int, n: int, dtype: torch.dtype, cast: bool) -> None:
    """At most twice as far from float64 as stock is, outside of graphs as well."""
    graphs.fresh()
    mesh, tokens = mesh_of(n), batch(0)
    exact = gradients(parallelize(whole(), mesh), tokens)

    def worst(model: Llama) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            found = gradients(model, tokens)
        return max(
            float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(found, exact, strict=True)
        )

    stock, model = parallelize(whole(dtype=dtype), mesh), parallelize(whole(dtype=dtype), mesh)
    model.run_block = lambda block, x: block(x + 0)
    limit = 2 * worst(stock)
    with applied(model):
        assert worst(model) <= limit
        _each(model, "aot_eager")
        assert worst(model) <= limit
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1, counters


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_low_precision(workers: Any, dtype: torch.dtype, cast: bool) -> None:
    workers(2).run(_low, dtype, cast, timeout=200)


def _uneven(rank: int, n: int) -> None:
    """In a graph every rank is taken to have as many positions as this one."""
    graphs.fresh()
    model = parallelize(whole(), mesh_of(n))
    with applied(model):
        block = torch.compile(model.layers[0].feed_forward, backend="aot_eager")
        with pytest.raises(commfuse_dp.CommFuseError, match="but the ranks have"):
            block(torch.zeros(2, 3 + rank, 12, dtype=torch.float64))
        torch.distributed.barrier()


@pytest.mark.slow
def test_lengths_that_differ(workers: Any) -> None:
    workers(2).run(_uneven, timeout=200)
