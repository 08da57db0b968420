"""PyTorch's tensor parallelism with and without CommFuse: losses, parameters; what is served, what is not, and why."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.parity.tensor_parallel.block import batch, parallelize, whole
from tests.support.serving import applied


def mesh_of(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, parallel: bool = False) -> torch.Tensor:
    with loss_parallel() if parallel else nullcontext():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1))


def train(
    model: torch.nn.Module, steps: int, parallel: bool = False, **data: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        tokens = batch(step, **data)
        with loss_parallel() if parallel else nullcontext():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1))
            loss.backward()
        losses.append(float(full(loss.detach())))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: full(param).detach().clone() for name, param in model.named_parameters()}


def close(a: Any, b: Any, tolerance: float) -> None:
    assert a[0] == pytest.approx(b[0], rel=tolerance)
    for name in a[1]:
        assert torch.allclose(a[1][name], b[1][name], rtol=0, atol=tolerance * 10), name


def _as_stock(rank: int, world_size: int, steps: int, parallel: bool, settings: dict[str, Any]) -> None:
    """In float64, where 20 steps of AdamW let nothing but another order of summation show."""
    mesh = mesh_of(world_size)
    stock = train(parallelize(whole(), mesh, loss_parallel=parallel), steps, parallel)
    model = parallelize(whole(), mesh, loss_parallel=parallel)
    with applied(model, **settings) as report:
        paths = {row.name: row.path for row in report.rows}
        assert paths["layers.1.attention.wk.weight"] == paths["output.weight"] == "column"
        assert paths["layers.0.attention.wo.weight"] == paths["layers.1.feed_forward.w2.weight"] == "row"
        assert paths["tok_embeddings.weight"] == paths["norm.weight"] == "stock"
        assert "wq" in next(row.reason for row in report.rows if row.name == "layers.1.attention.wk.weight")
        fused = train(model, steps, parallel)
    close(fused, stock, 1e-9)
    close(fused, train(whole(), steps), 1e-9)


@pytest.mark.parametrize(
    ("n", "steps", "parallel", "settings"),
    [
        (2, 2, True, {"save_activations": "gathered"}),
        pytest.param(2, 20, False, {}, marks=pytest.mark.slow),
        pytest.param(2, 20, True, {"save_activations": "gathered"}, marks=pytest.mark.slow),
        pytest.param(3, 20, False, {"slices_per_rank": 2, "order": "ring"}, marks=pytest.mark.slow),
        pytest.param(4, 20, False, {"transport": "tcp"}, marks=pytest.mark.slow),
    ],
)
def test_as_stock_and_as_unsharded(workers: Any, n: int, steps: int, parallel: bool, settings: dict[str, Any]) -> None:
    workers(n).run(_as_stock, steps, parallel, settings, timeout=200)


def _errors(rank: int, world_size: int, microbatches: int, autocast: bool) -> None:
    """Gradients of several microbatches, against the unsharded model in float64: no farther from it than twice stock's are."""
    mesh = mesh_of(world_size)

    def gradients(model: torch.nn.Module, low: bool) -> dict[str, torch.Tensor]:
        for step in range(microbatches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                loss_of(model, batch(step)).backward()
        return {name: full(param.grad) for name, param in model.named_parameters()}  # type: ignore[arg-type]

    def worst(found: dict[str, torch.Tensor]) -> float:
        return max(float((found[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in exact.items())

    exact = gradients(whole(bias=False), False)
    stock = worst(gradients(parallelize(whole(dtype=torch.float32, bias=False), mesh), autocast))
    model = parallelize(whole(dtype=torch.float32, bias=False), mesh)
    with applied(model):
        fused = worst(gradients(model, autocast))
    assert fused <= 2 * stock, (fused, stock)
    assert autocast or fused <= 1e-6


@pytest.mark.parametrize(("microbatches", "autocast"), [(3, False), (1, True)])
def test_float32_accumulation_and_autocast(workers: Any, microbatches: int, autocast: bool) -> None:
    workers(2).run(_errors, microbatches, autocast, timeout=60)
