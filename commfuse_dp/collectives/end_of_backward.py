"""Whether a backward is under way, and what is called when it ends, also if an exception breaks it off."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

graph_task = torch._C._current_graph_task_id  # number of the backward that is under way, -1 outside


class EndOfBackward:
    """Autograd calls it at the end of a backward, and lets go of it if that was broken off."""

    __slots__ = ("__weakref__", "_called", "_ended")

    def __init__(self, ended: Callable[[bool], object]) -> None:
        self._ended = ended
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._ended(True)

    def __del__(self) -> None:
        if not self._called:
            self._ended(False)


def in_backward() -> bool:
    """Called from inside an autograd backward pass (a forward there is a recomputation)."""
    return graph_task() != -1


def at_end_of_backward(ended: Callable[[bool], object]) -> weakref.ref[EndOfBackward]:
    """Inside a backward: have `ended(whether it came to its end)` called. The reference is dead from then on."""
    end = EndOfBackward(ended)
    torch.autograd.Variable._execution_engine.queue_callback(end)
    return weakref.ref(end)
