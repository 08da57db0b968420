"""Every cell of {ZeRO-1, 2, 3} x {fp32, bf16} x {accumulation 1, 3} x {2, 3 ranks} against stock DeepSpeed.

With SGD: AdamW divides each gradient by its own size, so that what is nearly zero and of either sign by rounding becomes a full
step either way (one reason why AdamW has tests of its own, in test_options.py, with an eps above the rounding).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parity.deepspeed.pair import Case, Result, both, check, settings
from tests.support.cells import slow


def cell(rank: int, world_size: int, stage: int, dtype: str, accumulation: int) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(stage, dtype=dtype, accumulation=accumulation), steps=10))


QUICK = {(2, 1, "fp32", 3), (2, 2, "bf16", 3), (3, 3, "fp32", 1)}


def cells() -> Iterator[Any]:
    """All 24; make test runs three, in which every value occurs."""
    for cell in itertools.product((2, 3), (1, 2, 3), ("fp32", "bf16"), (1, 3)):
        yield cell if cell in QUICK else slow(*cell)


@pytest.mark.parametrize(("world_size", "stage", "dtype", "accumulation"), list(cells()))
def test_ten_steps(workers, world_size, stage, dtype, accumulation):
    results = workers(world_size).run(cell, stage, dtype, accumulation, timeout=120)
    for stock, ours in results:
        check(stock, ours, dtype=dtype)
        assert len(stock.losses) == 10 * accumulation and len(stock.norms) == 10
        assert stock.norms == results[0][0].norms and ours.norms == results[0][1].norms
        linears = {f"blocks.{i}.{which}.weight" for i in range(3) for which in ("up", "down")} | {"head.weight"}
        assert {name for name, path in ours.paths.items() if path == "fused"} == linears
        assert ours.paths["embedding.weight"] == ("gathered" if stage == 3 else "hooks")
        assert ours.paths["blocks.0.up.bias"] == "hooks"
