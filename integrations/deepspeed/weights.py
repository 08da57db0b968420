"""Parameters of DeepSpeed as the engine sees them: slots in flat ranges, and the settings that units follow."""

from __future__ import annotations

from typing import Any

import torch
from commfuse_dp.integrations.deepspeed import compat
from torch import nn


class PartitionedWeight:
    """A `ParamSlot` over a ZeRO-3 partition."""

    def __init__(self, name: str, param: nn.Parameter, optimizer: Any, bounds: tuple[tuple[int, int], ...], rank: int) -> None:
        self.name = name
        self.shape = compat.whole_shape(param)
        self._param = param
        self._optimizer = optimizer
        self._elements = bounds[rank][1] - bounds[rank][0]

    def local(self) -> torch.Tensor:
        return compat.partition(self._param, self._elements)

    @property
    def grad_dtype(self) -> torch.dtype:
        return self._optimizer.gradient_accumulation_dtype

    @property
    def requires_grad(self) -> bool:
        return self._param.requires_grad

    keeps_delivered = False  # copied into DeepSpeed's buffer

    def deliver(self, grad: torch.Tensor) -> None:
        with torch.no_grad():
            compat.accumulate_partition(self._optimizer, self._param, grad)


class ReplicatedWeight:
    """A `ParamSlot` of ZeRO-1/2: the whole parameter on every rank, one range of its gradient on each."""

    def __init__(self, name: str, param: nn.Parameter, optimizer: Any, place: compat.FlatPlace, rank: int) -> None:
        self.name = name
        self.shape = tuple(param.shape)
        self._param = param
        self._optimizer = optimizer
        self._place = place
        self._rank = rank
        self._ready: list[torch.Tensor] = []

    def local(self) -> torch.Tensor:
        start, stop = self._place.bounds[self._rank]
        return self._param.detach().view(-1)[start:stop]

    @property
    def grad_dtype(self) -> torch.dtype:
        return compat.replicated_grad_dtype(self._optimizer, self._param, self._place)

    @property
    def requires_grad(self) -> bool:
        return self._param.requires_grad

    keeps_delivered = True  # until `hand_over`

    def deliver(self, grad: torch.Tensor) -> None:
        self._ready.append(grad)

    def hand_over(self) -> None:
        """Give the optimizer what was delivered. Only now: a gradient found earlier would be reduced a second time."""
        if not self._ready:
            return
        first, *more = self._ready  # more: of a layer in several forwards that share a backward
        self._ready = []
        with torch.no_grad():
            total = sum(more, start=first)
            compat.accumulate_range(self._optimizer, self._param, self._place, self._rank, total)


class ZeroPolicy:
    """A `UnitPolicy`: what DeepSpeed's optimizer wants done, read anew in every step."""

    compute_dtype = None  # DeepSpeed keeps the parameters in the dtype they are computed in
    keep_after_forward = False
    all_reduce_grads = True

    def __init__(self, optimizer: Any, param: nn.Parameter, stage: int) -> None:
        self._optimizer = optimizer
        self._param = param
        self._stage = stage

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self._optimizer.get_param_comm_dtype(self._param)

    @property
    def reduce_grads(self) -> bool:
        if compat.coalescing(self._optimizer):
            return False
        return self._stage == 3 or compat.reduces_every_backward(self._optimizer)

    @property
    def divide_factor(self) -> float | None:
        """None: the mean over the ranks."""
        return None if self._stage == 3 or getattr(self._optimizer, "gradient_average", True) else 1.0
