"""A GPU that is pretended: torch's names of CUDA are the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HOST = torch.device("cpu")


class PretendedEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: PretendedEvent) -> float:
        return 1e3 * max(end.at - self.at, 1e-6)


class PretendedCuda:
    Event = PretendedEvent

    synchronize: Callable[..., None] = staticmethod(lambda device=None: None)

    @staticmethod
    def get_device_capability(device: object = None) -> tuple[int, int]:
        return 9, 0


class PretendedTorch:
    cuda = PretendedCuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *names: object) -> torch.device:
        return HOST

    def empty(self, *shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return torch.empty(*shape, **more)

    def zeros(self, *shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return torch.zeros(*shape, **more)
