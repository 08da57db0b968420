"""How one-sided transports recover from a step that was broken off: what [Note: Broken steps] in base.py promises, by counting.

Per pair both ends count deposits. FINISH and BROKEN carry the sender's count: who has them all and still misses one will never
get it. `recover` has two parts, with all ranks in each:

1. A round ends: every rank says how many deposits it has sent in all, and sends no more. When they are here, nothing is on its
   way into this rank's inbox. It is emptied, and the own rings begin anew as if nothing had been reserved; credits of what was
   dropped are not given one by one.
2. A round begins: when every peer has said so, their inboxes are empty, too, and may be written to.

A credit that was given before and comes late would free a place of the new round, so CREDIT carries the number of its round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from commfuse_dp.errors import PeerLostError, Where
from commfuse_dp.transport.base import NOWHERE, Left, Outcome, Recovery, Tag, Transport
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.waiting import wait_until

if TYPE_CHECKING:
    from commfuse_dp.transport.one_sided.protocol import OneSidedTransport

_IN_DOUBT = 0xFFFFFFFF  # Outcome.calls of -1 in a header


class Rounds(Recovery):
    """Of one transport, whose friend it is. What peers have told is changed under the transport's lock only."""

    def __init__(self, transport: OneSidedTransport) -> None:
        self._transport = transport
        peers = self.peers = transport._peers
        self.sent = dict.fromkeys(peers, 0)  # deposits
        self.taken = dict.fromkeys(peers, 0)
        self._left: dict[int, Left] = {}
        self._outcomes: dict[tuple[int, int], Outcome] = {}  # (peer, epoch), of epochs that this rank has not gone past
        self.round = 0  # recoveries so far
        self.discarded = 0  # channel whose messages are dropped as they come; 0: none
        self._recovered = 0  # epoch of the last one
        self._ended = 0  # epoch after which this rank has ended a round
        self._quiet = dict.fromkeys(peers, (0, 0))  # round that each peer has ended, and its deposits up to then
        self._begun = dict.fromkeys(peers, 0)  # round that each peer has begun

    # ---- a broken step -----------------------------------------------------------------------------------------------
    def tell_broken(self, epoch: int, reason: str, *, final: bool = False, absent: bool = False) -> None:
        transport = self._transport
        if transport._closed or transport._failure is not None:
            return
        transport._post_each(lambda peer: msg.pack_broken(epoch, self.sent[peer], reason, final | absent << 1))

    def left(self, peer: int) -> Left | None:
        return self._left.get(peer)

    def check(self, peer: int, ready: Callable[[], bool], where: Where, doing: str) -> None:
        transport, left = self._transport, self._left.get(peer)
        if left is not None and left.final and self.all_sent(peer) and not ready():
            here, member = transport._called(transport.rank), transport._called(peer)
            raise PeerLostError(
                f"rank {here} waited for {transport._describe(peer)} {doing} ({where}; transport "
                f"{transport.name}), which cannot go on: {left.reason}",
                rank=here,
                peer=member,
                where=where,
            )
        if peer in transport._departed and not ready():  # asked again: an I/O thread may have come in between
            raise transport._gone(peer, f"it was waited for {doing} ({where})", where)

    def discard(self, channel: int) -> None:
        transport = self._transport
        with transport._lock:
            self.discarded = channel
            for src, tag in [name for name in transport._inbox if name[1][0] == channel]:
                transport.release((src,), Tag(*tag))

    def outcome_of(self, peer: int, epoch: int) -> Outcome | None:
        return None if peer in self._transport._departed else self._outcomes.get((peer, epoch))

    def all_sent(self, peer: int) -> bool:
        left = self._left.get(peer)
        return left is not None and self.taken[peer] >= left.sent

    @property
    def held(self) -> int:
        transport = self._transport
        with transport._lock:
            return len(transport._inbox) + sum(ring.live for ring in transport._outbox.values())

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def recover(self, epoch: int, where: Where = NOWHERE) -> None:
        recover_all(self._transport, (self,), epoch, where)

    def end_round(self, epoch: int) -> None:
        """The first part of `recover`. Does nothing the second time."""
        transport = self._transport
        with transport._lock:
            if self._ended < epoch:
                self._ended = epoch
                for peer in self.peers:
                    transport._channel.post(peer, msg.pack(msg.ROUND, self.round, 0, x=self.sent[peer]))

    def is_quiet(self, peer: int) -> bool:
        """The peer has ended the round, and nothing of it is on its way."""
        ended, sent = self._quiet[peer]
        begun = self._recovered == self._ended  # this rank was through with this before, and is asked again
        return begun or (ended > self.round and self.taken[peer] >= sent) or peer in self._transport._departed

    def clean(self, epoch: int) -> None:
        """The second part, once all peers are quiet. Does nothing the second time."""
        transport = self._transport
        with transport._lock:
            if self._recovered < epoch:
                self._recovered = epoch
                self.round += 1
                self.discarded = 0
                transport._inbox.clear()
                for ring in transport._outbox.values():
                    ring.reset()
                transport._post_all(msg.pack(msg.ROUND, self.round, 1))

    def is_clean(self, peer: int) -> bool:
        """The peer has begun this rank's round."""
        return self._begun[peer] >= self.round or peer in self._transport._departed

    # ---- telling and hearing -----------------------------------------------------------------------------------------
    def finish(self, peer: int, epoch: int, outcome: Outcome) -> bytes:
        """The FINISH for one peer."""
        self._outcomes.pop((peer, epoch - 1), None)
        calls = _IN_DOUBT if outcome.calls < 0 else outcome.calls
        flags = outcome.broken | outcome.mixed << 1 | outcome.through << 2
        return msg.pack(msg.FINISH, flags, epoch, outcome.scatters, calls, x=self.sent[peer])

    def on_finish(self, src: int, flags: int, epoch: int, scatters: int, calls: int, sent: int) -> None:
        before = self._left.get(src)
        if before is None or before.epoch < epoch:
            self._left[src] = Left(epoch, sent)
        elif before.epoch == epoch:
            self._left[src] = before._replace(sent=max(sent, before.sent))
        calls = -1 if calls == _IN_DOUBT else calls
        self._outcomes[src, epoch] = Outcome(bool(flags & 1), scatters, calls, bool(flags & 2), bool(flags & 4))

    def on_broken(self, src: int, flags: int, epoch: int, sent: int, reason: str) -> None:
        self._left[src] = Left(epoch, sent, reason, bool(flags & 1), bool(flags & 2))

    def on_round(self, src: int, number: int, begun: int, sent: int) -> None:
        if begun:
            self._begun[src] = max(number, self._begun[src])
        else:
            self._quiet[src] = max((number + 1, sent), self._quiet[src])


def recover_all(transport: Transport, sides: Sequence[Rounds], epoch: int, where: Where) -> None:
    """`Recovery.recover` of a transport that has several sides: none begins a round before all have ended theirs. The waits are
    the transport's, so that a wait on one side hears of a loss on another."""
    pairs = [(side, peer) for side in sides for peer in side.peers]
    for side in sides:
        side.end_round(epoch)
    for side, peer in pairs:
        doing = "messages that it sent before its step was broken off"
        wait_until(transport, partial(side.is_quiet, peer), peer=peer, where=where, doing=doing)
    for side in sides:
        side.clean(epoch)
    for side, peer in pairs:
        doing = "to drop the messages of the step that was broken off"
        wait_until(transport, partial(side.is_clean, peer), peer=peer, where=where, doing=doing)
