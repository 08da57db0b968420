"""Linears that are no nn.Linear: Conv1D of Hugging Face, whose partitions cut the weight [in, out] anywhere, and subclasses."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from torch import nn

from tests.parity.deepspeed.pair import HIDDEN, WIDTH, Block, Case, Net, Result, both, check, settings

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


class Own(nn.Linear):
    """As Falcon's: adds the bias after the product, which under autocast is not what torch's linear does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs @ self.weight.T
        return out if self.bias is None else out + self.bias


class Scaled(nn.Linear):
    """No linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(input)


class Linears(Net):
    """Sizes that 2 ranks cut in the middle of rows."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        for block in self.blocks:
            assert isinstance(block, Block)
            block.up = Conv1D(HIDDEN, WIDTH)  # [12, 37]
            block.down = Own(HIDDEN, WIDTH)
        self.blocks[1].down = Conv1D(WIDTH, HIDDEN)  # [37, 12]
        self.blocks[2].down = Scaled(HIDDEN, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            return super().forward(tokens)

    autocast = False


class Autocast(Linears):
    autocast = True


def linears(rank: int, world_size: int, stage: int, dtype: str) -> tuple[Result, Result]:
    make = Autocast if dtype == "autocast" else Linears
    return both(rank, world_size, Case(settings(stage, dtype="bf16" if dtype == "bf16" else "fp32", accumulation=2), make=make))


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"),
    [
        pytest.param(2, 3, "fp32", marks=pytest.mark.slow),
        (2, 3, "autocast"),
        (2, 1, "fp32"),
        pytest.param(3, 3, "fp32", marks=pytest.mark.slow),
        pytest.param(2, 3, "bf16", marks=pytest.mark.slow),
        pytest.param(2, 2, "autocast", marks=pytest.mark.slow),
    ],
)
def test_linears_of_other_classes(workers, world_size, stage, dtype):
    for stock, ours in workers(world_size).run(linears, stage, dtype, timeout=120):
        check(stock, ours, dtype="fp32" if dtype == "fp32" else "bf16")
        for name in ("blocks.0.up", "blocks.0.down", "blocks.1.down"):
            assert ours.paths[f"{name}.weight"] == "fused", ours.reasons
        assert "computes a linear" in ours.reasons["blocks.0.up.weight"] + ours.reasons["blocks.0.down.weight"]
        assert ours.paths["blocks.2.down.weight"] == "hooks"
