"""The styles of CommFuse in a plan, without a call of apply()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from commfuse_dp.integrations import tensor_parallel
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from commfuse_dp.integrations.fsdp2 import engine_of
from commfuse_dp.integrations.unmodified import first_call
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as stock

import commfuse_dp
from tests.parity.tensor_parallel import block
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients, mesh_of
from tests.support.serving import applied

NAMES = ("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel")


def parallelized(styles: Any, mesh: Any, names: tuple[str, ...] = NAMES) -> block.Llama:
    """The model of block.py, with the styles of `styles`."""
    before = {name: getattr(block, name) for name in names}
    try:
        vars(block).update({name: getattr(styles, name) for name in names})
        return block.parallelize(block.whole(), mesh)
    finally:
        vars(block).update(before)


def _styles(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    tokens = block.batch(0)
    wanted = gradients(parallelized(stock, mesh), tokens)
    for names in (NAMES, ("RowwiseParallel",)):  # one of them is enough
        model = parallelized(tensor_parallel, mesh, names)
        assert not tensor_parallel.applied(model)
        alike(gradients(model, tokens), wanted)
        assert tensor_parallel.applied(model)
        commfuse_dp.remove(model)
        alike(gradients(model, tokens), wanted, 0.0)
        assert not tensor_parallel.applied(model)  # not again
    toy = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double()
    styles = {"0": stock.ColwiseParallel(input_layouts=Shard(0)), "1": tensor_parallel.RowwiseParallel(output_layouts=Shard(0))}
    stock.parallelize_module(toy, mesh, styles)
    toy(torch.zeros(2, 4, dtype=torch.float64))  # all of the model, not the one layer that was watched
    assert {row.path for row in attachment_of(toy, TENSOR_ATTACHMENT).report.rows} == {"column", "row"}  # type: ignore[union-attr]
    commfuse_dp.remove(toy)
    model = parallelized(tensor_parallel, mesh)
    with applied(model, exclude=("layers.0.*",)) as report:  # a call of one's own goes first
        alike(gradients(model, tokens), wanted)
        assert any("excluded by" in row.reason for row in report.rows)
    assert not first_call._waiting and first_call._handle is None


def _two_dimensions(rank: int, world_size: int) -> None:
    """Below `fully_shard`: from the first forward on, whose step is begun like any other."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))

    def build(styles: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double()
        plan = {"0": styles.ColwiseParallel(input_layouts=Shard(0)), "1": styles.RowwiseParallel(output_layouts=Shard(0))}
        return fully_shard(stock.parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])

    def losses(net: Any) -> list[float]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
        found = []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            loss = net(torch.randn(3, 4, dtype=torch.float64)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    net = build(tensor_parallel)
    assert losses(net) == pytest.approx(losses(build(stock)), rel=1e-12)
    engine, attachment = engine_of(net), attachment_of(net)
    assert engine is not None and engine.step == 3
    assert attachment is not None and {row.path for row in attachment.report.rows} == {"column", "row"}
    commfuse_dp.remove(net)


def test_styles_of_commfuse(workers: Any) -> None:
    workers(2).run(_styles, timeout=60)
    workers(4).run(_two_dimensions, timeout=60)
