"""Steps of an engine that break off: gradients, and plain collectives. What is told of them is collectives/step_state.py's.

A rank that went through with a step which others lost raises once, at the start of the next: its optimizer may have moved on
alone. Where the lost backward added to gradients of earlier ones, no rank goes on before they are cleared: see `Gradients`.
Transports that do not recover (streams) go another way, see `GradientStream.discard`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from commfuse_dp.collectives.step_state import StepState
from commfuse_dp.errors import BrokenStepError, CommFuseError, in_a_line
from commfuse_dp.transport.base import Outcome, Recovery, Transport

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Engine

ROOM = "a free slot in its gradient inbox"  # what a rank waits for that has no credit
ROOM_PATIENCE_S = 5.0  # for that, at a peer whose step was broken off
_ANOTHER_WAIT_S = 1.0  # who waits looks more often


class Gradients:
    """What the framework accumulates over several backwards, of served layers and of all others. This one: nothing."""

    fix = ""  # the call that clears it

    def present(self, *, closely: bool = False) -> bool:
        """Whether gradients of earlier backwards are there. closely: zeros do not count, and the answer may take its time."""
        return False

    def drop(self) -> None:
        """A backward was broken off: all is to be as after an optimizer step."""


class Breakage(StepState):
    """Of one engine."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.gradients = Gradients()
        self._mixed = ""  # what has happened, as long as gradients have to be cleared

    def begin(self, step: int) -> None:
        super().begin(step)
        self._forward = ""  # an exception of this step's forward
        self.layer = "?"  # whose backward was begun last
        self.scatters = 0  # reduce-scatters begun in this step
        self.backward = False  # one was begun in this step
        self.onto = False  # it was begun with gradients of earlier ones present
        self._agreed = False  # that this step is lost
        # By peer that has left this step: since when this rank waits for room there, and when it last looked.
        self._without_room: dict[int, tuple[float, float]] = {}

    # ---- inside a step -----------------------------------------------------------------------------------------------
    def by(self, layer: str, error: BaseException) -> None:
        """An exception has come out of what the engine did for a layer. The first one counts."""
        super().by(self._place(layer), error)

    def begin_backward(self) -> None:
        """Before it has added to any gradient."""
        self.onto = self.onto or self.complete or self.gradients.present()
        self.backward = True

    def in_forward(self, layer: str, error: BaseException) -> None:
        """An exception has come out of a layer's forward. That alone breaks nothing off: whoever caught it may go on."""
        self._forward = self._forward or in_a_line(error, self._place(layer))

    def forward_raised(self, error: BaseException) -> None:
        self._tell(self._forward or in_a_line(error, f"its forward, step {self.step}"))

    def leave(self, *, unfinished: bool) -> None:
        """The step is over here. unfinished: a backward was begun that did not come to its end."""
        if self.cause or (self.complete and not unfinished):
            return
        if unfinished:  # broken off outside the engine: in a hook, or in a layer that is not served
            after = f"after layer {self.layer!r}" if self.layer != "?" else "before the first served layer"
            self._tell(f"an exception in its backward, {after}, step {self.step}")
        elif self._forward:
            self._tell(self._forward)

    def _place(self, layer: str) -> str:
        return f"layer {layer!r}, step {self.step}"

    def _has_done(self, peer: int, doing: str, recovery: Recovery) -> bool:
        if doing is not ROOM:
            return super()._has_done(peer, doing, recovery)
        outcome = recovery.outcome_of(peer, self.step)
        if outcome is not None and not outcome.broken:
            return True
        # It makes room as soon as it begins its next step, and this rank may then come to raise what the peer has raised. A
        # peer that first waits for this rank in a call of another library never does.
        now, transport = time.monotonic(), self._transport()
        since, asked = self._without_room.get(peer, (now, now))
        if now - asked > _ANOTHER_WAIT_S:
            since = now
        self._without_room[peer] = since, now
        return transport is not None and now - since >= min(ROOM_PATIENCE_S, transport.deadline_s / 2)

    # ---- between steps -----------------------------------------------------------------------------------------------
    def outcome(self, calls: int) -> Outcome:
        """How the step has ended here. Asked again, it says the same."""
        if self.told is None:
            broken = bool(self.cause) or calls < 0
            mixed = self.onto and self.gradients.present(closely=broken)
            self.told = Outcome(broken, self.scatters, calls, mixed, self.complete and not broken)
        return self.told

    def agree(self) -> bool:
        return not self._agreed and self.told is not None and super().agree()

    def of_all(self) -> Outcome:
        """What others have to know of how the step has ended here and on this rank's peers. That it is lost is told to them."""
        if self.agree():
            self._tell(self.why())
        outcomes = self.outcomes().values()
        mixed, through = any(outcome.mixed for outcome in outcomes), any(outcome.through for outcome in outcomes)
        return Outcome(bool(self.cause), mixed=mixed, through=through)

    def same_calls(self) -> bool:
        """Whether all ranks have begun the same plain collectives, and none of those is in doubt."""
        calls = [outcome.calls for outcome in self.outcomes().values()]
        return len(calls) == len(self._peers) + 1 and calls[0] >= 0 and len(set(calls)) == 1

    def lose_gradients(self) -> bool:
        """All ranks know that the step is lost, and nothing of it is under way any more. True, on all ranks if on one: it has
        added to gradients of earlier ones. Otherwise what it has left is dropped."""
        self._agreed = True
        states = (self, *self.together)
        if any(outcome.mixed for state in states for outcome in state.outcomes().values()):
            self._mixed = self.cause or "it was broken off on another rank"
        elif self.backward:
            self.gradients.drop()
        return bool(self._mixed)

    @property
    def lost(self) -> bool:
        """All ranks know that the step is lost."""
        return self._agreed

    @property
    def settled(self) -> bool:
        """All ranks know that the step is lost, or some have gone through with it."""
        return self._agreed or any(outcome.through for outcome in self.outcomes().values())

    @property
    def unsettled(self) -> bool:
        """The step is lost here, and `lose_gradients` has not been called."""
        return bool(self.cause) and not self._agreed

    def refuse(self) -> None:
        """Raises BrokenStepError as long as gradients lost here are not cleared."""
        if self._mixed and not self.gradients.present(closely=True):
            self.clear(unfinished=False)  # the user has, by another call
        if self._mixed:
            raise self.refusal()

    def refusal(self) -> BrokenStepError:
        rank, cause = self._here, self._mixed or self.cause or "an exception in its backward"
        fix = f", call {self.gradients.fix}" if self.gradients.fix else " clear them"
        return BrokenStepError(
            f"rank {rank}: the backward of step {self.step} was broken off: {cause}. What has been accumulated, gradients of "
            "earlier microbatches too, may have a part of it or lack a part: it is lost, the parameters are not. On all ranks"
            f"{fix} and begin the accumulation again with its first microbatch, or resume from a checkpoint.",
            rank=rank,
            peer=rank,
        )

    @property
    def spoilt(self) -> bool:
        """Gradients of this step are known to be incomplete here."""
        return bool(self._mixed or (self.backward and self.cause))

    def clear(self, *, unfinished: bool) -> None:
        """The user has asked the framework to clear its gradients. unfinished: as for `leave`."""
        if self._mixed or self.cause or unfinished:
            self._mixed = ""
            self.gradients.drop()

    def parted(self) -> BrokenStepError | None:
        """Alone, on a rank that had gone through only: all others have had an exception. With steps of others, on all: ranks of
        tensor parallelism have to begin the same batch."""
        return super().parted() if self.together or (self.told is not None and self.told.through) else None


@contextlib.contextmanager
def resetting(engine: Engine) -> Iterator[None]:
    """In here the framework forgets an iteration that was broken off: its collectives are waited for, but not wanted."""
    if engine.unfinished or any(port.under_way for port in engine.ports):
        engine.breakage.by("(reset of the iteration)", CommFuseError("the iteration was given up"))
    for port in engine.ports:
        port.giving_up = True
    try:
        yield
    finally:
        for port in engine.ports:
            port.giving_up = False
