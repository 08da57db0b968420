"""Weights that are read outside their layers' calls: trained as in stock DeepSpeed, every gradient counted once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.deepspeed.pair import TOKENS, WIDTH, Block, Case, Net, Result, batch, both, check, loss_of, settings


class Sees(Block):
    """Asks a layer for the dtype of its weight, as T5 and LoRA do, and applies the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x).to(self.up.weight.dtype))
        x = x + self.down(F.gelu(hidden))
        return F.linear(x, self.aside.weight, self.aside.bias)


class Reads(Net):
    """The head is the embedding's weight, applied by hand; weights of two layers are punished. Recomputes a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Sees(), Sees(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.punish = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        y = F.linear(self.head(x * self.scale), self.embedding.weight)[..., : TOKENS - 2]
        if self.punish:
            y = y * (1 + self.blocks[2].up.weight.square().mean() + self.head.weight.abs().mean())
        return y


def two_forwards(engine: Any, rank: int, number: int) -> torch.Tensor:
    """Two forwards, one backward, and an evaluation between."""
    loss = loss_of(engine, batch(rank, number))
    with torch.no_grad():
        loss_of(engine, batch(rank, number + 900))
    loss = loss + loss_of(engine, batch(rank, number + 500))
    engine.backward(loss)
    engine.step()
    return loss


def sometimes(engine: Any, step: int) -> None:
    engine.module.punish = step != 1


CASES: dict[str, tuple[tuple[int, ...], Any]] = {
    "accumulated": ((1, 2, 3), lambda s: Case(settings(s, accumulation=2), make=Reads)),
    "two forwards": ((2, 3), lambda s: Case(settings(s), make=Reads, train=two_forwards)),
    "bf16": ((1, 3), lambda s: Case(settings(s, dtype="bf16"), make=Reads)),
    # reads that come and go are more than stock ZeRO-3 can bear
    "sometimes": ((2,), lambda s: Case(settings(s), make=Reads, before=sometimes)),
}


def reading(rank: int, world_size: int, name: str, stage: int) -> tuple[Result, Result, list[str]]:
    heard: list[str] = []

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Hear()
    log = logging.getLogger("commfuse_dp")
    log.addHandler(handler)
    try:
        return *both(rank, world_size, CASES[name][1](stage)), heard
    finally:
        log.removeHandler(handler)


QUICK = {("accumulated", 1), ("two forwards", 3)}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if (name, stage) in QUICK else pytest.mark.slow)
        for name, (stages, _) in CASES.items()
        for stage in stages
    ],
)
def test_read_by_other_code(workers, name, stage):
    for stock, ours, heard in workers(2).run(reading, name, stage, timeout=120):
        check(stock, ours, dtype="bf16" if name == "bf16" else "fp32")
        for layer in ("blocks.0.up", "blocks.0.aside", "blocks.2.up", "head"):
            assert ours.paths[f"{layer}.weight"] == "fused"
        for layer in ("blocks.0.up", "blocks.0.aside", "blocks.1.aside", "blocks.2.up", "head", "embedding"):
            told = [text for text in heard if f"layer {layer!r} is read by other code" in text]
            assert len(told) == (stage == 3), (layer, heard)
