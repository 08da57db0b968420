"""The wait for a rank that is behind, apart from the rest of exposed communication: stock FSDP2's and CommFuse's alike."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commfuse_dp
from commfuse_dp.observe import StepMeter, StockMeter, skew_ms
from commfuse_dp.observe.skew import skew_ns
from tests.support.workers import Workers

BEHIND_S = 0.1


def test_the_formula() -> None:
    assert skew_ns([(10, 100), (40, 100), (70, 100)]) == [60, 30, 0]
    assert skew_ns([(10, 50), (70, 80)]) == [40, 0], "what ended before the last one came was not for it"
    assert skew_ns([(10, 10), (70, 80)]) == [0, 0], "a rank that did not wait"
    assert skew_ns([(5, 9)]) == [0] and skew_ns([]) == []


class _Late(torch.autograd.Function):
    """Rank 1 is late in backward, before the first layer's gradients are computed."""

    came: float = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(BEHIND_S)
        _Late.came = time.monotonic()
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_Late.apply(self.first(x)))


def _trained(rank: int, world_size: int, served: bool) -> tuple[list[tuple[int, int]], list[float], list[float] | None]:
    """(ends of two steps, when `_Late` was passed in each, skew by rank)"""
    net = Net()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    stock = StockMeter()
    report = commfuse_dp.apply(net) if served else None
    meter = StepMeter(report.probe if report is not None else stock.probe)
    came = []
    with contextlib.nullcontext() if served else stock:
        for _ in range(3):
            with meter.step():
                net(torch.ones(4, 16)).sum().backward()
            came.append(1e9 * _Late.came)
    skew = skew_ms(meter, skip=1)
    if served:
        commfuse_dp.remove(net)
    ends = [reading.end for reading in list(meter.readings)[1:]]
    assert all(end is not None and end[0] <= end[1] for end in ends)
    return [end for end in ends if end is not None], came[1:], skew


@pytest.mark.parametrize("served", [False, True])
def test_a_rank_that_is_behind(workers: Workers, served: bool) -> None:
    """Time decides nothing here: however late a rank comes on a busy machine, the order of what is read is the same."""
    (ends_0, _, skew_0), (ends_1, came_1, skew_1) = workers(2).run(_trained, served)
    assert skew_0 == skew_1 and skew_0 is not None and len(skew_0) == 2
    for mine, other, came in zip(ends_0, ends_1, came_1, strict=True):
        assert other[0] >= came, "rank 1 has computed when it was past its delay"
        assert mine[1] >= came, "rank 0 cannot have its gradients before"
    wanted = [skew_ns(step) for step in zip(ends_0, ends_1, strict=True)]
    assert skew_0 == pytest.approx([(a + b) / 2e6 for a, b in zip(*wanted, strict=True)])
