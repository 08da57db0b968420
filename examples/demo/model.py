"""The demo's model: a plain pre-norm GPT over bytes, with what real models have (attention, embeddings, norms, biases)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from commfuse_dp.examples.demo.settings import DemoSettings
from torch import nn

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention, (batch, context, width) -> same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ByteGPT(nn.Module):
    """Next-byte logits, int64 (batch, context) -> float (batch, context, 256)."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2's initialisation; the residual branches shrink with the depth
                residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if residual else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(settings: DemoSettings) -> ByteGPT:
    """The model of a run, on the CPU; the same weights for the same seed."""
    torch.manual_seed(settings.seed)
    return ByteGPT(width=settings.width, layers=settings.layers, heads=settings.heads, context=settings.context)


def next_byte_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
