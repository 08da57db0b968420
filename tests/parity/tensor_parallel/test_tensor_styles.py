"""The styles of CommFuse in a plan, without a call of apply()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from commfuse_dp.integrations import tensor_parallel
from commfuse_dp.integrations.tensor_parallel import autohook
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as stock

import commfuse_dp
from commfuse_dp.errors import ConfigError
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
    model = parallelized(tensor_parallel, mesh)
    with applied(model, exclude=("layers.0.*",)) as report:  # a call of one's own goes first
        alike(gradients(model, tokens), wanted)
        assert any("excluded by" in row.reason for row in report.rows)
    assert not autohook._waiting and autohook._handle is None


def _refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"0": tensor_parallel.ColwiseParallel(input_layouts=Shard(0))}
    net = fully_shard(stock.parallelize_module(net, mesh["tp"], plan), mesh=mesh["dp"])
    with pytest.raises(ConfigError, match="after the last fully_shard"):
        net(torch.zeros(2, 4))


def test_styles_of_commfuse(workers: Any) -> None:
    workers(2).run(_styles, timeout=60)
    workers(2).run(_refused, timeout=60)
