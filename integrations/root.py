"""The engine's steps tied to the forward of a model's root module, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from commfuse_dp.engine.engine import Engine, in_backward


def _nothing() -> None:
    return None


def hook_root(
    model: nn.Module, engine: Engine, *, before: Callable[[], None] = _nothing, after: Callable[[], None] = _nothing
) -> list[Any]:
    """Begin a step with the root's forward, and finish its gradients with its backward; returns the hooks' handles.

    before, after: called around the root's own forward, but not around its recomputation in a backward.
    """

    def begin(module: nn.Module, args: Any) -> None:
        if not in_backward():
            before()
        engine.begin_step()

    def arm(grad: torch.Tensor) -> torch.Tensor:
        engine.arm()
        return grad

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        wanted = [leaf for leaf in _tensors(output) if leaf.requires_grad]
        for leaf in wanted:
            leaf.register_hook(arm)
        after()
        engine.end_forward(bool(wanted))

    begin, end = torch.compiler.disable(begin), torch.compiler.disable(end)
    return [model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end, prepend=False)]


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = tree_flatten(output)[0]
    if len(leaves) == 1 and not isinstance(leaves[0], torch.Tensor) and hasattr(leaves[0], "__dict__"):
        leaves = tree_flatten(dict(vars(leaves[0])))[0]  # an output class that pytree does not know
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
