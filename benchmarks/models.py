"""The models that are timed, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from commfuse_dp.examples.demo.model import VOCABULARY, ByteGPT, next_byte_loss
from torch import nn

from benchmarks import models_llama
from benchmarks.case import BenchmarkError, Case

MODELS = ("linears", "gpt", *models_llama.SHAPES)

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
    fill: Callable[[int, int], None] | None = None
    """(rank, world_size): gives a model on the meta device its weights, after it was sharded. None: it has them."""


def build(case: Case) -> Task:
    """The same weights for the same seed, whatever was built before. Raises BenchmarkError for an unknown name."""
    if case.model in models_llama.SHAPES:
        llama = models_llama.meta_model(case.model, recompute=case.checkpoint_activations)

        def fill(rank: int, world_size: int) -> None:
            models_llama.materialize(llama, seed=case.seed, device=case.device, rank=rank, world_size=world_size)

        return Task(llama, list(llama.layers), lambda m, batch: models_llama.next_token_loss(m, *batch), fill)
    torch.manual_seed(case.seed)
    if case.model == "linears":
        model = Linears().to(case.device)
        return Task(model, list(model.layers), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]))
    if case.model == "gpt":
        gpt = ByteGPT(width=512, layers=8, heads=8, context=CONTEXT).to(case.device)
        return Task(gpt, list(gpt.blocks), lambda m, batch: next_byte_loss(m, batch[0], batch[1]))
    raise BenchmarkError(f"model {case.model!r}: {', '.join(MODELS)} are known.")


def batches(case: Case, rank: int, *, count: int = 4) -> list[Batch]:
    """`count` batches of `case.tokens` tokens for one rank; every rank has its own, every variant the same."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank + 1)
    if case.model == "linears":
        make = partial(_vectors, case.tokens, generator)
    elif case.model in models_llama.SHAPES:
        make = partial(_text, models_llama.SHAPES[case.model].vocabulary, case.batch, case.sequence, generator)
    else:
        length = min(case.tokens, CONTEXT)
        make = partial(_text, VOCABULARY, max(1, case.tokens // length), length, generator)
    return [(x.to(case.device), y.to(case.device)) for x, y in (make() for _ in range(count))]


def _vectors(tokens: int, generator: torch.Generator) -> Batch:
    x = torch.randn(tokens, WIDTH, generator=generator)
    return x, torch.randn(tokens, WIDTH, generator=generator)


def _text(vocabulary: int, sequences: int, length: int, generator: torch.Generator) -> Batch:
    text = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
