"""Steps of ranks that share a transport by calls (tensor parallelism). What is told of them is step_state.py's.

Ranks that raise at the same place each have their own exception and nothing else: their calls still match. If a rank went
through with a backward that others lost, its optimizer may have moved alone: then all ranks raise once, at the start of the
next step.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.end_of_backward import EndOfBackward, at_end_of_backward, graph_task
from commfuse_dp.collectives.step_state import StepState
from commfuse_dp.errors import CommFuseError, Where
from commfuse_dp.interrupts import HELD, deliver_held, watch
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, WHOLE, Outcome, Transport

_known: weakref.WeakKeyDictionary[Transport, Steps] = weakref.WeakKeyDictionary()
numbers: weakref.WeakKeyDictionary[Transport, Callable[[], int]] = weakref.WeakKeyDictionary()  # see `numbers_of`
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
        steps = _known.setdefault(transport, Steps(transport))
        numbers[transport] = steps.call
    return steps


def numbers_of(transport: Transport) -> Callable[[], int]:
    """Gives each call over the transport its number, the same on all ranks: in its step, where ranks run steps."""
    with _lock:
        return numbers.setdefault(transport, itertools.count().__next__)


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
        if HELD.pending:
            deliver_held()
        self.check()
        self._calls += 1
        if graph_task() != -1 and (self._armed is None or self._armed() is None):
            self._armed = at_end_of_backward(self._end_backward)
        return self._calls

    def forward_raised(self, error: BaseException) -> None:
        if not self.together:  # who begins them hears of it
            super().forward_raised(error)

    def interrupted(self, error: BaseException, *, tell: bool = True) -> None:
        if self._calls and not self.complete and not self.together:  # else there is no step, or who begins them hears of it
            super().interrupted(error, tell=tell)

    def _end_backward(self, complete: bool) -> None:
        self._armed = None
        self.complete = self.complete or complete
        if not complete:
            self._tell("an exception in its backward")

    # ---- between steps -----------------------------------------------------------------------------------------------
    def begin_next(self) -> None:
        """The root's forward begins. Collective; ignored inside a backward (recomputation), and where `together` has who calls
        the following three.

        Raises BrokenStepError on all ranks if some have gone through with a backward that others have not."""
        if self.together or self._recovery is None or graph_task() != -1:
            return
        watch(self)
        try:
            self._next()
            while self.owed:
                self.break_owed()
                self._next()
        except CommFuseError:
            raise
        except BaseException as error:  # a Ctrl-C, in a wait
            self.not_begun(error)
            raise

    def _next(self) -> None:
        self.leave()
        if self.end():
            self.recover_alone()

    def leave(self) -> None:
        """The step is over here.

        With steps of other transports that is told before this rank waits for anybody: a peer of this transport may wait for
        it, while it waits for one of another, in a circle."""
        if self._armed is not None:
            self._tell("an exception in its backward")
        if self.together and not self.cause:
            self._say("")

    def end(self, beside: Outcome = WHOLE) -> bool:
        """Tell the peers how the step ended, and hear it of them. Whether it is lost; else the next one has begun.

        beside: how it ended on the other transports, on all of this rank's peers there."""
        transport, recovery = self._transport(), self._recovery
        assert transport is not None and recovery is not None
        if self.told is None:  # else an exception has come in between
            through = (self.complete and not self.cause) or beside.through
            self.told = Outcome(bool(self.cause), 0, self._calls & 0xFFFFFF, beside.mixed, through)
            transport.finish(self.step, self.told)
        if self.cause:
            recovery.discard(CHANNEL_COLLECTIVE)  # peers that wait for room here come to know of it
        others = progress.callbacks()
        with progress.looking_often(transport, others):
            transport.wait_finished(self.step, self._start, meanwhile=lambda: [callback() for callback in others])
        lost = self.agree()
        if not lost:
            self.begin(self.step + 1)
        return lost

    @property
    def unequal(self) -> bool:
        """The step that has just been lost was so on this transport alone: its ranks began unequally many calls, and none of
        them broke it off. Ranks of other groups know nothing of it: of other inputs, they may begin more calls or fewer."""
        return not any(outcome.broken for outcome in self.outcomes().values())

    def recover_alone(self) -> None:
        """After a step that was lost on this transport alone. Raises BrokenStepError on all its ranks if some went through with
        it."""
        parted = self.parted()
        self.recover()
        self.begin(self.step + 1)
        if parted is not None:
            raise parted

    def recover(self) -> None:
        """All ranks do this, after a step that is lost. After an exception again, until the next one has begun."""
        transport, recovery = self._transport(), self._recovery
        assert transport is not None and recovery is not None
        recovery.discard(CHANNEL_COLLECTIVE)
        recovery.recover(self.step, self._start)
        for forget in when_recovered:
            forget(transport)

    @property
    def _start(self) -> Where:
        return Where("(start of step)", self.step, "all")
