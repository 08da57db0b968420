"""Memory is announced before it is taken, stands in every report, and is what is held."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from commfuse_dp.integrations import register_ddp, register_fsdp1
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.fsdp2.apply import engine_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import commfuse_dp
from tests.parity.ddp import nets
from tests.parity.fsdp2 import pair
from tests.parity.tensor_parallel.block import parallelize
from tests.parity.tensor_parallel.block import whole as llama
from tests.support.memory import held_for_messages, resident, said_and_taken
from tests.support.serving import config

MIB = 1 << 20
SETTINGS = {"inbox_bytes": 80_000, "prefetch_bytes": 4096}


def fsdp2(settings: Any) -> tuple[Any, Any]:
    model = pair.build(reshard_after_forward=True)
    return commfuse_dp.apply(model, settings), model


def tensor_parallel(settings: Any) -> tuple[Any, Any]:
    model = parallelize(llama(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    return commfuse_dp.apply(model, settings), model


def ddp(settings: Any) -> tuple[Any, Any]:
    model = nets.wrap(nets.build())
    return register_ddp(model, settings), model


def fsdp1(settings: Any) -> tuple[Any, Any]:
    model = FullyShardedDataParallel(nets.build(), device_id=torch.device("cpu"))
    return register_fsdp1(model, settings), model


ATTACH: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
    "ddp": ddp,
    "fsdp1": fsdp1,
}


def announced(rank: int, world_size: int, kind: str, transport: str) -> None:
    with said_and_taken() as events:
        report, model = ATTACH[kind](config(transport=transport, **SETTINGS))
    record, memory = events  # said, then taken
    assert isinstance(record, logging.LogRecord) and not isinstance(memory, logging.LogRecord), events
    assert report.memory is not None and str(report.memory) in record.getMessage()
    assert f"\n  memory: {report.memory}" in str(report)
    assert held_for_messages(memory) == report.memory.share.nbytes > 0
    if kind == "fsdp2":
        _steps(model, report, rank, world_size)
    else:
        assert (report.memory.window, report.memory.published) == (0, 0)
    if attachment_of(model) is not None or kind == "tensor_parallel":
        commfuse_dp.remove(model)


def _steps(model: nn.Module, report: Any, rank: int, world_size: int) -> None:
    engine = engine_of(model)
    for step in range(3):
        pair.loss_of(model, pair.batch(rank, world_size, step)).backward()
    served = sum(row.numel for row in report.rows if row.path in ("fused", "gathered")) * 4
    published = sum(row[rank] for row in engine.transport.sizes)
    padding = 64 * len(engine.units) + 4 * pair.HIDDEN * 2 * len(engine.units)  # alignment; shards are unequal by a row
    assert abs(published - report.memory.published) <= padding < served, (published, report.memory.published)
    fetched = engine.probe.counters.window_bytes_peak
    assert report.memory.window == (0 if engine.transport.in_place else SETTINGS["prefetch_bytes"])
    assert fetched <= report.memory.window and (fetched > 0) is not engine.transport.in_place


@pytest.mark.parametrize(
    ("kind", "transport"), [*((kind, "shm") for kind in ATTACH), *((kind, "tcp") for kind in ("fsdp2", "ddp"))]
)
def test_said_then_taken_and_reported(workers, kind, transport):
    workers(2).run(announced, kind, transport)


def real_memory(rank: int, world_size: int) -> tuple[int, int]:
    """(bytes that the process has more of, bytes that the report names) after whole steps of 20 layer sizes over tcp."""
    torch.manual_seed(0)
    widths = [512 + 32 * index for index in range(21)]
    model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(8, widths[0])
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.to_local().fill_(0.0)  # its pages come now
    nn.Linear(512, 1152)(torch.randn(8, 512)).sum().backward()  # what torch itself keeps from its first step on
    before = resident()
    report = commfuse_dp.apply(model, config(transport="tcp", inbox_bytes=16 * MIB, prefetch_bytes=8 * MIB))
    engine = engine_of(model)
    for _ in range(3):
        model(x).sum().backward()
        held, peak = engine.parameters.memory.held, engine.probe.counters.window_bytes_peak
        assert peak <= held <= report.memory.window, (peak, held)
        assert sum(segment.numel() for segment in engine.transport.segments) == report.memory.published
    assert peak > report.memory.window // 2
    grown = resident() - before
    commfuse_dp.remove(model)
    return grown, report.memory.nbytes


def test_what_is_reported_is_what_the_process_holds(workers):
    for grown, said in workers(2).run(real_memory):
        assert 0.75 * said <= grown <= said + 8 * MIB, (grown, said)  # beside it: the products of one layer
