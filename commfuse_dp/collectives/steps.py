"""Steps of ranks that share a transport by calls (tensor parallelism), and how all come clean out of one that broke off.

    an exception comes out of a call, or    all peers are told at once                                 `by`
    of a forward or backward around it
    a rank waits for such a peer            BrokenStepError, once what it waits for cannot come any    `heed`
                                            more: see [Note: Broken steps] in transport/base.py
    the next step begins                    every rank tells how its step ended, and hears how         `begin`
                                            everybody's did; if they do not agree, all recover

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
from commfuse_dp.errors import BrokenStepError, CommFuseError, Where, in_a_line
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Outcome, Recovery, Transport

_known: weakref.WeakKeyDictionary[Transport, Steps] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
when_recovered: list[Callable[[Transport], object]] = []  # what ranks remember of each other's calls is forgotten


def steps_of(transport: Transport | None) -> Steps | None:
    """Of a transport whose ranks run steps."""
    return _known.get(transport) if transport is not None else None


def follow_steps(transport: Transport) -> Steps | None:
    """From now on the transport's ranks run steps, whose beginning all of them tell (`begin`); None: it cannot recover."""
    if transport.recovery is None:
        return None
    with _lock:
        return _known.setdefault(transport, Steps(transport))


class Steps:
    """Of one transport on one rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport: weakref.ref[Transport] = weakref.ref(transport)
        self._rank = transport.rank
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self.step = 1
        self.cause = ""  # of the break in this step, if there is one
        self._calls = 0  # begun in this step
        self._armed: weakref.ref[EndOfBackward] | None = None
        self._complete = False  # a backward of this step came to its end

    @property
    def _recovery(self) -> Recovery | None:
        transport = self._transport()
        return transport.recovery if transport is not None else None

    # ---- inside a step -----------------------------------------------------------------------------------------------
    def call(self) -> int:
        """A call begins: its number in this step. Raises BrokenStepError if the step was broken off."""
        if self.cause:
            raise BrokenStepError(
                f"rank {self._rank}: this step was broken off ({self.cause}); begin a new forward of the model",
                rank=self._rank,
                peer=self._rank,
            )
        self._calls += 1
        if torch._C._current_graph_task_id() != -1 and (self._armed is None or self._armed() is None):
            self._armed = at_end_of_backward(self.ended)
        return self._calls

    def by(self, what: str, error: BaseException | None) -> None:
        """An exception broke this rank's step off. The first one counts."""
        recovery = self._recovery
        if self.cause or recovery is None:
            return
        self.cause = in_a_line(error, what) if error is not None else f"an exception in {what}"
        with contextlib.suppress(CommFuseError):
            recovery.tell_broken(self.step, f"rank {self._rank}: {self.cause}")

    def forward_raised(self, error: BaseException) -> None:
        """The exception has come out of the forward of the root."""
        self.by("its forward", error)

    def ended(self, complete: bool) -> None:
        """A backward has ended."""
        self._armed = None
        if complete:
            self._complete = True
        else:
            self.by("its backward", None)

    def heed(self, peer: int, where: Where, doing: str, come: Callable[[], bool]) -> None:
        """Raises BrokenStepError if `peer` has left this step, and what is waited for was not among what it has sent."""
        recovery = self._recovery
        left = recovery.left(peer) if recovery is not None else None
        if recovery is None or left is None or left.epoch < self.step or not recovery.all_sent(peer) or come():
            return
        reason = left.reason or f"rank {peer} has begun another step, after an exception outside of CommFuse's layers, say"
        raise BrokenStepError(
            f"rank {self._rank} waited for rank {peer} {doing} ({where}). It will not come: {reason}. This step is lost; catch "
            "the exception on all ranks, clear the gradients and go on with the next one, or stop all ranks.",
            rank=self._rank,
            peer=peer,
            where=where,
        )

    # ---- between steps -----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The root's forward begins. Collective; ignored inside a backward (recomputation).

        Raises BrokenStepError on all ranks if some have gone through with a backward that others have not."""
        transport, recovery = self._transport(), self._recovery
        if transport is None or recovery is None or torch._C._current_graph_task_id() != -1:
            return
        if self._armed is not None:
            self.by("its backward", None)
        where = Where("(start of step)", self.step, "all")
        told = Outcome(bool(self.cause), 0, self._calls & 0xFFFFFF, self._complete)
        transport.finish(self.step, told)
        if self.cause:
            recovery.discard(CHANNEL_COLLECTIVE)  # peers that wait for room here come to know of it
        others = progress.callbacks()
        with progress.looking_often(transport) if others else contextlib.nullcontext():
            transport.wait_finished(self.step, where, meanwhile=lambda: [callback() for callback in others])
        outcomes = {self._rank: told, **{peer: recovery.outcome_of(peer, self.step) for peer in self._peers}}
        known = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}
        lost = any(outcome.broken or outcome.calls != told.calls for outcome in known.values())
        if lost:
            recovery.discard(CHANNEL_COLLECTIVE)
            recovery.recover(self.step, where)
            for forget in when_recovered:
                forget(transport)
        told_of = [left.reason for left in map(recovery.left, self._peers) if left is not None and left.reason]
        cause = self.cause or "; ".join(told_of) or "ranks did not do the same"
        self.step += 1
        self.cause, self._calls, self._armed, self._complete = "", 0, None, False
        through = [rank for rank, outcome in known.items() if outcome.mixed]
        if lost and through:
            raise BrokenStepError(
                f"rank {self._rank}: step {self.step - 1} was lost ({cause}), but ranks {through} went through with its "
                "backward. If their optimizers took a step, the parameters of the ranks do not belong together: load the last "
                "checkpoint then. Communication goes on with the next step.",
                rank=self._rank,
                peer=next((rank for rank in through if rank != self._rank), self._rank),
            )


__all__ = ["Steps", "follow_steps", "steps_of", "when_recovered"]
