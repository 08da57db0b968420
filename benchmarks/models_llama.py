"""Llama 3 for the benchmark: the published shape with random weights, made on the meta device and filled shard by shard.

Nothing is downloaded. `llama3-tiny` is the same code in small, for tests. As in serving, the projections to queries, keys and
values are one linear, and those to gate and up another; that changes no figure but the number of GEMMs.

[Note: The same weights in every variant]
Each rank fills its own rows from a generator seeded by (seed, parameter, rank), so no rank ever holds the whole model. Every
variant shards by FSDP2's rule (chunks of ceil(rows / N)), hence all have the same weights, whatever they gather at once. They
depend on the number of ranks.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

_STD = 0.02


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    kv_heads: int  # of keys and values: each serves heads / kv_heads heads of queries
    hidden: int
    vocabulary: int
    theta: float = 500_000.0  # base of the rotary angles
    eps: float = 1e-5
    sequence: int = 8192  # tokens of a sequence, if nothing is said

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SHAPES = {
    "llama3-8b": Shape(width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128_256),
    "llama3-tiny": Shape(width=64, layers=3, heads=4, kv_heads=2, hidden=176, vocabulary=320, sequence=32),
}


@lru_cache(maxsize=8)
def rotary_table(length: int, width: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), float32, [length, width / 2]: angle position * theta^(-2i / width). No buffers: FSDP2 would cast them."""
    frequencies = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., length, width], its halves rotated against each other in float32; dtype as x."""
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal, with grouped queries: [batch, length, width] -> same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, shape.head_width).transpose(1, 2)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        cos, sin = rotary_table(length, shape.head_width, shape.theta, x.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer. `recompute`: its activations are computed anew in backward, inside the module, so that FSDP2's hooks stand
    around both and gather once."""

    def __init__(self, shape: Shape, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Next-token logits, int64 [batch, length] -> [batch, length, vocabulary]. Embedding and head are not tied."""

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape, recompute=recompute) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def meta_model(name: str, *, recompute: bool) -> Llama:
    """Shapes without memory."""
    with torch.device("meta"):
        return Llama(SHAPES[name], recompute=recompute)


def next_token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats, computed in float32."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def materialize(model: nn.Module, *, seed: int, device: str, rank: int, world_size: int) -> None:
    """Give a model on the meta device memory and weights: this rank's rows of what is sharded, all rows of what is not."""
    model.to_empty(device=device)
    layers = sum(isinstance(module, Block) for module in model.modules())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            pieces = [(rank, parameter.to_local())]
        else:
            pieces = list(enumerate(parameter.detach().chunk(world_size)))
        # GPT-2's initialisation; the residual branches shrink with the depth.
        std = _STD / math.sqrt(2 * layers) if name.endswith(("attention.out.weight", "down.weight")) else _STD
        for owner, rows in pieces:
            if rows.dim() < 2:
                rows.fill_(1.0)
            elif rows.numel():
                generator = torch.Generator(device=rows.device)
                rows.normal_(std=std, generator=generator.manual_seed(zlib.crc32(f"{seed}/{name}/{owner}".encode())))


def flops_per_token(shape: Shape, sequence: int) -> float:
    """Of a training step, without recomputation: 6 per weight that multiplies (not the embedding), and causal attention's
    6 * layers * sequence * width (its two products over half of the positions, once forward and twice backward)."""
    attention = shape.width * (shape.heads + 2 * shape.kv_heads) * shape.head_width + shape.width**2
    layer = attention + 3 * shape.width * shape.hidden
    weights = shape.layers * layer + shape.width * shape.vocabulary
    return 6.0 * (weights + shape.layers * sequence * shape.width)
