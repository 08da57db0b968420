"""Parameters of DeepSpeed as the engine sees them: slots in flat ranges, and the settings that units follow.

All of it holds DeepSpeed's optimizer and parameters by weak references: see [Note: Who holds whom] in attach/__init__.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from commfuse_dp.integrations.attach.forwards import nothing
from commfuse_dp.integrations.attach.slots import ModuleSlot
from commfuse_dp.integrations.deepspeed import compat, flat_compat
from torch import nn

from commfuse_dp.engine.broken import Gradients
from commfuse_dp.engine.engine import Engine
from commfuse_dp.errors import CommFuseError

Bounds = tuple[tuple[int, int], ...]


def referent(reference: weakref.ref[Any]) -> Any:
    """What a weak reference points to. Raises CommFuseError if it has gone."""
    found = reference()
    if found is None:
        raise CommFuseError(
            "the DeepSpeed engine that this layer was served for has gone: call engine.destroy() before dropping it"
        )
    return found


class _ZeroSlot(ModuleSlot):
    """A weight that the optimizer of a DeepSpeed engine knows: that very parameter, as it was when CommFuse was switched on."""

    def __init__(self, name: str, module: nn.Module, param: nn.Parameter, optimizer: Any, bounds: Bounds, rank: int) -> None:
        self._param = weakref.ref(param)
        self._optimizer = weakref.ref(optimizer)
        self._bounds = bounds
        self._rank = rank
        super().__init__(name, module, "weight")
        self.shape = compat.whole_shape(param)

    @property
    def optimizer(self) -> Any:
        return referent(self._optimizer)

    def fits(self, param: torch.Tensor) -> bool:
        return param is self._param()


class PartitionedWeight(_ZeroSlot):
    """A `ParamSlot` over a ZeRO-3 partition: [elements of this rank's flat range]."""

    keeps_delivered = False  # copied into DeepSpeed's buffer

    def local_of(self, param: torch.Tensor) -> torch.Tensor:
        start, stop = self._bounds[self._rank]
        return compat.partition(param, stop - start)

    def wants(self) -> tuple[bool, torch.dtype]:
        return self.parameter.requires_grad, self.optimizer.gradient_accumulation_dtype

    def deliver_to(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        with torch.no_grad():
            compat.accumulate_partition(self.optimizer, param, grad)


class ReplicatedWeight(_ZeroSlot):
    """A `ParamSlot` of ZeRO-1/2: the whole parameter on every rank, one range of its gradient on each."""

    keeps_delivered = True  # until `hand_over`

    def __init__(
        self, name: str, module: nn.Module, param: nn.Parameter, optimizer: Any, place: flat_compat.FlatPlace, rank: int
    ) -> None:
        self._place = place
        self._ready: list[torch.Tensor] = []
        super().__init__(name, module, param, optimizer, place.bounds, rank)

    def local_of(self, param: torch.Tensor) -> torch.Tensor:
        start, stop = self._bounds[self._rank]
        return param.detach().view(-1)[start:stop]

    def wants(self) -> tuple[bool, torch.dtype]:
        param = self.parameter
        return param.requires_grad, flat_compat.replicated_grad_dtype(self.optimizer, param, self._place)

    def deliver_to(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        self._ready.append(grad)

    def hand_over(self) -> None:
        """Give the optimizer what was delivered. Only now: a gradient found earlier would be reduced a second time."""
        if not self._ready:
            return
        first, *more = self._ready  # more: of a layer in several forwards that share a backward
        self._ready = []
        with torch.no_grad():
            total = sum(more, start=first)
            flat_compat.accumulate_range(self.optimizer, self.parameter, self._place, self._rank, total)

    def forget(self) -> None:
        """Drop what was delivered in a backward that was broken off before the optimizer collected its gradients."""
        self._ready = []


class ZeroGradients(Gradients):
    """What a DeepSpeed engine accumulates over microbatches, the layers served here included."""

    fix = "engine.zero_grad() of DeepSpeed's engine"

    def __init__(self, zero: Any, engine: Engine) -> None:
        self._zero = weakref.ref(zero)
        self._engine = weakref.ref(engine)

    def present(self, *, closely: bool = False) -> bool:
        zero, engine = self._zero(), self._engine()
        return zero is not None and engine is not None and (engine.has_accumulated or compat.holds_gradients(zero))

    def drop(self) -> None:
        zero, engine = self._zero(), self._engine()
        if zero is None or engine is None:
            return
        engine.drop_accumulated()
        for unit in engine.units:
            for slot in unit.slots:
                if isinstance(slot, ReplicatedWeight):
                    slot.forget()
        compat.forget_gradients(zero)


class ZeroPolicy:
    """A `UnitPolicy`: what DeepSpeed's optimizer wants done, read anew in every step."""

    keep_after_forward = False
    all_reduce_grads = True

    def __init__(
        self, optimizer: Any, param: nn.Parameter, stage: int, *, travelling: torch.dtype | None = None, zero: Any = None
    ) -> None:
        """travelling: dtype in which the parameter travels, if that is not its own. zero: DeepSpeed's engine."""
        self._zero: Callable[[], Any] = weakref.ref(zero) if zero is not None else nothing
        self._optimizer = weakref.ref(optimizer)
        self._param = weakref.ref(param)
        self._stage = stage
        self.compute_dtype = travelling

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return referent(self._optimizer).get_param_comm_dtype(referent(self._param))

    @property
    def reduce_grads(self) -> bool:
        optimizer = referent(self._optimizer)
        if compat.coalescing(optimizer) or compat.unsynchronised(self._zero()):
            return False
        return self._stage == 3 or flat_compat.reduces_every_backward(optimizer)

    @property
    def divide_factor(self) -> float | None:
        """None: the mean over the ranks."""
        return None if self._stage == 3 or getattr(referent(self._optimizer), "gradient_average", True) else 1.0
