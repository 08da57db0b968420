"""Steps that an exception has broken off, here or on another rank, and how all ranks come to begin the next one clean.

    raises inside a step    the first cause is kept, and told to all peers at once             `by`
    waits for such a peer   BrokenStepError, once it is certain that what is waited for        `heed`
                            will never come: see [Note: Broken steps] in transport/base.py
    begin_step              every rank tells how its step ended, and hears how everybody's     `outcome`, `agree`
                            did; if they do not agree, or one was broken off, all recover

A rank that went through with a step which others lost raises once, at the start of the next: its optimizer may have moved on
alone. Where the lost backward added to gradients of earlier ones, no rank goes on before they are cleared: see `Gradients`.
Transports that do not recover (streams) go another way, see `GradientStream.discard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from commfuse_dp.errors import BrokenStepError, CommFuseError, Where, in_a_line
from commfuse_dp.transport.base import Outcome, Transport

ROOM = "a free slot in its gradient inbox"  # what a rank waits for that has no credit


class Gradients:
    """What the framework accumulates over several backwards, of served layers and of all others. This one: nothing."""

    fix = ""  # the call that clears it

    def present(self, *, closely: bool = False) -> bool:
        """Whether gradients of earlier backwards are there. closely: zeros do not count, and the answer may take its time."""
        return False

    def drop(self) -> None:
        """A backward was broken off: all is to be as after an optimizer step."""


class Breakage:
    """Of one engine."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._recovery = transport.recovery
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self.step = 0
        self.cause = ""  # of the break in this step, if there is one
        self._forward = ""  # an exception of this step's forward
        self.layer = "?"  # whose backward was begun last
        self.scatters = 0  # reduce-scatters begun in this step
        self.complete = False  # a backward of this step came to its end
        self.backward = False  # one was begun in this step
        self.gradients = Gradients()
        self.onto = False  # it was begun with gradients of earlier ones present
        self._mixed = ""  # what has happened, as long as gradients have to be cleared
        self._told: Outcome | None = None  # how this step ended
        self._agreed = False  # that this step is lost

    def begin(self, step: int) -> None:
        """A new step."""
        self._forward = ""
        self.step, self.cause, self.layer, self.scatters, self.complete = step, "", "?", 0, False
        self._told, self._agreed = None, False
        self.backward = self.onto = False

    # ---- inside a step -----------------------------------------------------------------------------------------------
    def by(self, layer: str, error: BaseException) -> None:
        """An exception has come out of what the engine did for a layer. The first one counts."""
        if not self.cause:
            self._tell(in_a_line(error, self._place(layer)))

    def begin_backward(self) -> None:
        """Before it has added to any gradient."""
        self.onto = self.onto or self.complete or self.gradients.present()
        self.backward = True

    def in_forward(self, layer: str, error: BaseException) -> None:
        """An exception has come out of a layer's forward. That alone breaks nothing off: whoever caught it may go on."""
        self._forward = self._forward or in_a_line(error, self._place(layer))

    def forward_raised(self, error: BaseException) -> None:
        """The exception has come out of the root's forward: whoever catches it begins another step."""
        if not self.cause:
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

    def _tell(self, cause: str) -> None:
        self.cause = cause
        if self._recovery is None:
            return
        with contextlib.suppress(CommFuseError):
            self._recovery.tell_broken(self.step, f"rank {self._transport.rank}: {cause}")

    def heed(self, peer: int, where: Where, doing: str, come: Callable[[], bool]) -> None:
        """Raises BrokenStepError if `peer` has left this step, and what is waited for was not among what it has sent."""
        recovery = self._recovery
        left = recovery.left(peer) if recovery is not None else None
        if recovery is None or left is None or left.epoch < self.step:
            return
        if doing is ROOM:  # it makes room if it knows that its step is lost
            outcome = recovery.outcome_of(peer, self.step)
            if outcome is None or outcome.broken:
                return
        elif not recovery.all_sent(peer):
            return
        if not come():
            raise BrokenStepError(
                f"rank {self._transport.rank} waited for rank {peer}: {doing} ({where}). It will not come: "
                f"{left.reason or self._guess(peer)}. This step is lost; catch the exception on all ranks and go on with the "
                "next one, or stop all ranks.",
                rank=self._transport.rank,
                peer=peer,
                where=where,
            )

    def _guess(self, peer: int) -> str:
        return (
            f"rank {peer} has begun the step after step {self.step} without going through with this one; an exception outside "
            "CommFuse's layers was caught there, look at its log, or it runs another program"
        )

    # ---- between steps -----------------------------------------------------------------------------------------------
    def outcome(self, calls: int) -> Outcome:
        """How the step has ended here. Asked again, it says the same."""
        if self._told is None:
            broken = bool(self.cause) or calls < 0
            self._told = Outcome(broken, self.scatters, calls, self.onto and self.gradients.present(closely=broken))
        return self._told

    def agree(self) -> list[int] | None:
        """After `wait_finished`: the ranks that broke the step off, if it has to be recovered from; else None.

        All ranks decide alike. An empty list: nobody knows of an exception, but ranks did not do the same."""
        if self._agreed or self._told is None:
            return None
        theirs = dict(zip(self._peers, self._outcomes(), strict=True))
        known = {peer: outcome for peer, outcome in theirs.items() if outcome is not None}
        broken = [peer for peer, outcome in known.items() if outcome.broken]
        if self._told.broken:
            broken.append(self._transport.rank)
        if broken or not all(outcome.alike(self._told) for outcome in known.values()):
            return sorted(broken)
        return None

    def _outcomes(self) -> list[Outcome | None]:
        """How the step ended on the peers."""
        return [self._recovery.outcome_of(peer, self.step) for peer in self._peers] if self._recovery is not None else []

    def same_calls(self) -> bool:
        """Whether all ranks have begun the same plain collectives, and none of those is in doubt."""
        assert self._told is not None
        others = self._outcomes()
        return self._told.calls >= 0 and all(other is not None and other.calls == self._told.calls for other in others)

    def lose_gradients(self) -> bool:
        """All ranks know that the step is lost, and nothing of it is under way any more. True, on all ranks if on one: it has
        added to gradients of earlier ones. Otherwise what it has left is dropped."""
        self._agreed = True
        outcomes = [self._told, *self._outcomes()]
        if any(outcome is not None and outcome.mixed for outcome in outcomes):
            self._mixed = self.cause or "it was broken off on another rank"
        elif self.backward:
            self.gradients.drop()
        return bool(self._mixed)

    @property
    def lost(self) -> bool:
        """All ranks know that the step is lost."""
        return self._agreed

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
        rank, cause = self._transport.rank, self._mixed or self.cause or "an exception in its backward"
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

    def recovered(self, broken: list[int]) -> None:
        """All is clean again. Raises BrokenStepError, once, on a rank that had gone through with the step."""
        if self.cause or not self.complete:
            return  # this rank has had its exception
        peer = next((rank for rank in broken if rank != self._transport.rank), -1)
        left = self._recovery.left(peer) if peer >= 0 and self._recovery is not None else None
        reason = left.reason if left is not None and left.reason else "it was broken off there"
        raise BrokenStepError(
            f"rank {self._transport.rank} has gone through with step {self.step}, but on rank {peer} it was lost: {reason}. "
            "Parameters differ from what one step on all ranks gives if an optimizer step followed on this rank only: load the "
            "last checkpoint then. Communication goes on with the next step.",
            rank=self._transport.rank,
            peer=peer,
        )
