"""Gradients that are no numbers: the same steps are skipped as in stock DeepSpeed, and the loss scale is the same then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.parity.deepspeed.pair import Case, Result, batch, loss_of, run, settings
from tests.support.cells import slow

HALF = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
BROKEN = (1, 3)  # the microbatch of one rank whose loss is NaN


def broken(engine: Any, rank: int, number: int) -> torch.Tensor:
    loss = loss_of(engine, batch(rank, number))
    if (rank, number) == BROKEN:
        loss = loss * math.nan
    engine.backward(loss)
    engine.step()
    return loss


CASES = {
    "too large a scale, fp16": lambda stage: Case(settings(stage, **HALF), steps=12),
    "one rank, fp16": lambda stage: Case(settings(stage, accumulation=2, **HALF), steps=12, train=broken),
    "one rank, bf16": lambda stage: Case(settings(stage, dtype="bf16"), train=broken),
    "one rank, fp32": lambda stage: Case(settings(stage, gradient_clipping=0.1), train=broken),
}
MOVED = {"fp16": 5e-3, "bf16": 4e-2, "fp32": 5e-5}  # of what a parameter moves at most: its rounding, as in pair.RELATIVE


def trained(rank: int, world_size: int, name: str, stage: int) -> list[tuple[Result, dict[str, Any]]]:
    found = []
    for fused in (False, True):
        case, seen = CASES[name](stage), dict[str, Any]()
        case.after = lambda engine, seen=seen: seen.update(
            skipped=engine.skipped_steps, scale=float(engine.optimizer.loss_scale), steps=engine.global_steps
        )
        found.append((run(rank, world_size, case, fused=fused), seen))
    return found


QUICK = {("too large a scale, fp16", 2), ("one rank, bf16", 3)}


@pytest.mark.parametrize(("name", "stage"), [(n, s) if (n, s) in QUICK else slow(n, s) for n in CASES for s in (1, 2, 3)])
def test_steps_are_skipped_as_in_stock(workers, name, stage):
    dtype = next(known for known in MOVED if known in name)
    if dtype == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this CPU")
    for (stock, seen), (ours, mine) in workers(2).run(trained, name, stage, timeout=90):
        assert mine == seen and seen["skipped"] > 0
        for theirs, found in ((stock.losses, ours.losses), (stock.norms, ours.norms)):
            assert [math.isnan(x) for x in found] == [math.isnan(x) for x in theirs]
        for parameter, after in stock.after.items():
            moved = (after - stock.before[parameter]).abs().max()
            assert moved.isfinite() and (ours.after[parameter] - after).abs().max() <= MOVED[dtype] * moved, parameter
        assert ours.paths["blocks.0.up.weight"] == "fused"
