"""A step of the ranks of one transport, as it went on this rank, and how all of them come clean out of one that broke off.

    raises inside a step    the first cause is kept, and told to all peers at once             `by`, `forward_raised`
    waits for such a peer   BrokenStepError, once it is certain that what is waited for        `heed`
                            will never come: see [Note: Broken steps] in transport/base.py
    goes on all the same    BrokenStepError                                                    `check`
    the next step begins    every rank tells how its step ended, and hears how everybody's     `told`, `agree`
                            did; if they do not agree, or one was broken off, all recover

What a step consists of is the business of its kinds: gradients (engine/broken.py), calls (steps.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

from commfuse_dp.errors import BrokenStepError, CommFuseError, Where, in_a_line
from commfuse_dp.transport.base import Left, Outcome, Recovery, Transport


class StepState:
    """On one rank. It does not keep the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = weakref.ref(transport)
        self._rank, self._here = transport.rank, transport.membership.called(transport.rank)
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self.together: list[StepState] = []  # of other transports, whose steps are the same ones: what breaks one breaks all
        self.owed: list[str] = []  # causes of steps that were broken off here before they began: see `not_begun`
        self.begin(0)

    def begin(self, step: int) -> None:
        """A new step."""
        self.step = step
        self.cause = ""  # of the break in this step, if there is one
        self.complete = False  # a backward of this step came to its end
        self.told: Outcome | None = None  # how it ended here

    @property
    def _recovery(self) -> Recovery | None:
        transport = self._transport()
        return transport.recovery if transport is not None else None

    def _called(self, rank: int) -> int:
        transport = self._transport()
        return transport.membership.called(rank) if transport is not None else rank

    # ---- inside a step -----------------------------------------------------------------------------------------------
    def by(self, place: str, error: BaseException) -> None:
        """An exception broke this rank's step off. The first one counts."""
        self._tell(in_a_line(error, place))

    def forward_raised(self, error: BaseException) -> None:
        """The exception has come out of the root's forward: whoever catches it begins another step."""
        self.by("its forward", error)

    def interrupted(self, error: BaseException, *, tell: bool = True) -> None:
        """Ctrl-C has raised, wherever the program is."""
        if tell:
            self._tell(in_a_line(error, f"step {self.step}"))

    def _tell(self, cause: str) -> None:
        for state in (self, *self.together):
            state._break_off(cause)

    def _break_off(self, cause: str) -> None:
        if self.cause:
            return
        self.cause = cause
        self._say(f"rank {self._here}: {cause}")

    def give_up(self, cause: str) -> None:
        """This rank will never go on."""
        for state in (self, *self.together):
            state._say(cause, final=True)

    def not_begun(self, error: BaseException) -> None:
        """An exception has kept this rank from beginning the next step, in which its peers may be: it is lost. Whoever begins
        steps begins it all the same before its next one, and breaks it off (`break_owed`), so that ranks go on side by side.
        However many are owed, peers hear of the first: they come to the others only with this rank."""
        if self._recovery is not None:
            self.owed.append(in_a_line(error, f"the start of step {self.step + len(self.owed) + 1}"))
            for state in (self, *self.together):
                state._say(f"rank {self._here}: {self.owed[-1]}", absent=True)

    def break_owed(self) -> None:
        """The step that has just begun is one of those."""
        self._tell(self.owed.pop(0))

    def _say(self, cause: str, *, final: bool = False, absent: bool = False) -> None:
        recovery = self._recovery
        if recovery is not None:
            with contextlib.suppress(CommFuseError):
                recovery.tell_broken(self.step + absent, cause, final=final, absent=absent)

    def check(self) -> None:
        """Raises BrokenStepError if the step was broken off here."""
        if self.cause:
            raise BrokenStepError(
                f"rank {self._here}: step {self.step} was broken off ({self.cause}); begin a new forward of the model",
                rank=self._here,
                peer=self._here,
            )

    def heed(self, peer: int, where: Where, doing: str, come: Callable[[], bool]) -> None:
        """Raises BrokenStepError if `peer` has left this step, and what is waited for was not among what it has sent."""
        recovery = self._recovery
        left = recovery.left(peer) if recovery is not None else None
        if recovery is None or left is None or left.epoch < self.step or not self._has_done(peer, doing, recovery) or come():
            return
        raise self._lost(left, peer, where, doing)

    def heed_absence(self, peer: int, where: Where, doing: str, come: Callable[[], bool]) -> None:
        """`heed`, for what a peer has published if it has begun the step."""
        recovery = self._recovery
        left = recovery.left(peer) if recovery is not None else None
        if left is not None and left.absent and left.epoch == self.step and not come():  # of the step before it has
            raise self._lost(left, peer, where, doing)

    def _lost(self, left: Left, peer: int, where: Where, doing: str) -> BrokenStepError:
        member = self._called(peer)
        reason = left.reason or (
            f"rank {member} has begun the step after step {self.step} without going through with this one; an exception "
            "outside CommFuse's layers was caught there, look at its log, or it runs another program"
        )
        return BrokenStepError(
            f"rank {self._here} waited for rank {member}: {doing} ({where}). It will not come: {reason}. This step is lost; "
            "catch the exception on all ranks, clear the gradients and go on with the next one, or stop all ranks.",
            rank=self._here,
            peer=member,
            where=where,
        )

    def _has_done(self, peer: int, doing: str, recovery: Recovery) -> bool:
        """A peer that has left has done all that it will do of what is waited for."""
        return recovery.all_sent(peer)

    # ---- between steps -----------------------------------------------------------------------------------------------
    def outcomes(self) -> dict[int, Outcome]:
        """How the step has ended, after `wait_finished`, on all ranks that have not said goodbye."""
        recovery = self._recovery
        everyone = {peer: recovery.outcome_of(peer, self.step) for peer in self._peers} if recovery is not None else {}
        everyone[self._rank] = self.told
        return {rank: outcome for rank, outcome in sorted(everyone.items()) if outcome is not None}

    def agree(self) -> bool:
        """Whether the step is lost: broken off on some rank, or ranks did not do the same. All ranks decide alike."""
        outcomes = list(self.outcomes().values())
        return any(outcome.broken or not outcome.alike(outcomes[0]) for outcome in outcomes)

    def why(self) -> str:
        """What broke the step off, as far as it is known here."""
        states = (self, *self.together)
        told = [state.cause for state in states] + [reason for state in states for reason in state._reasons()]
        return next(filter(None, told), "ranks did not do the same")

    def _reasons(self) -> list[str]:
        recovery = self._recovery
        lefts = map(recovery.left, self._peers) if recovery is not None else ()
        return [left.reason for left in lefts if left is not None and left.epoch == self.step]

    def parted(self) -> BrokenStepError | None:
        """What is to be raised after a step that was lost, if some ranks went through with it."""
        states = (self, *self.together)
        through = {state._called(rank) for state in states for rank, how in state.outcomes().items() if how.through}
        if not through:
            return None
        who = "other ranks" if self.together else f"ranks {sorted(through)}"
        return BrokenStepError(
            f"rank {self._here}: step {self.step} was lost ({self.why()}), but {who} went through with it. If their "
            "optimizers took a step, the parameters of the ranks do not belong together: load the last checkpoint then. "
            "Communication goes on with the next step.",
            rank=self._here,
            peer=next((rank for rank in sorted(through) if rank != self._here), self._here),
        )
