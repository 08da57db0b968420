"""The private names of DistributedDataParallel that its hook uses, checked in one place. Tried with torch 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commfuse_dp.errors import ConfigError


def registered_hook(model: DistributedDataParallel) -> tuple[Any, Any]:
    """(hook, its state), of which DDP allows one; (None, None) without one."""
    hooks = getattr(model, "_comm_hooks", ())
    return hooks[0] if hooks else (None, None)


def divides_by_active_ranks(model: DistributedDataParallel) -> bool:
    """Whether gradients are to be divided by the number of ranks that still have batches: it was entered with
    `model.join(divide_by_initial_world_size=False)`. DDP does not tell hooks. Raises ConfigError where it cannot be known."""
    settings = getattr(model, "_join_config", None)
    if settings is None or not hasattr(settings, "enable"):
        raise ConfigError(
            f"torch {torch.__version__}: DistributedDataParallel has no _join_config, so its hook cannot know what gradients "
            "are to be divided by; leave CommFuse's hook away"
        )
    return bool(settings.enable) and not getattr(model, "_divide_by_initial_world_size", True)
