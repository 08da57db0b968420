"""Policies of selective activation checkpointing, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
POLICIES = ("nothing", "products", "every second product", "sums", "products and sums", "gathers", "everything")


def contexts(saves: str) -> Any:
    """For `checkpoint(..., context_fn=partial(contexts, ...))`."""
    saved: dict[str, tuple[Any, ...]] = {
        "products": PRODUCTS,
        "every second product": PRODUCTS,
        "sums": (SCATTER,),
        "products and sums": (*PRODUCTS, SCATTER),
        "gathers": (GATHER,),
    }
    seen = {True: 0, False: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        wanted = saves == "everything" or func in saved.get(saves, ())
        if saves == "every second product" and wanted:
            seen[context.is_recompute] += 1
            wanted = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def selective(saves: str) -> Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]:
    """How a block is called."""
    return lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=partial(contexts, saves))


def wrapped(saves: str) -> Callable[[nn.Module], nn.Module]:
    """A block, before it is sharded."""
    return lambda block: checkpoint_wrapper(block, context_fn=partial(contexts, saves))
