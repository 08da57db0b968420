"""DDP and FSDP1 on GPUs keep their own collective: nothing is registered, and the report says why.

No GPU is needed: the device is pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from commfuse_dp.integrations import ddp, fsdp1_compat, register_ddp, register_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import ConfigError

CUDA = torch.device("cuda", 0)


def stock_on_a_gpu(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    before = ddp._device
    ddp._device = lambda *_: CUDA
    try:
        return register_both(rank)
    finally:
        ddp._device = before


def register_both(rank: int) -> list[tuple[Any, ...]]:
    net = DistributedDataParallel(nn.Linear(4, 4))
    sharded = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    sharded.compute_device = CUDA
    found: list[tuple[Any, ...]] = []
    for register, model in ((register_ddp, net), (register_fsdp1, sharded)):
        for setting in ({"transport": "p2p"}, {"order": "ring"}):
            with pytest.raises(ConfigError, match=rf"{next(iter(setting))}=.*keeps its own collective on cuda.*'auto'"):
                register(model, CommFuseConfig(**setting))
        report = register(model, CommFuseConfig())
        found.append((report.transport, {(row.path, row.reason) for row in report.rows}))
    found.append((net._comm_hooks, fsdp1_compat.registered_hook(sharded)))
    net(torch.ones(2, 4) * rank).sum().backward()  # DDP's own collective, on the CPU that there is
    assert net.module.weight.grad is not None
    found.append((float(net.module.weight.grad.sum()),))
    return found


def test_the_frameworks_own_collective_stays(workers: Any) -> None:
    for found in workers(2).run(stock_on_a_gpu, timeout=90):
        for (transport, rows), name in zip(found[:2], ("DDP", "FSDP1"), strict=True):
            ((path, reason),) = rows
            assert transport == "none" and path == "stock" and reason.startswith(f"{name} keeps its own collective on cuda")
        assert found[2:] == [([], None), (16.0,)]
