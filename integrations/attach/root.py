"""The forward of a model's root module, as whoever counts steps by it sees it, whatever the framework."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from commfuse_dp.integrations.attach.forwards import Hook, nothing
from commfuse_dp.integrations.attach.transaction import Transaction
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from commfuse_dp.collectives.end_of_backward import in_backward
from commfuse_dp.engine.engine import Engine


def follow_forward(
    transaction: Transaction,
    model: nn.Module,
    *,
    begin: Callable[[], object],
    returned: Callable[[Any], object] = nothing,
    raised: Callable[[BaseException], object] = nothing,
    left: Callable[[], object] = nothing,
    graphs: bool = False,
) -> None:
    """Have a root's own forward tell of itself, but not its recomputation in a backward.

    returned: called with its output. raised: with the exception that came out of it, if it had begun. left: in either case,
    before. graphs: also where the model is compiled, outside of the graph."""
    root, under_way = weakref.ref(model), [False]

    def on_begin(args: Any) -> None:
        under_way[0] = False  # a KeyboardInterrupt does not call `on_end`
        begin()
        under_way[0] = True

    def on_return(args: Any, output: Any) -> None:
        returned(output)
        under_way[0] = False

    def on_end(args: Any, output: Any) -> None:
        broken_off, under_way[0] = under_way[0], False
        left()
        error = sys.exc_info()[1]
        if broken_off and error is not None:
            raised(error)

    hook = functools.partial(_RootHook, root, graphs)
    for register in (
        functools.partial(model.register_forward_pre_hook, hook(on_begin), prepend=True),
        functools.partial(model.register_forward_hook, hook(on_return)),
        functools.partial(model.register_forward_hook, hook(on_end), always_call=True),
    ):
        transaction.acquire(register, RemovableHandle.remove)


class _RootHook(Hook):
    """A hook that is one of `root` alone."""

    def __init__(self, root: weakref.ref[nn.Module], graphs: bool, action: Callable[..., None]) -> None:
        self._root, self._graphs, self._action = root, graphs, action
        run = self._outside_graphs
        self._run = torch.compiler.disable(run) if graphs else run  # now, as it imports the compiler

    def __call__(self, *args: Any) -> None:
        if self._graphs or not torch.compiler.is_compiling():
            self._run(*args)

    def _outside_graphs(self, module: nn.Module, *args: Any) -> None:
        if self._root() is module and not in_backward():
            self._action(*args)


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

    def begin() -> None:
        before()
        engine.begin_step()
        engine.enter_forward()

    lasting = WeakTensorKeyDictionary()  # hooks of tensors that no forward makes: a parameter may be returned by every forward

    def forget() -> None:
        for handle in lasting.values():
            handle.remove()

    def returned(output: Any) -> None:
        wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in wanted:
            if not tensor.is_leaf:
                tensor.register_hook(arm)
            elif tensor not in lasting:
                lasting[tensor] = tensor.register_hook(arm)
        after()
        engine.end_forward(bool(wanted))

    def arm(grad: torch.Tensor) -> torch.Tensor:
        engine.arm()
        return grad

    transaction.on_undo(forget)
    follow_forward(
        transaction,
        model,
        begin=begin,
        returned=returned,
        raised=engine.breakage.forward_raised,
        left=engine.leave_forward,
        graphs=True,
    )


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors that a forward has returned: in containers, mappings and dataclasses, one in another, or in the attributes of
    an output of a class of its own."""
    leaves = tree_leaves(output)  # tree_flatten would leave a cycle of references behind in each call
    if len(leaves) == 1 and _parts(leaves[0]) is None and hasattr(leaves[0], "__dict__"):
        leaves = tree_leaves(dict(vars(leaves[0])))
    found: list[torch.Tensor] = []
    met: dict[int, Any] = {}  # what refers to itself is entered once; kept, or another object would get its id
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif (parts := _parts(leaf)) is not None and id(leaf) not in met:
            met[id(leaf)] = leaf
            leaves += tree_leaves(parts)
    return found


def _parts(leaf: Any) -> list[Any] | None:
    """Of what pytree does not open."""
    if isinstance(leaf, torch.Tensor):
        return []
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return None
