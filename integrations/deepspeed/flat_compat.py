"""Undocumented names of ZeRO-1 and 2: where parameters lie in their flattened groups, and how gradients get there.

compat.py checks at start that they are there. Read in deepspeed 0.19.8: runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.deepspeed import compat
from torch import nn


class FlatPlace(NamedTuple):
    """Where a parameter lies in the flattened parameter groups of ZeRO-1/2."""

    group: int
    bounds: tuple[tuple[int, int], ...]  # flat range of the parameter in every rank's partition


def flat_places(optimizer: Any, world_size: int) -> dict[int, FlatPlace]:
    """id(param) -> place, of all parameters of the optimizer."""
    places: dict[int, FlatPlace] = {}
    for group, params in enumerate(optimizer.round_robin_bit16_groups):
        size = int(optimizer.partition_size[group])
        for param, offset in zip(params, optimizer.round_robin_bit16_offsets[group], strict=True):
            edges = [min(max(rank * size - int(offset), 0), param.numel()) for rank in range(world_size + 1)]
            places[id(param)] = FlatPlace(group, tuple(itertools.pairwise(edges)))
    return places


def flat_groups(optimizer: Any, world_size: int) -> list[tuple[torch.Tensor, int]]:
    """(flattened parameters, elements of a rank's partition) of every group."""
    return [(flat, flat.numel() // world_size) for flat in optimizer.bit16_groups_flat]


def flat_ranges(optimizer: Any) -> dict[int, tuple[int, int, int]]:
    """id(param) -> (group, first element, last element + 1) in the flattened groups."""
    return {
        id(param): (group, int(offset), int(offset) + param.numel())
        for group, params in enumerate(optimizer.round_robin_bit16_groups)
        for param, offset in zip(params, optimizer.round_robin_bit16_offsets[group], strict=True)
    }


def before_moves(transaction: Transaction, optimizer: Any, action: Callable[[], object]) -> None:
    """Call `action` before the optimizer moves its flattened groups to other memory, and back."""
    for name in ("offload_states", "reload_states"):
        original = getattr(optimizer, name, None)  # newer versions
        if original is None:
            continue

        @functools.wraps(original)
        def moved(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            action()
            return _original(*args, **kwargs)

        transaction.set(vars(optimizer), name, moved)


def reduces_every_backward(optimizer: Any) -> bool:
    """ZeRO-2; ZeRO-1 accumulates locally and reduces at the boundary of gradient accumulation."""
    return bool(optimizer.partition_gradients) or bool(optimizer.is_gradient_accumulation_boundary())


def accumulates_apart(optimizer: Any) -> bool:
    """Gradients of earlier microbatches lie where the optimizer's `zero_grad` clears them, and that of the engine does not."""
    return bool(getattr(optimizer, "use_grad_accum_attribute", False))


def expect_gradients(optimizer: Any) -> None:
    """What ZeRO-1/2 does at the first gradient that autograd gives it. If all layers are fused, there is none."""
    optimizer.setup_buckets()


def reduce_waiting(optimizer: Any, params: Iterable[nn.Parameter]) -> None:
    """Have ZeRO-1/2 reduce its bucket now if these have gradients of autograd's making in it (other code reads the weight):
    what is reduced already can be added to them afterwards only."""
    if any(param.grad is not None or getattr(param, "grad_accum", None) is not None for param in params):
        optimizer.reduce_ipg_grads()
        compat.see_reductions(optimizer)


def replicated_grad_dtype(optimizer: Any, param: nn.Parameter, place: FlatPlace) -> torch.dtype:
    """Dtype in which ZeRO-1/2 keeps the gradient of its partition until the step."""
    if optimizer._use_compact_grad_partition_buffer(place.group) or optimizer.use_grad_accum_attribute:
        return optimizer.gradient_accumulation_dtype
    return param.dtype


def accumulate_range(optimizer: Any, param: nn.Parameter, place: FlatPlace, rank: int, grad: torch.Tensor) -> None:
    """Put the reduced gradient of this rank's range where the epilogue of ZeRO-1/2 looks for it."""
    start, stop = place.bounds[rank]
    if stop == start:
        return
    if optimizer._use_compact_grad_partition_buffer(place.group):
        target = optimizer._get_compact_grad_partition_slice(place.group, rank, optimizer.get_param_id(param), stop - start)
        target.add_(grad)
        return
    name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
    present = getattr(param, name, None)
    if present is not None:  # other code reads the weight
        present.view(-1)[start:stop].add_(grad)
        return
    if grad.numel() < param.numel():
        whole = torch.zeros(param.numel(), dtype=grad.dtype, device=grad.device)
        whole[start:stop] = grad
        grad = whole
    setattr(param, name, grad.view(param.shape))
