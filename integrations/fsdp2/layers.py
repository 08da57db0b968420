"""Adopted modules: their parameters and settings as the engine sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.slots import ModuleSlot
from commfuse_dp.integrations.fsdp2 import compat
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.engine.broken import Gradients
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.errors import ConfigError


class TensorLayer(NamedTuple):
    """A layer that tensor parallelism serves, and that is sharded by `fully_shard` as well."""

    module: nn.Module
    holder: str  # of the input that it shares with other layers: with all of them, or with none, its parameters become units
    compute: Callable[[UnitOperand, int], Callable[..., torch.Tensor]]  # see `Attachment.serve`
    wrap: Callable[[int, torch.Tensor], torch.Tensor]  # see `Reads`


def gathered_shape(param: torch.Tensor, groups: Iterable[dist.ProcessGroup | None]) -> tuple[int, ...]:
    """Shape of what a gather over `groups` alone makes of a sharded parameter: other mesh dimensions still divide it."""
    shape = list(param.shape)
    if isinstance(param, DTensor) and param.device_mesh.ndim > 1:
        mesh, gathered = param.device_mesh, [dist.get_process_group_ranks(group) for group in groups if group is not None]
        for number, placement in enumerate(param.placements):
            if isinstance(placement, Shard) and dist.get_process_group_ranks(mesh.get_group(number)) not in gathered:
                extent = shape[placement.dim]
                shape[placement.dim] = even_sizes(extent, mesh.size(number))[mesh.get_local_rank(number)]
    return tuple(shape)


class ModuleParameter(ModuleSlot):
    """A parameter that FSDP2 has sharded."""

    def __init__(self, name: str, module: nn.Module, param_name: str, groups: Sequence[dist.ProcessGroup | None] = ()) -> None:
        """groups: that it is sharded and replicated over, where other groups shard it as well."""
        super().__init__(name, module, param_name)
        if groups:
            self.shape = gathered_shape(self.parameter, groups)

    def fits(self, param: torch.Tensor) -> bool:
        # No leaf: computed by the caller of functional_call; its gradient belongs to a graph that we are not in.
        return type(param) is DTensor and param.is_leaf

    local_of = staticmethod(compat.local_tensor)

    deliver_to = staticmethod(compat.set_sharded_grad)


class ShardedGradients(Gradients):
    """What a model accumulates over microbatches: `param.grad`, and what has not been reduced yet."""

    fix = "model.zero_grad()"  # an optimizer's does not reach what has not been reduced

    def __init__(self, engine: Engine, groups: Sequence[Any]) -> None:
        self._engine = weakref.ref(engine)
        self._groups = [weakref.ref(group) for group in groups]

    def present(self, *, closely: bool = False) -> bool:
        engine = self._engine()
        if engine is None:
            return False
        if engine.has_accumulated or [unit for unit in engine.units if unit.replica_partial is not None]:
            return True
        served = [param.grad for param in self._parameters(engine) if param.grad is not None]
        found = [compat.local_tensor(grad) for grad in served]
        found += [grad for group in self._groups if group() is not None for grad in compat.gradients_of(group())]
        return any(bool(grad.any()) for grad in found) if closely else bool(found)

    def drop(self) -> None:
        """Of the sharded parameters: a backward that was broken off leaves FSDP2's groups unsharded, and a model's `zero_grad`
        finds whole parameters in their place."""
        engine = self._engine()
        if engine is not None:
            engine.drop_accumulated()
            for param in self._parameters(engine):
                param.grad = None
        for group in self._groups:
            if group() is not None:
                compat.forget_gradients(group())

    @staticmethod
    def _parameters(engine: Engine) -> list[nn.Parameter]:
        found = []
        for unit in engine.units:
            for slot in unit.slots:  # not isinstance: for an abstract class that is a frame in every layer
                found.append(slot.parameter)  # type: ignore[attr-defined]
        return found


def _refuse_late_setters(group: Any) -> None:
    """Raises ConfigError for a setter that CommFuse cannot follow for layers that it has taken out of the group."""
    late = compat.own_collective(group)
    if late is None and compat.has_all_reduce_hook(group):
        late = "set_all_reduce_hook"
    if late is None and compat.reduces_unused(group):
        late = "set_reduce_scatter_unused_params"
    if late is not None:
        raise ConfigError(
            f"{late} was called after commfuse_dp.apply(), for layers that CommFuse has taken out of their FSDP2 group. "
            "Call it before commfuse_dp.apply(), which then leaves them there."
        )


class GroupPolicy:
    """A `UnitPolicy`: the live settings of the FSDP2 parameter group that a layer came from."""

    def __init__(self, group: Any) -> None:
        self._group: Callable[[], Any] = weakref.ref(group)  # the model lives wherever a policy is asked

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._group().mp_policy.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self._group().mp_policy.reduce_dtype

    @property
    def keep_after_forward(self) -> bool:
        return compat.keeps_after_forward(self._group())

    @property
    def reduce_grads(self) -> bool:
        group = self._group()
        _refuse_late_setters(group)  # here, as every backward asks for this first
        return group.reduce_grads

    @property
    def all_reduce_grads(self) -> bool:
        return self._group().all_reduce_grads

    @property
    def divide_factor(self) -> float | None:
        return self._group().gradient_divide_factor
