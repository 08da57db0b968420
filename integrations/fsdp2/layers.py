"""Adopted modules: their new forwards, and their parameters as the engine sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from commfuse_dp.integrations.fsdp2 import compat
from torch import nn

from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.linear import fused_linear, register_operand


class ModuleParameter:
    """A `ParamSlot`: looks its parameter up anew at each use, since conversions and checkpoint loads may replace it."""

    def __init__(self, name: str, module: nn.Module, param_name: str) -> None:
        self.name = name
        self._parameters = module._parameters
        self._param_name = param_name
        self.shape = tuple(self.parameter.shape)

    @property
    def parameter(self) -> nn.Parameter:
        param = self._parameters[self._param_name]
        assert param is not None
        return param

    def local(self) -> torch.Tensor:
        return compat.local_tensor(self.parameter)

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    keeps_delivered = True  # it becomes .grad

    def deliver(self, grad: torch.Tensor) -> None:
        compat.set_sharded_grad(self.parameter, grad)


class GroupPolicy:
    """A `UnitPolicy`: the live settings of the FSDP2 parameter group that a layer came from."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return self._group.mp_policy.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self._group.mp_policy.reduce_dtype

    @property
    def keep_after_forward(self) -> bool:
        return compat.keeps_after_forward(self._group)

    @property
    def reduce_grads(self) -> bool:
        return self._group.reduce_grads

    @property
    def all_reduce_grads(self) -> bool:
        return self._group.all_reduce_grads

    @property
    def divide_factor(self) -> float | None:
        return self._group.gradient_divide_factor


def fused_forward(operand: UnitOperand) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a fused nn.Linear."""
    handle = register_operand(operand)

    def forward(input: torch.Tensor) -> torch.Tensor:
        return fused_linear(input, operand, handle, operand.partial_dtype)

    return forward


def gathered_forward(module: nn.Module, operand: UnitOperand, param_names: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a norm or an embedding over parameters gathered whole."""
    handle = register_operand(operand)

    def gathered() -> tuple[torch.Tensor, ...]:
        return gather_parameters(operand, handle)

    return functional_forward(module, gathered, "bias" in param_names)


def functional_forward(
    module: nn.Module, gathered: Callable[[], tuple[torch.Tensor, ...]], with_bias: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward of a module over what `gathered` returns: the whole weight and, `with_bias`, the whole bias."""
    if isinstance(module, nn.Linear):

        def linear(input: torch.Tensor) -> torch.Tensor:
            return F.linear(input, *gathered())

        return linear
    if isinstance(module, nn.LayerNorm):

        def layer_norm(input: torch.Tensor) -> torch.Tensor:
            params = gathered()
            return F.layer_norm(input, module.normalized_shape, params[0], params[1] if with_bias else None, module.eps)

        return layer_norm
    if isinstance(module, nn.RMSNorm):

        def rms_norm(input: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(input, module.normalized_shape, gathered()[0], module.eps)

        return rms_norm
    assert isinstance(module, nn.Embedding)

    def embedding(input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, gathered()[0], module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq)

    return embedding
