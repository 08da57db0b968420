"""A small Llama-like model and its plan of tensor and sequence parallelism, as torchtitan and pytorch/examples write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN = 24, 12, 12, 2, 24


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv"):
            setattr(self, name, nn.Linear(WIDTH, HEADS * HEAD, bias=bias))
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, HEAD).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, bias: bool, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = norm(WIDTH), norm(WIDTH)
        self.attention, self.feed_forward = Attention(bias), FeedForward(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, bias: bool = True, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(bias, norm) for _ in range(layers)])
        self.norm = norm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.run_block: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = self.run_block(block, x)
        return self.output(self.norm(x))


def whole(*, seed: int = 0, dtype: torch.dtype = torch.float64, **kw: Any) -> Llama:
    torch.manual_seed(seed)
    return Llama(**kw).to(dtype)


def parallelize(model: Llama, mesh: DeviceMesh, *, loss_parallel: bool = False, sequence: bool = True) -> Llama:
    """sequence: its parallelism, too."""
    if not sequence:
        return _replicated(model, mesh)
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def _replicated(model: Llama, mesh: DeviceMesh) -> Llama:
    """As torchtune and PyTorch's tutorial write it: between the layers every rank has all of x."""
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear):
            rows = name.endswith(("wo", "w2"))
            plan[f"layers.{name}"] = RowwiseParallel() if rows else ColwiseParallel()
    return parallelize_module(model, mesh, plan)


def batch(step: int, *, size: int = 2, length: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (size, length + 1), generator=generator)
