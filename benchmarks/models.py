"""The models that are timed, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.case import BenchmarkError
from commfuse_dp.cli.demo_model import VOCABULARY, ByteGPT, next_byte_loss

MODELS = ("linears", "gpt")

Batch = tuple[torch.Tensor, torch.Tensor]

WIDTH, HIDDEN, PAIRS = 768, 3072, 6
CONTEXT = 256  # bytes of text in one of gpt's sequences


class Pair(nn.Module):
    """x + down(gelu(up(x))): [tokens, 768] -> [tokens, 768]. The residual keeps values in range however deep the stack is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Linears(nn.Module):
    """Six pairs, 28.3 M parameters, nothing but linears: what can be fused, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(PAIRS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Task:
    """A model, the modules that are sharded one by one (in order of use), and its loss on one batch."""

    model: nn.Module
    layers: list[nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def build(name: str, *, seed: int, device: str) -> Task:
    """The same weights for the same seed, whatever was built before. Raises BenchmarkError for an unknown name."""
    torch.manual_seed(seed)
    if name == "linears":
        model = Linears().to(device)
        return Task(model, list(model.layers), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]))
    if name == "gpt":
        gpt = ByteGPT(width=512, layers=8, heads=8, context=CONTEXT).to(device)
        return Task(gpt, list(gpt.blocks), lambda m, batch: next_byte_loss(m, batch[0], batch[1]))
    raise BenchmarkError(f"model {name!r}: {', '.join(MODELS)} are known.")


def batches(name: str, *, tokens: int, rank: int, seed: int, device: str, count: int = 4) -> list[Batch]:
    """`count` batches of `tokens` tokens for one rank; every rank has its own, every variant the same."""
    generator = torch.Generator().manual_seed(1000 * seed + rank + 1)
    made = []
    for _ in range(count):
        if name == "linears":
            x = torch.randn(tokens, WIDTH, generator=generator)
            y = torch.randn(tokens, WIDTH, generator=generator)
        else:
            length = min(tokens, CONTEXT)
            text = torch.randint(0, VOCABULARY, (max(1, tokens // length), length + 1), generator=generator)
            x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        made.append((x.to(device), y.to(device)))
    return made
