"""Claimed layers while CommFuse is off: every parameter gathered whole by a blocking collective, gradients reduced likewise.

Right, not fast: it is what a claimed layer does between `claim` and `apply`, after `remove`, and where `apply` was told to
leave the layer alone. What was gathered is kept until the layer's backward. Gradients are reduced in every backward, also
while gradient synchronisation is off: the sums come out the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import whole_function
from commfuse_dp.integrations.fsdp2.hooks import all_gather, reduce_scatter
from torch import nn

if TYPE_CHECKING:
    from commfuse_dp.integrations.fsdp2.claim import ClaimedLayer


class _Gather(torch.autograd.Function):
    """rows [r, *rest] of this rank -> [rows, *rest] in the compute dtype; backward: this rank's rows of the mean."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: ClaimedLayer, count: int) -> torch.Tensor:
        ctx.layer, ctx.dtype, ctx.own = layer, rows.dtype, rows.shape[0]
        size = layer.shard_group.size()
        chunk = -(-count // size)
        padded = rows.new_zeros((chunk, *rows.shape[1:]), dtype=layer.policy.compute_dtype)
        padded[: rows.shape[0]] = rows
        whole = padded.new_empty((chunk * size, *rows.shape[1:]))
        all_gather(whole, padded, group=layer.shard_group)
        return whole[:count]  # under the chunk rule all padding is at the end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layer, size = ctx.layer, ctx.layer.shard_group.size()
        chunk = -(-grad.shape[0] // size)
        wide = torch.promote_types(grad.dtype, torch.float32)
        partials = grad.new_zeros((chunk * size, *grad.shape[1:]), dtype=wide)
        partials[: grad.shape[0]] = grad
        total = partials.new_empty((chunk, *grad.shape[1:]))
        reduce_scatter(total, partials, group=layer.shard_group)
        if layer.replicate_group is not None:
            dist.all_reduce(total, group=layer.replicate_group)
            size *= layer.replicate_group.size()
        factor = layer.policy.divide_factor
        return total[: ctx.own].div_(size if factor is None else factor).to(ctx.dtype), None, None


def plain(layer: ClaimedLayer) -> Callable[..., torch.Tensor]:
    """What a claimed module computes without CommFuse."""
    names = layer.param_names
    function = whole_function(layer.kind)

    @torch.compiler.disable
    def gathered(module: nn.Module) -> tuple[torch.Tensor, ...]:
        params: list[Any] = [getattr(module, name) for name in names]
        return tuple(_Gather.apply(param.to_local(), layer, param.shape[0]) for param in params)

    def compute(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        return function(module, input, gathered(module))

    return compute
