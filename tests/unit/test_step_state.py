"""What a rank that is kept from beginning a step tells its peers, and whom that stops. Two ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_dp.collectives.step_state import StepState
from commfuse_dp.errors import BrokenStepError, Where
from commfuse_dp.transport.base import Left
from commfuse_dp.transport.membership import Membership

WHERE = Where("layer", 0, "parameters")


class Told:
    """The recovery of one rank: what it tells is here at once."""

    def __init__(self) -> None:
        self.here: Left | None = None

    def tell_broken(self, epoch: int, reason: str, *, final: bool = False, absent: bool = False) -> None:
        self.here = Left(epoch, 0, reason, final, absent)


class Hearing:
    """The recovery of its peer."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def left(self, peer: int) -> Left | None:
        return self._told.here

    def all_sent(self, peer: int) -> bool:
        return True


class End:
    """A transport on one rank."""

    world_size = 2

    def __init__(self, rank: int, recovery: Any) -> None:
        self.rank, self.recovery = rank, recovery
        self.membership = Membership(self.world_size)


class Pair:
    """Both ends of a transport."""

    def __init__(self) -> None:
        self.told = Told()
        self._ends: list[Any] = [End(0, self.told), End(1, Hearing(self.told))]  # steps do not keep them
        self.absent, self.peer = (StepState(end) for end in self._ends)

    def begin(self, absent: int, peer: int) -> None:
        self.absent.begin(absent)
        self.peer.begin(peer)

    def wait(self) -> None:
        self.peer.heed_absence(0, WHERE, "to publish", lambda: False)


@pytest.mark.parametrize("owed", [1, 3])
def test_it_stops_who_is_in_the_step_that_was_not_begun(owed):
    pair = Pair()
    pair.begin(4, 5)
    for _ in range(owed):  # it tries again, and is interrupted again
        pair.absent.not_begun(KeyboardInterrupt())
    assert len(pair.absent.owed) == owed
    with pytest.raises(BrokenStepError, match="KeyboardInterrupt"):
        pair.wait()


@pytest.mark.parametrize("owed", [1, 3])
def test_it_does_not_stop_who_is_in_the_step_before(owed):
    """The slices of that step are published: they are on their way."""
    pair = Pair()
    pair.begin(4, 4)
    for _ in range(owed):
        pair.absent.not_begun(KeyboardInterrupt())
    pair.wait()


def test_of_several_that_are_owed_the_next_is_not_begun_either():
    pair = Pair()
    pair.begin(4, 5)
    pair.absent.not_begun(KeyboardInterrupt())
    pair.absent.not_begun(KeyboardInterrupt())
    pair.begin(5, 6)  # the first of them is caught up with
    pair.absent.break_owed()
    pair.wait()
    pair.absent.not_begun(KeyboardInterrupt())
    with pytest.raises(BrokenStepError):
        pair.wait()


def test_peers_of_other_transports_hear_of_it():
    """Each in the numbers of its own steps."""
    pair, other = Pair(), Pair()
    pair.begin(4, 5)
    other.begin(7, 8)
    pair.absent.together = [other.absent]
    pair.absent.not_begun(KeyboardInterrupt())
    assert not other.absent.owed  # who begins steps begins both
    assert other.told.here is not None and (other.told.here.epoch, other.told.here.absent) == (8, True)
    with pytest.raises(BrokenStepError, match="KeyboardInterrupt"):
        other.peer.heed(0, WHERE, "to send a partial", lambda: False)
    with pytest.raises(BrokenStepError):
        pair.wait()
