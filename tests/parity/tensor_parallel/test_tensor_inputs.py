"""Modules that take more than what is gathered: inputs that are not moved, and layers that take something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.parity.tensor_parallel.test_tensor_layers import alike, mesh_of
from tests.support.serving import applied

WIDTH, HEADS, HEAD = 12, 4, 3


class Attention(nn.Module):
    """As torchtitan's Qwen3: heads are DTensors, normalized one by one, and rotated by a table that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv"):
            setattr(self, name, nn.Linear(WIDTH, HEADS * HEAD, bias=False))
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(HEAD)

    def forward(self, x: torch.Tensor, table: torch.Tensor, scale: float | None, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, HEAD) for layer in (self.wq, self.wk, self.wv))
        out = torch.tanh(self.q_norm(q) * table * k * (1.0 if scale is None else scale)) * (v * mask)
        return self.wo(out.reshape(batch, length, HEADS * HEAD))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention()

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.attention(self.norm(x), *more)


def sharded(mesh: Any, mask: Any = None) -> Net:
    """mask: how it is given; None: every rank has all of it."""
    torch.manual_seed(0)
    column = {name: ColwiseParallel(use_local_output=False) for name in ("wq", "wk", "wv")}
    plan = {
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), Replicate(), None, mask or Replicate()),
            desired_input_layouts=(Replicate(), Replicate(), None, Replicate()),
        ),
        **{f"attention.{name}": style for name, style in column.items()},
        "attention.q_norm": SequenceParallel(sequence_dim=2),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Net().double(), mesh, plan)  # type: ignore[return-value]


def results(net: Net, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = net(x, *more)
    y.square().sum().backward()
    found = [y, x.grad, *(param.grad for param in net.parameters())]
    net.zero_grad()
    return [full.full_tensor().detach() if isinstance(full, DTensor) else full for full in found]  # type: ignore[misc]


def _beside(rank: int, world_size: int) -> None:
    mesh, length = mesh_of(world_size), 8
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
    table = torch.rand(length, 1, HEAD, generator=generator, dtype=torch.float64)
    mask = torch.rand(length, 1, 1, generator=generator, dtype=torch.float64)
    x = whole.chunk(world_size, 1)[rank].contiguous()
    stock, model = sharded(mesh), sharded(mesh)
    with applied(model) as report:
        paths = {row.name: row.path for row in report.rows}
        assert {paths[f"attention.{name}.weight"] for name in ("wq", "wk", "wv")} == {"column"}, report
        there = DTensor.from_local(mask, mesh, (Replicate(),), run_check=False)
        for others in ((table, None, mask), (table, 0.5, there)):
            alike(results(model, x, *others), results(stock, x, *others))
        assert not report.gathered_inputs
        with pytest.raises(AssertionError, match="expecting input to be a torch"):  # stock's own words
            model(x, None, None, mask)
    moved = sharded(mesh, Shard(0))
    with applied(moved) as report:
        reasons = {row.name: row.reason for row in report.rows}
        assert reasons["attention.wq.weight"] == "PrepareModuleInput moves more than one positional input"
        rows = mask.chunk(world_size, 0)[rank].contiguous()
        alike(results(moved, x, table, None, rows), results(stock, x, table, None, mask))


def test_inputs_that_are_not_moved(workers: Any) -> None:
    workers(2).run(_beside)


class Latent(nn.Module):
    """As multi-head latent attention: a column-parallel layer takes something narrower than what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.down = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 5, bias=False)
        self.up, self.wo = nn.Linear(5, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent = F.linear(x, self.down.weight)
        return self.wo(self.wq(x) * self.up(latent))


def _narrower(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)

    def build() -> nn.Module:
        torch.manual_seed(0)
        plan = {
            "0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True),
            "0.wq": ColwiseParallel(),
            "0.up": ColwiseParallel(),
            "0.wo": RowwiseParallel(output_layouts=Shard(1)),
        }
        return parallelize_module(nn.Sequential(Latent()).double(), mesh, plan)

    stock, model = build(), build()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    with applied(model) as report:
        reasons = {row.name: row.reason for row in report.rows}
        assert "do not all take its input: they take 12 and 5 features" in reasons["0.wq.weight"]
        assert {row.name: row.path for row in report.rows}["0.wo.weight"] == "row"
        alike(results(model, x), results(stock, x))  # type: ignore[arg-type]


def test_layers_that_take_something_else(workers: Any) -> None:
    workers(2).run(_narrower)
