"""The engine's steps tied to the forward of a model's root module, whatever the framework."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from commfuse_dp.integrations.attach.forwards import Hook, nothing
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from commfuse_dp.engine.engine import Engine, in_backward


def hook_root(
    transaction: Transaction,
    model: nn.Module,
    engine: Engine,
    *,
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
) -> None:
    """Begin a step with the root's forward, and finish its gradients with its backward.

    before, after: called around the root's own forward, but not around its recomputation in a backward; `after` not if the
    forward raised.
    """
    root = weakref.ref(model)
    for register in (
        functools.partial(model.register_forward_pre_hook, _Begin(root, engine, before), prepend=True),
        functools.partial(model.register_forward_hook, _End(root, engine, after)),
        functools.partial(model.register_forward_hook, _Leave(root, engine, nothing), always_call=True),
    ):
        transaction.acquire(register, RemovableHandle.remove)


class _RootHook(Hook, ABC):
    """A hook that is one of `root` alone."""

    def __init__(self, root: weakref.ref[nn.Module], engine: Engine, action: Callable[[], object]) -> None:
        self._root = root
        self._engine = engine
        self._action = action
        self._outside_graphs = torch.compiler.disable(self.run)  # now, as it imports the compiler

    def __call__(self, *args: Any) -> None:
        self._outside_graphs(*args)

    @abstractmethod
    def run(self, module: nn.Module, args: Any, output: Any = None) -> None: ...

    def concerns(self, module: nn.Module) -> bool:
        return self._root() is module and not in_backward()


class _Begin(_RootHook):
    def run(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.concerns(module):
            self._action()
            self._engine.begin_step()
            self._engine.enter_forward()


class _End(_RootHook):
    def run(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not self.concerns(module):
            return
        wanted = [leaf for leaf in _tensors(output) if leaf.requires_grad]
        for leaf in wanted:
            leaf.register_hook(self._arm)
        self._action()
        self._engine.end_forward(bool(wanted))

    def _arm(self, grad: torch.Tensor) -> torch.Tensor:
        self._engine.arm()
        return grad


class _Leave(_RootHook):
    """Also after a forward that raised."""

    def run(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.concerns(module):
            self._engine.leave_forward()


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = tree_flatten(output)[0]
    if len(leaves) == 1 and not isinstance(leaves[0], torch.Tensor) and hasattr(leaves[0], "__dict__"):
        leaves = tree_flatten(dict(vars(leaves[0])))[0]  # an output class that pytree does not know
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
