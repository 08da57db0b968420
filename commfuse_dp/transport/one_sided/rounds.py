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

from collections.abc import Sequence

from commfuse_dp.transport.base import Left, Outcome
from commfuse_dp.transport.one_sided import messages as msg

_IN_DOUBT = 0xFFFFFFFF  # Outcome.calls of -1 in a header


class Rounds:
    """What a rank and its peers have told each other of steps that they left. Changed under the transport's lock only."""

    def __init__(self, peers: Sequence[int]) -> None:
        self._peers = peers
        self.sent = dict.fromkeys(peers, 0)  # deposits
        self.taken = dict.fromkeys(peers, 0)
        self.left: dict[int, Left] = {}
        self.outcomes: dict[tuple[int, int], Outcome] = {}  # (peer, epoch), of epochs that this rank has not gone past
        self.round = 0  # recoveries so far
        self.discarded = 0  # channel whose messages are dropped as they come; 0: none
        self._recovered = 0  # epoch of the last one
        self._ended = 0  # epoch after which this rank has ended a round
        self._quiet = dict.fromkeys(peers, (0, 0))  # round that each peer has ended, and its deposits up to then
        self._begun = dict.fromkeys(peers, 0)  # round that each peer has begun

    # ---- telling -----------------------------------------------------------------------------------------------------
    def finish(self, peer: int, epoch: int, outcome: Outcome) -> bytes:
        """The FINISH for one peer."""
        self.outcomes.pop((peer, epoch - 1), None)
        calls = _IN_DOUBT if outcome.calls < 0 else outcome.calls
        return msg.pack(msg.FINISH, outcome.broken | outcome.mixed << 1, epoch, outcome.scatters, calls, x=self.sent[peer])

    def broken(self, peer: int, epoch: int, reason: str, *, final: bool) -> bytes:
        return msg.pack_broken(epoch, self.sent[peer], reason, final=final)

    def end(self, epoch: int) -> bool:
        """The round ends with `epoch`; False: it has ended already."""
        if self._ended >= epoch:
            return False
        self._ended = epoch
        return True

    def quiet(self, peer: int) -> bytes:
        """What one peer is told then."""
        return msg.pack(msg.ROUND, self.round, 0, x=self.sent[peer])

    def begin(self, epoch: int) -> bool:
        """A new round, after `epoch`; False: it has begun already."""
        if self._recovered >= epoch:
            return False
        self.round += 1
        self.discarded = 0
        self._recovered = epoch
        return True

    # ---- hearing -----------------------------------------------------------------------------------------------------
    def on_finish(self, src: int, flags: int, epoch: int, scatters: int, calls: int, sent: int) -> None:
        before = self.left.get(src)
        if before is None or before.epoch < epoch:
            self.left[src] = Left(epoch, sent)
        elif before.epoch == epoch:
            self.left[src] = before._replace(sent=max(sent, before.sent))
        calls = -1 if calls == _IN_DOUBT else calls
        self.outcomes[src, epoch] = Outcome(bool(flags & 1), scatters, calls, bool(flags & 2))

    def on_broken(self, src: int, final: int, epoch: int, sent: int, reason: str) -> None:
        self.left[src] = Left(epoch, sent, reason, bool(final))

    def on_round(self, src: int, number: int, begun: int, sent: int) -> None:
        if begun:
            self._begun[src] = max(number, self._begun[src])
        else:
            self._quiet[src] = max((number + 1, sent), self._quiet[src])

    # ---- state -------------------------------------------------------------------------------------------------------
    def all_here(self, peer: int) -> bool:
        """All deposits that the peer has told of."""
        left = self.left.get(peer)
        return left is not None and self.taken[peer] >= left.sent

    def is_quiet(self, peer: int) -> bool:
        ended, sent = self._quiet[peer]
        begun = self._recovered == self._ended  # this rank was through with this before, and is asked again
        return begun or (ended > self.round and self.taken[peer] >= sent)

    def is_clean(self, peer: int) -> bool:
        return self._begun[peer] >= self.round
