"""Errors a user can meet. Each says what was given, what is allowed and how to fix it."""

from __future__ import annotations

from typing import NamedTuple


class Where(NamedTuple):
    """The place in a step that a wait belongs to; every error of a wait carries one."""

    layer: str = "?"
    step: int = -1
    slice: str = "?"
    nbytes: int = 0

    def __str__(self) -> str:
        return f"layer {self.layer!r}, step {self.step}, slice {self.slice}, {self.nbytes} bytes"


# Behind every error of streams that were released: see [Note: Release] in transport/streams/watch.py.
STEP_LOST = (
    "What streams waited for was replaced by NaN, and an optimizer step that was enqueued behind it has run: the parameters of "
    "this rank may be lost. Resume from the last checkpoint."
)


class CommFuseError(RuntimeError):
    """Base of all errors raised by commfuse_dp."""


class ConfigError(CommFuseError, ValueError):
    """A setting that cannot be met: key, value, what is allowed, the fix."""


class MismatchError(CommFuseError):
    """Ranks were started with different models, layouts or configurations."""


class TransportError(CommFuseError):
    """A transport could not be set up or broke; the message names the reason and the fix."""


class _OfAPeer(CommFuseError):
    """`rank`, `peer`: numbers in the default group, as in all errors."""

    def __init__(self, message: str, *, rank: int, peer: int, where: Where | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.where = where


class PeerLostError(_OfAPeer, TransportError):
    """A peer died or left in the middle of a step."""


class BrokenStepError(_OfAPeer):
    """A step was broken off on some ranks only: `peer` did not go through with what this rank counts on. The step is lost on
    all ranks, the next one is not."""


class DeadlineError(_OfAPeer, TransportError, TimeoutError):
    """A wait passed its deadline. `peer` is the rank waited for, or -1 when several were."""


def in_a_line(error: BaseException, place: str) -> str:
    """What an exception that came out of `place` says, for ranks that it did not reach. A BrokenStepError names another's."""
    text = str(error).split("\n", 1)[0]
    if isinstance(error, BrokenStepError):
        return text
    return f"{type(error).__name__}{': ' if text else ''}{text} in {place}"
