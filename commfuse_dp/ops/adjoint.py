"""A linear function between ranks, and its adjoint, for autograd: what the unfused references are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def adjoint(x: torch.Tensor, there: Callable[[torch.Tensor], Any], back: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """there(x); the gradient of x is back(gradient of the result). Differentiable once."""
    return _Adjoint.apply(x, there, back)  # type: ignore[no-any-return]


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, there: Callable[[torch.Tensor], Any], back: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor:
        ctx.back = back
        return there(x)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None
