"""Compute replaced by sleeping: products and attention take the time that a device of a given speed would need, and no core.

So more ranks than cores can be measured: what is left on the cores is what a host has to do beside its accelerator (copies,
sums, sockets, Python). Values are zeros: nothing but times and bytes means anything here.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"


class SleepingDevice:
    """A device of `gflops` (10^9 operations a second; a multiply and an add are two) for this process's CPU tensors."""

    def __init__(self, gflops: float) -> None:
        self.slept_s = 0.0
        self._rate = 1e9 * gflops
        self._late = threading.local()  # seconds that the thread's last sleep was too long: the next one is shorter by it
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of kernels that are replaced
            warnings.simplefilter("ignore")
            for name, kernel in self._kernels().items():
                self._library.impl(name, kernel, "CPU")

    def _kernels(self) -> dict[str, Callable[..., Any]]:
        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            y = a.new_zeros((*a.shape[:-1], b.shape[-1]))
            self._sleep(2 * y.numel() * a.shape[-1])
            return y

        def into(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            self._sleep(2 * out.numel() * a.shape[-1])
            return out.zero_()

        def onto(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
            self._sleep(2 * total.numel() * a.shape[-1])
            return total

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
        ) -> tuple[torch.Tensor, ...]:
            self._sleep(_attention_flops(q, k, causal))
            return q.new_zeros(q.shape), q.new_zeros(q.shape[:-1], dtype=torch.float32)

        def attend_backward(
            grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **_: Any
        ) -> tuple[torch.Tensor, ...]:
            self._sleep(2 * _attention_flops(q, k, bool(rest[3])))  # is_causal; four products, where forward has two
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

        return {
            "mm": product,
            "mm.out": into,
            "bmm": product,
            "bmm.out": into,
            "addmm": lambda bias, a, b, **_: product(a, b),
            "addmm.out": lambda bias, a, b, *, out, **_: into(a, b, out=out),
            "addmm_": onto,
            _SDPA: attend,
            f"{_SDPA}_backward": attend_backward,
        }

    def _sleep(self, flops: float) -> None:
        wanted = flops / self._rate
        self.slept_s += wanted
        start = time.monotonic()
        end = start + wanted - getattr(self._late, "s", 0.0)
        if end > start:
            time.sleep(end - start)
        self._late.s = time.monotonic() - end


def _attention_flops(q: torch.Tensor, k: torch.Tensor, causal: bool) -> float:
    """Of forward: scores, and what they weigh. q: [..., S, d], k: [..., T, d]; causal: half of the scores are computed."""
    return 4 * q.numel() * k.shape[-2] * (0.5 if causal else 1)


__all__ = ["SleepingDevice"]
