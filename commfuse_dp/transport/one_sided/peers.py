"""Who the peers are, and what has failed: the part of the one-sided protocol about ranks.

`departed` said goodbye (they will send nothing more: only a wait for one of them is an error), `lost` ended without (the
program has failed: every operation raises PeerLostError). The first survivor to see a loss tells all others who it was, so
that they name the dead rank and not the first survivor that gave up because of it. Who stands in several groups tells the
others, too (transport/membership.py): there the dead rank is none of the peers, and has a number above theirs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from commfuse_dp.errors import PeerLostError, TransportError, Where
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.checks import is_closed
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver


class Peers(Transport, Receiver):
    """See the module."""

    def _meet(self, channel: Channel, members: Sequence[int]) -> None:
        """members: as of OneSidedTransport."""
        rank, world_size = self.rank, self.world_size
        self._channel = channel
        self._peers = [peer for peer in members if peer != rank]
        self._around = sorted(self._peers, key=lambda peer: (peer - rank) % world_size)
        self._lock = threading.RLock()
        self._departed: set[int] = set()
        self._failure: tuple[int, str] | None = None  # (culprit or -1, reason)
        self._early = ""  # the reason, if it is that a peer has said goodbye too early
        self._closed = False
        self._pid = os.getpid()
        self.counters = self.probe.counters  # of bytes; a side of another transport may count apart
        self.whole: Transport = self  # what it is a part of: a wait on one side must hear of a loss on another
        self._passed_on = False
        self.membership.hear_lost.append(self._hear_lost)
        self.on_news: Callable[[], None] | None = None  # in whichever thread, when something was taken in or lost

    # ---- progress ----------------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        if self._failure is None and not self._closed:
            with self._lock:
                self._channel.push()
        self._poll(timeout_s)

    def _poll(self, timeout_s: float = 0.0) -> None:
        """`progress` for what comes in: notices that wait for company go on waiting for it."""
        if self._closed:
            self._check_open()
        if self._failure is None:
            self._channel.poll(timeout_s)
        if self._failure is not None:
            raise self._error()

    def wake(self) -> None:
        """Let a `progress` that sleeps in the user's thread return soon. From any thread."""
        self._channel.wake()

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank has failed: their waits end at once with a PeerLostError that gives `reason`."""
        if not self._closed:
            self._post_all(msg.pack_abort(self.rank, reason))

    # ---- losses ------------------------------------------------------------------------------------------------------
    def lost(self, src: int, reason: str) -> None:
        with self._lock:
            if src in self._departed or self._closed:
                return
            if self._failure is None:
                self._tell_others(src, reason)
            self._fail(src, reason)
        if self.on_news is not None:
            self.on_news()

    def _hear_lost(self, member: int, reason: str) -> None:
        with self._lock:
            if self._failure is None and not self._closed:
                culprit = self.whole.membership.rank_of(member)
                self._tell_others(culprit, reason)
                self._fail(culprit, reason)

    def _post_all(self, message: bytes) -> None:
        """To every peer."""
        self._post_each(lambda peer: message)

    def _post_each(self, message: Callable[[int], bytes]) -> None:
        """message(peer) to every peer, beginning after this rank, so that not all ranks turn to rank 0 first."""
        with self._lock:
            for peer in self._around:
                if peer not in self._departed:
                    self._channel.post(peer, message(peer))

    def _fail(self, culprit: int, reason: str) -> None:
        if self._failure is None:
            self._failure = (culprit, reason)

    def _error(self) -> TransportError:
        assert self._failure is not None
        culprit, reason = self._failure
        here = self._called(self.rank)
        if culprit < 0:
            return TransportError(f"rank {here}, transport {self.name}: {reason}")
        self._pass_on(self._called(culprit), reason)
        who = self._describe(culprit) if culprit < self.world_size else f"rank {self._called(culprit)}"
        return PeerLostError(
            f"rank {here} lost {who} (transport {self.name}): {reason}.", rank=here, peer=self._called(culprit)
        )

    def _pass_on(self, member: int, reason: str) -> None:
        if not self._passed_on:
            self._passed_on = True
            for tell in self.whole.membership.when_lost:
                tell(member, reason)

    def _called(self, rank: int) -> int:
        return self.whole.membership.called(rank)

    def _describe(self, peer: int) -> str:
        return self._channel.describe(peer, self._called(peer))

    def _gone(self, peer: int, what: str, where: Where | None = None) -> TransportError:
        """The error of a wait for a peer that has said goodbye. The program has failed: the other peers are told, too."""
        text = f"{self._describe(peer)} has closed its transport {self.name}; {what}. It ended early: look at its log"
        with self._lock:
            if self._failure is None:
                self._failure = (peer, text)
                self._early = text
                self._tell_others(peer, text)
            # An I/O thread has heard of the first loss since the last progress(), or of why this peer has closed.
            heard = self._failure[0] >= 0 and self._failure[1] != self._early
        if heard:
            return self._error()  # the wait adds what it was for
        here, member = self._called(self.rank), self._called(peer)
        self._pass_on(member, text)
        return PeerLostError(f"rank {here}: {text}.", rank=here, peer=member, where=where)

    def _tell_others(self, culprit: int, reason: str) -> None:
        notice = msg.pack_abort(culprit, reason)
        for peer in self._peers:
            if peer != culprit and peer not in self._departed:
                self._channel.post(peer, notice)

    def _check_open(self) -> None:
        if self._closed:
            raise is_closed(self.name, self._called(self.rank))
