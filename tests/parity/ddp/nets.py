"""A small model and its training, as stock DDP and over CommFuse's hook, from the same seed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commfuse_dp import CommFuseConfig

WIDTH, CLASSES, STEPS = 24, 11, 6
BUCKET_MB = 0.008  # several buckets


class Net(nn.Module):
    """Odd sizes, a norm, and a branch that only some batches use (`branch=True`)."""

    def __init__(self, blocks: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37), nn.GELU(), nn.Linear(37, WIDTH)) for _ in range(blocks)
        )
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.branch(x) if branch else x)


def config(**settings: Any) -> CommFuseConfig:
    return CommFuseConfig(**{"deadline_s": 20.0, "inbox_bytes": 1 << 16, **settings})


def build(seed: int = 3, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype=dtype)


def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, **{"bucket_cap_mb": BUCKET_MB, **options})


def batch(step: int, dtype: torch.dtype, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    x = torch.randn(5, WIDTH, generator=generator).to(dtype)
    return x, torch.randint(0, CLASSES, (5,), generator=generator)


def train(
    model: nn.Module,
    *,
    accumulation: int = 1,
    clip: Any = nn.utils.clip_grad_norm_,
    steps: int = STEPS,
    start: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    **forward: Any,
) -> tuple[list[float], list[float]]:
    """SGD with momentum, gradients clipped. Returns losses and gradient norms (before clipping)."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dtype = next(model.parameters()).dtype
    losses, norms = [], []
    for step in range(start, start + steps):
        for part in range(accumulation):
            quiet = model.no_sync() if part < accumulation - 1 else nullcontext()  # type: ignore[operator]
            with quiet:
                x, wanted = batch(step, dtype, part)
                loss = F.cross_entropy(model(x, **forward).float(), wanted) / accumulation
                loss.backward()
            losses.append(loss.item())
        norms.append(float(clip(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def worst(found: list[float], wanted: list[float]) -> float:
    """Largest relative difference."""
    assert len(found) == len(wanted) and wanted
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, wanted, strict=True))


def worst_tensor(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the largest element of each tensor."""
    assert found.keys() == wanted.keys() and wanted
    return max(
        ((found[name].double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-6)).item()
        for name, other in wanted.items()
        if other.numel()
    )
