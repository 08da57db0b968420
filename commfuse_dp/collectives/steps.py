"""Steps of ranks that share a transport by calls (tensor parallelism). What is told of them is step_state.py's.

Ranks that raise at the same place each have their own exception and nothing else: their calls still match. If a rank went
through with a backward that others lost, its optimizer may have moved alone: then all ranks raise once, at the start of the
next step.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.end_of_backward import EndOfBackward, at_end_of_backward
from commfuse_dp.collectives.step_state import StepState
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Outcome, Transport

_known: weakref.WeakKeyDictionary[Transport, Steps] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
when_recovered: list[Callable[[Transport], object]] = []  # what ranks remember of each other's calls is forgotten


def steps_of(transport: Transport | None) -> Steps | None:
    """Of a transport whose ranks run steps."""
    return _known.get(transport) if transport is not None else None


def follow_steps(transport: Transport) -> Steps | None:
    """From now on the transport's ranks run steps, whose beginning all of them tell (`begin_next`); None: it cannot recover."""
    if transport.recovery is None:
        return None
    with _lock:
        return _known.setdefault(transport, Steps(transport))


class Steps(StepState):
    """Of one transport on one rank."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.begin(1)

    def begin(self, step: int) -> None:
        super().begin(step)
        self._calls = 0  # begun in this step
        self._armed: weakref.ref[EndOfBackward] | None = None

    # ---- inside a step -----------------------------------------------------------------------------------------------
    def call(self) -> int:
        """A call begins: its number in this step. Raises BrokenStepError if the step was broken off."""
        self.check()
        self._calls += 1
        if torch._C._current_graph_task_id() != -1 and (self._armed is None or self._armed() is None):
            self._armed = at_end_of_backward(self._end_backward)
        return self._calls

    def _end_backward(self, complete: bool) -> None:
        self._armed = None
        self.complete = self.complete or complete
        if not complete:
            self._tell("an exception in its backward")

    # ---- between steps -----------------------------------------------------------------------------------------------
    def begin_next(self) -> None:
        """The root's forward begins. Collective; ignored inside a backward (recomputation).

        Raises BrokenStepError on all ranks if some have gone through with a backward that others have not."""
        transport, recovery = self._transport(), self._recovery
        if transport is None or recovery is None or torch._C._current_graph_task_id() != -1:
            return
        if self._armed is not None:
            self._tell("an exception in its backward")
        where = Where("(start of step)", self.step, "all")
        self.told = Outcome(bool(self.cause), 0, self._calls & 0xFFFFFF, through=self.complete)
        transport.finish(self.step, self.told)
        if self.cause:
            recovery.discard(CHANNEL_COLLECTIVE)  # peers that wait for room here come to know of it
        others = progress.callbacks()
        with progress.looking_often(transport) if others else contextlib.nullcontext():
            transport.wait_finished(self.step, where, meanwhile=lambda: [callback() for callback in others])
        parted = None
        if self.agree():
            recovery.discard(CHANNEL_COLLECTIVE)
            recovery.recover(self.step, where)
            for forget in when_recovered:
                forget(transport)
            parted = self.parted()
        self.begin(self.step + 1)
        if parted is not None:
            raise parted


__all__ = ["Steps", "follow_steps", "steps_of", "when_recovered"]
