"""Broken steps of transport `hierarchical`: what its two sides know of their peers, as one."""

from __future__ import annotations

from collections.abc import Callable, Collection

from commfuse_dp.errors import Where
from commfuse_dp.transport.base import NOWHERE, Left, Outcome, Recovery, Transport
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.one_sided.recovery import Rounds, recover_all


class BothRounds(Recovery):
    """Of one transport. siblings: ranks of its host, with whom `inner` speaks; `outer` speaks with all."""

    def __init__(
        self, transport: Transport, inner: OneSidedTransport, outer: OneSidedTransport, siblings: Collection[int]
    ) -> None:
        self._transport = transport
        self._inner, self._outer = inner.recovery, outer.recovery
        self._siblings = siblings

    def _of(self, peer: int) -> Rounds:
        return self._inner if peer in self._siblings else self._outer

    def tell_broken(self, epoch: int, reason: str, *, final: bool = False, absent: bool = False) -> None:
        self._inner.tell_broken(epoch, reason, final=final, absent=absent)
        self._outer.tell_broken(epoch, reason, final=final, absent=absent)

    def left(self, peer: int) -> Left | None:
        return self._of(peer).left(peer)

    def check(self, peer: int, ready: Callable[[], bool], where: Where, doing: str) -> None:
        self._of(peer).check(peer, ready, where, doing)

    def discard(self, channel: int) -> None:
        self._inner.discard(channel)
        self._outer.discard(channel)

    def outcome_of(self, peer: int, epoch: int) -> Outcome | None:
        return self._of(peer).outcome_of(peer, epoch)

    def all_sent(self, peer: int) -> bool:
        return self._of(peer).all_sent(peer)

    @property
    def held(self) -> int:
        return self._inner.held + self._outer.held

    def recover(self, epoch: int, where: Where = NOWHERE) -> None:
        recover_all(self._transport, (self._inner, self._outer), epoch, where)
