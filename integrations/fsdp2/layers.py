"""Adopted modules: their parameters and settings as the engine sees them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from commfuse_dp.integrations.attach.slots import ModuleSlot
from commfuse_dp.integrations.fsdp2 import compat
from torch.distributed.tensor import DTensor

from commfuse_dp.engine.broken import Gradients
from commfuse_dp.engine.engine import Engine


class ModuleParameter(ModuleSlot):
    """A parameter that FSDP2 has sharded."""

    def fits(self, param: torch.Tensor) -> bool:
        # No leaf: computed by the caller of functional_call; its gradient belongs to a graph that we are not in.
        return type(param) is DTensor and param.is_leaf

    def local_of(self, param: torch.Tensor) -> torch.Tensor:
        return compat.local_tensor(param)

    def deliver_to(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        compat.set_sharded_grad(param, grad)


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
        if engine.has_accumulated or any(unit.replica_partial is not None for unit in engine.units):
            return True
        slots = (slot for unit in engine.units for slot in unit.slots if isinstance(slot, ModuleSlot))
        served = (slot.parameter.grad for slot in slots)
        found = [compat.local_tensor(grad) for grad in served if grad is not None]
        found += [grad for group in self._groups if group() is not None for grad in compat.gradients_of(group())]
        return any(bool(grad.any()) for grad in found) if closely else bool(found)

    def drop(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.drop_accumulated()
        for group in self._groups:
            if group() is not None:
                compat.forget_unreduced(group())


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
        return self._group().reduce_grads

    @property
    def all_reduce_grads(self) -> bool:
        return self._group().all_reduce_grads

    @property
    def divide_factor(self) -> float | None:
        return self._group().gradient_divide_factor
