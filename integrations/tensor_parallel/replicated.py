"""Column-parallel layers whose input every rank has whole: plans without sequence parallelism.

    forward     y_i = x @ W_i.T          nothing moves
    backward    dx = sum over ranks      by slices, behind the products of dx and of dW_i

DTensor sums dx once for every layer. Layers that get the same x are computed together here, so it is summed once for all of
them. Nothing in a plan says which these are: a forward shows it (`_Seen`), and from the next one on the first of them that is
called computes all, as long as the others then ask for it. In graphs of torch.compile each is computed by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.tensor_parallel.compat import hooked
from commfuse_dp.integrations.tensor_parallel.layers import Columns, Over, StyleHook, as_dtensor, holds_own
from commfuse_dp.integrations.tensor_parallel.select import Member, Siblings
from commfuse_dp.integrations.tensor_parallel.stand_in import StandIn
from commfuse_dp.integrations.tensor_parallel.units import stock_forward
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from commfuse_dp.collectives.end_of_backward import in_backward

_LOCAL = "_commfuse_local"
_MOST_CHANGES = 16  # of mind about which layers get the same input


class Given(NamedTuple):
    local: torch.Tensor
    sizes: None = None


class WholeHook(StyleHook):
    """Takes the local tensor of a replicated input."""

    def __init__(self, member: Member) -> None:
        super().__init__(member.module, member.style)
        self._mesh = member.style.mesh

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        x = args[0]
        replicated = not isinstance(x, DTensor) or (x.placements == (Replicate(),) and x.device_mesh == self._mesh)
        plain = isinstance(x, torch.Tensor) and type(x) is not StandIn and x.dim() > 1
        if not (replicated and plain) or hooked((module,)) or not holds_own(module, 0, self._mesh):
            return self.stock(module, args)
        return _local(x) if isinstance(x, DTensor) else x


def _local(x: DTensor) -> torch.Tensor:
    """The same object for all who ask: layers are known to get the same input by it."""
    if torch.compiler.is_compiling():
        return x.to_local()
    how = torch.is_grad_enabled(), in_backward()
    known = getattr(x, _LOCAL, None)
    if known is None or known[1:] != (_version(known[0]), how):
        local = x.to_local()
        known = local, _version(local), how
        setattr(x, _LOCAL, known)
    return known[0]  # type: ignore[no-any-return]


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


class _Seen:
    """Who is called with one input."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x, self._how = weakref.ref(x), self._state(x)
        self.recomputed = in_backward()
        self.called: list[int] = []  # ids of layers
        self.waiting: dict[int, torch.Tensor] = {}  # id -> its output, which is computed, but not asked for yet

    def of(self, x: torch.Tensor) -> bool:
        return self._x() is x and self._how == self._state(x)

    @staticmethod
    def _state(x: torch.Tensor) -> tuple[int, bool, bool]:
        return _version(x), torch.is_grad_enabled(), in_backward()


class ReplicatedColumns(Columns):
    """Layers of one module that may get the same input."""

    def __init__(self, siblings: Siblings, over: Over, mesh: DeviceMesh) -> None:
        super().__init__(siblings.name, over, [member.module for member in siblings.members], mesh)
        self._by_id = {id(reference()): reference for reference in self._members}
        self._runs: dict[int, tuple[int, ...]] = {}  # the first that is called -> all that get its input
        self._seen: _Seen | None = None
        self._changes = 0

    def forward(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, (DTensor, StandIn)):
            return stock_forward(module, input)
        if len(self._members) == 1 or torch.compiler.is_compiling():
            (y,) = self._compute(input, [module])
        else:
            y = self._shared(module, input)
        return as_dtensor(y, self.mesh, y.dim() - 1, module.out_features)  # type: ignore[arg-type]

    def _compute(self, input: torch.Tensor, modules: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
        return self.compute(Given(input), 0, modules=modules, layout="replicated")

    def _shared(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        seen, this = self._seen, id(module)
        if seen is None or not seen.of(input):
            if seen is not None:
                self._learn(seen)
            seen = self._seen = _Seen(input)
        before = set(seen.called)
        seen.called.append(this)
        if this in seen.waiting:
            return seen.waiting.pop(this)
        modules = [module]
        if this not in before:
            found = (self._by_id[one]() for one in self._runs.get(this, ()) if one != this and one not in before)
            modules += [other for other in found if other is not None and holds_own(other, 0, self.mesh)]
        y, *others = self._compute(input, modules)
        seen.waiting.update(zip(map(id, modules[1:]), others, strict=True))
        return y

    def _learn(self, seen: _Seen) -> None:
        """Another input has come. A recomputation says nothing: it ends where nothing more is needed."""
        first, run = seen.called[0], tuple(dict.fromkeys(seen.called))
        if seen.recomputed or self._changes >= _MOST_CHANGES or self._runs.get(first, (first,)) == run:
            return
        self._runs[first] = run
        self._changes += 1


__all__ = ["ReplicatedColumns", "WholeHook"]
