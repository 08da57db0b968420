"""What can be read off a model's modules while it trains: spans of their compute, and the unsharded weights they hold.

Both add hooks, so both are context managers for a few recorded steps and not for timed ones. They treat every FSDP2 model
alike, stock or with CommFuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from commfuse_dp.device.base import Event
from commfuse_dp.ops.on_demand import OnDemandTensor
from commfuse_dp.probe import COMPUTE, Probe, now_ns


class ModuleSpans(ExitStack):
    """Spans `NAME forward` and `NAME backward` on the compute lane, for the given modules (their waits lie within).

    On a GPU by events: the time in which the stream did it, not that in which the host enqueued it."""

    def __init__(self, probe: Probe, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.probe = probe
        self.modules = list(modules)
        self._started: dict[str, tuple[int, Event | None]] = {}

    def __enter__(self) -> ModuleSpans:
        for name, module in self.modules:
            forward, backward = f"{name} forward", f"{name} backward"
            for handle in (
                module.register_forward_pre_hook(self._start(forward)),
                module.register_forward_hook(self._end(forward)),
                module.register_full_backward_pre_hook(self._start(backward)),
                module.register_full_backward_hook(self._end(backward)),
            ):
                self.callback(handle.remove)
        return self

    def _start(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._started[name] = (now_ns(), self.probe.mark() if self.probe.sink is not None else None)

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            start = self._started.pop(name, None)
            if start is not None:
                self.probe.span_since(COMPUTE, name, *start)

        return hook


class UnshardedPeak(ExitStack):
    """Most unsharded weight bytes held at one time, looked at whenever a leaf module starts its forward or ends its backward.

    Counts the parameters that FSDP2 has replaced by full tensors (a sharded one is a DTensor), each once, plus what `window`
    says is held outside the modules (an engine's prefetched slices). FSDP2's own flat gather buffers are not counted, which is
    in favour of stock FSDP2.
    """

    def __init__(self, model: nn.Module, window: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.model = model
        self.nbytes = 0
        self._window = window if window is not None else lambda: 0

    def __enter__(self) -> UnshardedPeak:
        for module in self.model.modules():
            if not any(True for _ in module.children()):
                self.callback(module.register_forward_pre_hook(self._look).remove)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.callback(parameter.register_hook(self._look).remove)
        return self

    def _look(self, *_: Any) -> None:
        with torch.no_grad():
            # In a layer of CommFuse whoever looks finds a tensor without memory, which stands for the whole parameter.
            full = {id(p): p.nbytes for p in self.model.parameters() if not isinstance(p, (DTensor, OnDemandTensor))}
        self.nbytes = max(self.nbytes, sum(full.values()) + self._window())
