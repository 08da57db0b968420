"""What two ranks of `test_stock.py` do: every scenario, and what was seen in it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from commfuse_dp.observe import ModuleSpans, SpanRecorder, StepMeter, StockMeter, UnshardedPeak
from commfuse_dp.observe.clock import clock_offsets
from commfuse_dp.probe import now_ns

WIDTH, BLOCKS, DELAY_S = 64, 3, 0.3
SHIFT_NS = 5_000_000_000


class Delay(nn.Module):
    """Sleeps in one rank's forward, as a slow rank would."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Delay()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module) -> None:
    model(torch.ones(4, WIDTH)).sum().backward()
    model.zero_grad()


def stock(model: Model, rank: int) -> dict[str, Any]:
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
    before = {name: getattr(dist, name, None) for name in names}
    wait = dist.Work.wait
    meter = StockMeter()
    steps = StepMeter(meter.probe)
    train(model)  # the first step sets up FSDP2
    with meter:
        dist.barrier()
        with steps.step():
            train(model)
        slow = model.blocks[1][1]
        slow.seconds = DELAY_S if rank == 1 else 0.0
        dist.barrier()
        with steps.step():
            train(model)
        slow.seconds = 0.0
    try:
        with meter:
            raise KeyError
    except KeyError:
        pass
    restored = dist.Work.wait is wait and all(getattr(dist, name, None) is original for name, original in before.items())
    first, second = steps.readings
    return {
        "restored": restored,
        "collectives": meter.collectives,
        "received": [first.counters.param_bytes_received, first.counters.grad_bytes_received],
        "sent": [first.counters.param_bytes_sent, first.counters.grad_bytes_sent],
        "layers": sorted(first.exposed_by_layer),
        "exposed_fast": first.exposed_ms,
        "exposed_slow": second.exposed_ms,
        "slow_by_layer": {name: ns / 1e6 for name, ns in second.exposed_by_layer.items()},
    }


def asynchronous(model: Model, rank: int) -> dict[str, Any]:
    """A pending Work: only the time blocked in wait() is exposed; the transfer lasts from the call to the end of that."""
    meter = StockMeter()
    recorder = SpanRecorder(meter.probe)
    out, mine = torch.empty(2 * WIDTH), torch.ones(WIDTH)
    dist.barrier()
    with meter, recorder:
        work = dist.all_gather_into_tensor(out, mine, async_op=True)
        time.sleep(0.1)
        before = meter.probe.counters.exposed_ns
        time.sleep(DELAY_S if rank == 1 else 0.0)
        work.wait()
    return {
        "calls": meter.collectives,
        "exposed_before_wait_ms": before / 1e6,
        "flight_ms": [(s.end_ns - s.start_ns) / 1e6 for s in recorder.spans if s.lane == "receive"],
        "value": float(out.sum()),
    }


def spans_and_peak(model: Model, rank: int) -> dict[str, Any]:
    meter = StockMeter()
    recorder = SpanRecorder(meter.probe)
    blocks = [(f"block {i}", block) for i, block in enumerate(model.blocks)]
    with meter, recorder, ModuleSpans(meter.probe, blocks), recorder.step(1):
        train(model)
    compute = [s.name for s in recorder.spans if s.lane == "compute"]
    with UnshardedPeak(model, window=lambda: 1000) as peak:
        train(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    gathered = recorder.gather()
    ends = None if gathered is None else [r.steps()[1] for r in gathered]
    return {"compute": compute, "peak": peak.nbytes, "hooks": hooks, "steps": ends, "gathered": gathered is not None}


def clocks(model: Model, rank: int) -> dict[str, Any]:
    shift = SHIFT_NS * rank
    same = clock_offsets()
    apart = clock_offsets(clock=lambda: now_ns() + shift, domain=f"host {rank}")
    return {"same": same, "apart": apart}


def scenarios(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    plain_hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    found: dict[str, Any] = {"plain_hooks": plain_hooks}
    for scenario in (stock, asynchronous, spans_and_peak, clocks):
        found[scenario.__name__] = scenario(model, rank)
    return found
