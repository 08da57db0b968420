"""Models whose forwards read the parameters of their layers, in the ways that libraries do it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN = 24, 37


class ByFunction(torch.autograd.Function):
    """As Mamba's fused paths: a Function of its own gets the weight of a layer that is never called."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Block(nn.Module):
    """norm, up, down; `pattern` says who reads what of them. An adapter of rank 3 beside `up`, in fp32."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.low_a = nn.Linear(WIDTH, 3, bias=False)
        self.low_b = nn.Linear(3, HIDDEN, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """As transformers' `PreTrainedModel.dtype`."""
        return next(param.dtype for param in self.parameters() if param.is_floating_point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + PATTERNS[self.pattern](self, self.norm(x))

    def adapted(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + self.low_b(self.low_a(x))


def _lora(block: Block, x: torch.Tensor) -> torch.Tensor:
    """PEFT: the adapter's input in the adapter's dtype."""
    low = block.low_b(block.low_a(x.double().to(block.low_a.weight.dtype)))
    return block.down(F.gelu(block.up(x) + low))


def _dora(block: Block, x: torch.Tensor) -> torch.Tensor:
    """PEFT: the norm of what base layer and adapter are together; both called, the adapter's weights multiplied by hand."""
    eye = torch.eye(WIDTH, device=x.device, dtype=x.dtype)
    low = block.low_b(block.low_a(eye)).T
    weight = block.up.weight
    norm = torch.linalg.norm(weight.to(x.dtype) + low.detach(), dim=1).detach()
    return block.down(F.gelu(block.up(x) / (norm + 1) + F.linear(x, low / norm[:, None])))


def _t5(block: Block, x: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(block.adapted(x)).double()
    if isinstance(block.down.weight, torch.Tensor) and hidden.dtype != block.down.weight.dtype != torch.int8:
        hidden = hidden.to(block.down.weight.dtype)
    return block.down(hidden)


def _beit(block: Block, x: torch.Tensor) -> torch.Tensor:
    """timm: the layer is a holder of its weight, never called."""
    bias = torch.cat((block.up.bias[:5], torch.zeros_like(block.up.bias[5:], requires_grad=False)))
    return block.down(F.gelu(F.linear(input=x, weight=block.up.weight, bias=bias) + block.low_b(block.low_a(x))))


def _mamba(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(F.silu(ByFunction.apply(x, block.up.weight) + block.up.bias + block.low_b(block.low_a(x))))


def _penalty(block: Block, x: torch.Tensor) -> torch.Tensor:
    values = sum(param.square().mean() for param in block.parameters())
    return block.down(F.gelu(block.adapted(x))) + 1e-1 * values.to(x.dtype)


def _norm_by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    scaled = F.layer_norm(x, (WIDTH,)) * block.norm.weight + block.norm.bias
    return block.down(F.gelu(block.adapted(scaled)))


def _own_dtype(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.down(F.gelu(block.adapted(x.double().to(block.dtype))))


def _dictionaries(block: Block, x: torch.Tensor) -> torch.Tensor:
    """All ways to the same tensors."""
    named = dict(block.named_parameters())
    ways = [block.down.weight, block.down._parameters["weight"], getattr(block.down, "weight"), named["down.weight"]]  # noqa: B009
    assert all(way is ways[0] for way in ways) and isinstance(ways[0], nn.Parameter)
    assert next(iter(block.down.parameters())) is ways[0] and block.get_parameter("down.weight") is ways[0]
    assert block.down.bias is None and not hasattr(block.down, "scale") and ways[0].shape == (WIDTH, HIDDEN)
    return F.linear(F.gelu(block.adapted(x)), ways[0]) + block.down(F.gelu(block.adapted(x)))


def _functional_call(block: Block, x: torch.Tensor) -> torch.Tensor:
    """A layer called with other weights, made of its own."""
    hidden = F.gelu(block.adapted(x))
    return torch.func.functional_call(block.down, {"weight": block.down.weight * 2}, hidden) + block.down(hidden)


def _autocast(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype is torch.float32):
        hidden = F.linear(x, block.up.weight, block.up.bias)
    return block.down(F.gelu(hidden.to(x.dtype) + block.low_b(block.low_a(x))))


def _without_gradient(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = block.up.weight.abs().max() + block.up.weight.data.std()
    return block.down(F.gelu(block.adapted(x) / scale)) * block.down.weight.detach().norm()


def _half(block: Block, x: torch.Tensor) -> torch.Tensor:
    """A submodule may have a dtype of its own: its input is cast to it."""
    return block.down(F.gelu(block.up(x.to(block.up.weight.dtype)).to(x.dtype) + block.low_b(block.low_a(x))))


PATTERNS: dict[str, Callable[[Block, torch.Tensor], torch.Tensor]] = {
    "lora": _lora,
    "dora": _dora,
    "t5": _t5,
    "beit": _beit,
    "mamba": _mamba,
    "penalty": _penalty,
    "norm by hand": _norm_by_hand,
    "own dtype": _own_dtype,
    "dictionaries": _dictionaries,
    "functional_call": _functional_call,
    "without gradient": _without_gradient,
    "autocast": _autocast,
    "half": _half,
}


class Readers(nn.Module):
    """x [batch, WIDTH] -> [batch, WIDTH]: a block for every pattern, then the root's own: a functional tie, a linear that is
    not called, a norm used by hand."""

    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Block(pattern) for pattern in patterns or PATTERNS])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # stays with FSDP2: its group is not empty
        self.call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table(torch.arange(len(x)) % 11)
        for layer in self.layers:
            x = self.call(layer, x)
        x = x / (x.square().mean(-1, keepdim=True) + 1) * self.norm.weight * self.scale
        scores = F.linear(x.to(self.table.weight.dtype), self.table.weight)
        return scores.softmax(-1) @ self.table.weight + x @ self.head.weight.T + self.head.bias
