"""What a fused op saves for backward, saved before it computes where hooks look at saved tensors.

[Note: Early stop]
Activation checkpointing (not the reentrant one) ends a recomputation at the moment when all that was saved has come again. A
custom autograd.Function saves when its forward has returned. So the last layer of a checkpointed block would be computed and
sent once more, for a result that nobody reads: in a Llama block that is `down_proj`, a fifth of its products, or a
reduce-scatter. Here the hooks are called first. (Ops on the hot path ask for hooks themselves: a call is a frame a layer.)
"""

from __future__ import annotations

from typing import Any

import torch

from commfuse_dp.ops.compat import keeps_graph, saved_tensors_hooks


def save(ctx: Any, *tensors: torch.Tensor) -> None:
    """As `ctx.save_for_backward`, of tensors that exist before the op computes."""
    hooks = saved_tensors_hooks()
    if hooks is None:
        ctx.save_for_backward(*tensors)
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [pack(tensor) for tensor in tensors]


def saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """As `ctx.saved_tensors`, once in a backward, of what `save` has saved."""
    found: tuple[torch.Tensor, ...] = ctx.saved_tensors
    if found:
        return found
    if ctx.packed is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the saved tensors of a layer that CommFuse serves have been "
            "freed. Specify retain_graph=True if you need to."
        )
    found = tuple(ctx.unpack(packed) for packed in ctx.packed)
    if not keeps_graph():
        ctx.packed = None
    return found
