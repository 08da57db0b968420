"""Small models with every kind of layer that the integration treats differently, and the ways to shard them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY = 11


class Block(nn.Module):
    """Norm, linear with bias, gelu, linear without bias, residual. The hidden width is odd: shards are uneven."""

    def __init__(self, width: int, hidden: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ByteModel(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, VOCABULARY]. `order`: blocks to run, in this order."""

    def __init__(self, width: int = 24, hidden: int = 37, blocks: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Block(width, hidden, nn.RMSNorm if i == 1 else nn.LayerNorm) for i in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.order: list[int] = list(range(blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index in self.order:
            x = self.layers[index](x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Linears of the given widths with a nonlinearity between them; `widths` [in, ..., out]."""

    def __init__(self, *widths: int, bias: bool = True, activation: Any = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths)])
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def shard_layers(model: nn.Module, **options: Any) -> None:
    """`fully_shard` on every entry of `model.layers`, then on the model: the usual way."""
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)


def shard_root(model: nn.Module, **options: Any) -> None:
    """One parameter group for the whole model."""
    fully_shard(model, **options)


def token_batch(generator: torch.Generator, batch: int = 3, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, [batch, length] each."""
    ids = torch.randint(0, VOCABULARY, (2, batch, length), generator=generator)
    return ids[0], ids[1]


def token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss for models from floats to floats."""
    return model(x).square().mean()


def wide_bytes() -> ByteModel:
    return ByteModel().double()


def wide_stack() -> Stack:
    return Stack(6, 37, 5, 4).double()
