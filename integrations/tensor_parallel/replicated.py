"""Column-parallel layers whose input every rank has whole: plans without sequence parallelism.

    forward     y_i = x @ W_i.T          nothing moves
    backward    dx = sum over ranks      by slices, behind the products of dx and of dW_i

DTensor sums dx once for every layer. Layers of one module that are called with the same x have one backward here
(ops/sequence/shared_input.py), so it is summed once for all of them. In graphs of torch.compile each has its own.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.tensor_parallel.compat import hooked
from commfuse_dp.integrations.tensor_parallel.layers import Columns, Over, StyleHook, as_dtensor, holds_own
from commfuse_dp.integrations.tensor_parallel.select import Member, Siblings
from commfuse_dp.integrations.tensor_parallel.stand_in import StandIn
from commfuse_dp.integrations.tensor_parallel.units import sharded_weights, stock_forward
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from commfuse_dp.collectives.end_of_backward import in_backward
from commfuse_dp.ops.sequence.shared_input import SharedInput, enter

_LOCAL = "_commfuse_local"


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
    if torch.compiler.is_compiling() or x.grad_fn is None:  # a leaf would hold what leads back to it
        return x.to_local()
    how = _version(x), torch.is_grad_enabled(), in_backward()
    known = getattr(x, _LOCAL, None)
    if known is None or known[1] != how:
        local = x.to_local()
        # An operation in place counts for the DTensor, not for its local tensor: another object says that it has changed.
        known = local if known is None else local.view_as(local), how
        setattr(x, _LOCAL, known)
    return known[0]  # type: ignore[no-any-return]


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


class _Entered(NamedTuple):
    """The input that the layers are being called with."""

    x: weakref.ref[torch.Tensor]
    how: tuple[int, bool, bool, bool]
    shared: SharedInput
    entered: torch.Tensor
    left: set[int]  # ids of layers that have not been called


def _state(x: torch.Tensor) -> tuple[int, bool, bool, bool]:
    return _version(x), torch.is_grad_enabled(), in_backward(), torch.is_autocast_enabled(x.device.type)


class ReplicatedColumns(Columns):
    """Layers of one module that may get the same input."""

    def __init__(self, siblings: Siblings, over: Over, mesh: DeviceMesh) -> None:
        super().__init__(siblings.name, over, [member.module for member in siblings.members], mesh)
        self._numbers = {id(member.module): number for number, member in enumerate(siblings.members)}
        self._entered: _Entered | None = None

    def forward(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, (DTensor, StandIn)):
            return stock_forward(module, input)
        if len(self._members) == 1 or torch.compiler.is_compiling() or not self.holds_own():
            (y,) = self.compute(Given(input), 0, modules=[module], layout="replicated")
        else:
            y = self._output(module, input)
        return as_dtensor(y, self.mesh, y.dim() - 1, module.out_features)  # type: ignore[arg-type]

    def _output(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        found = self._entered
        if found is None or id(module) not in found.left or found.x() is not input or found.how != _state(input):
            found = self._entered = self._enter(input)
        found.left.remove(id(module))
        if not found.left:
            self._entered = None  # it is not kept any longer than needed
        return found.shared.output(self._numbers[id(module)], found.entered, sharded_weights([module]))

    def _enter(self, input: torch.Tensor) -> _Entered:
        sharded, weights, biases = self.parameters([member() for member in self._members])
        shared, entered = enter(self.name, input, weights, biases, sharded=sharded, **self._over.options)
        return _Entered(weakref.ref(input), _state(input), shared, entered, set(self._numbers))


__all__ = ["ReplicatedColumns", "WholeHook"]
