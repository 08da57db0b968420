"""Who the ranks of a transport are in the default group, and how the loss of one crosses from one group of ranks to another.

Errors speak of numbers in the default group; only what a call was given wrongly (ValueError) is said as it was given, a rank of
the transport. A model with replicas, or with tensor parallelism below data parallelism, has several groups and a transport in
each: what one of them loses the others hear of (`when_lost`, `tell_lost`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Membership:
    def __init__(self, world_size: int, numbers: Sequence[int] | None = None) -> None:
        self._world_size = world_size
        self.numbers = numbers  # in the default group; None: the same
        # Called once, with a number in the default group and how it was lost: whoever else must know.
        self.when_lost: list[Callable[[int, str], object]] = []
        # Of the transport itself and its parts: the peers hear of the loss, and their waits end.
        self.hear_lost: list[Callable[[int, str], object]] = []

    def called(self, rank: int) -> int:
        """The number in the default group of one of the ranks. Above these: of a rank of another group, see `rank_of`."""
        if rank >= self._world_size:
            return rank - self._world_size
        return self.numbers[rank] if self.numbers is not None and rank >= 0 else rank

    def rank_of(self, number: int) -> int:
        """The opposite of `called`: a rank that is none of these has a number above theirs."""
        numbers = self.numbers if self.numbers is not None else range(self._world_size)
        return list(numbers).index(number) if number in numbers else self._world_size + number

    def tell_lost(self, number: int, reason: str) -> None:
        """Rank `number` of the default group is lost, as another group has found."""
        for hear in self.hear_lost:
            hear(number, reason)


def numbers_of(exchange: object) -> Sequence[int] | None:
    """Who takes part in an exchange of `exchange_of`; None: the ranks' own numbers, which is all that another one tells."""
    numbers: Sequence[int] | None = getattr(exchange, "numbers", None)
    return numbers


def called_in(exchange: object, rank: int) -> int:
    """The number in the default group of a rank that takes part in an exchange, for errors."""
    numbers = numbers_of(exchange)
    return rank if numbers is None else numbers[rank]


__all__ = ["Membership", "called_in", "numbers_of"]
