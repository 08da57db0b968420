"""Who the peers are, what they have told of their steps, and what has failed: the part of the one-sided protocol about ranks.

`departed` said goodbye (they will send nothing more: only a wait for one of them is an error), `lost` ended without (the
program has failed: every operation raises PeerLostError). The first survivor to see a loss tells all others who it was, so
that they name the dead rank and not the first survivor that gave up because of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from commfuse_dp.errors import PeerLostError, TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import Left, Outcome, Transport
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver
from commfuse_dp.transport.one_sided.rounds import Rounds


class Peers(Transport, Receiver):
    """See the module. members: as of OneSidedTransport."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: Channel,
        *,
        deadline_s: float,
        probe: Probe | None,
        members: Sequence[int] | None,
    ) -> None:
        super().__init__(rank, world_size, deadline_s=deadline_s, probe=probe)
        self._channel = channel
        self._peers = [peer for peer in (range(world_size) if members is None else members) if peer != rank]
        self._around = sorted(self._peers, key=lambda peer: (peer - rank) % world_size)
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._rounds = Rounds(self._peers)
        self._departed: set[int] = set()
        self._failure: tuple[int, str] | None = None  # (culprit or -1, reason)
        self._closed = False
        self._pid = os.getpid()
        self.on_news: Callable[[], None] | None = None  # in whichever thread, when something was taken in or lost

    # ---- broken steps ------------------------------------------------------------------------------------------------
    def tell_broken(self, epoch: int, reason: str, *, final: bool = False) -> None:
        if self._closed or self._failure is not None:
            return
        with self._lock:
            for peer in self._around:
                if peer not in self._departed:
                    self._channel.post(peer, self._rounds.broken(peer, epoch, reason, final=final))

    def left(self, peer: int) -> Left | None:
        return self._rounds.left.get(peer)

    def outcome_of(self, peer: int, epoch: int) -> Outcome | None:
        return self._rounds.outcomes.get((peer, epoch))

    def all_sent(self, peer: int) -> bool:
        return self._rounds.all_here(peer)

    def is_quiet(self, peer: int) -> bool:
        """The peer has ended the round, and nothing of it is on its way."""
        return self._rounds.is_quiet(peer) or peer in self._departed

    def is_clean(self, peer: int) -> bool:
        """The peer has begun this rank's round."""
        return self._rounds.is_clean(peer) or peer in self._departed

    # ---- progress ----------------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._check_open()
        if self._failure is None:
            self._channel.poll(timeout_s)
        if self._failure is not None:
            raise self._error()

    def wait_until(self, ready: Callable[[], bool], *, peer: int, where: Where, doing: str) -> None:
        def ready_or_gone() -> bool:
            if ready():
                return True
            self.check_departed(peer, ready, where, doing)
            return False

        with self.waiting_for(peer, where, doing):
            super().wait_until(ready_or_gone, peer=peer, where=where, doing=doing)

    def check_departed(self, peer: int, ready: Callable[[], bool], where: Where, doing: str) -> None:
        """Raise PeerLostError if `peer` has said goodbye, or that it is broken for good: what is waited for will not come."""
        left = self._rounds.left.get(peer)
        if left is not None and left.final and self._rounds.all_here(peer) and not ready():
            raise PeerLostError(
                f"rank {self.rank} waited for {self._channel.describe(peer)} {doing} ({where}; transport {self.name}), which "
                f"cannot go on: {left.reason}",
                rank=self.rank,
                peer=peer,
                where=where,
            )
        if peer in self._departed and not ready():  # asked again: an I/O thread may have come in between
            raise self._gone(peer, f"it was waited for {doing} ({where})", where)

    @contextlib.contextmanager
    def waiting_for(self, peer: int, where: Where, doing: str) -> Iterator[None]:
        """A loss that is heard of in here says what was waited for."""
        try:
            yield
        except PeerLostError as error:
            if error.where is None:
                who = f"rank {peer}" if peer >= 0 else "its peers"
                text = f"{error} Rank {self.rank} was waiting for {who}: {doing} ({where})."
                raise PeerLostError(text, rank=self.rank, peer=error.peer, where=where) from None
            raise

    @property
    def closed(self) -> bool:
        return self._closed

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
            self.changed.notify_all()
        if self.on_news is not None:
            self.on_news()

    def _post_all(self, message: bytes, *, hold: bool = False) -> None:
        """To every peer, beginning after this rank, so that not all ranks turn to rank 0 first."""
        with self._lock:
            for peer in self._around:
                if peer not in self._departed:
                    self._channel.post(peer, message, hold=hold)

    def _fail(self, culprit: int, reason: str) -> None:
        if self._failure is None:
            self._failure = (culprit, reason)

    def _error(self) -> TransportError:
        assert self._failure is not None
        culprit, reason = self._failure
        if culprit < 0:
            return TransportError(f"rank {self.rank}, transport {self.name}: {reason}")
        who = self._channel.describe(culprit)
        return PeerLostError(f"rank {self.rank} lost {who} (transport {self.name}): {reason}.", rank=self.rank, peer=culprit)

    def _gone(self, peer: int, what: str, where: Where | None = None) -> TransportError:
        """The error of a wait for a peer that has said goodbye. The program has failed: the other peers are told, too."""
        text = f"{self._channel.describe(peer)} has closed its transport {self.name}; {what}. It ended early: look at its log"
        with self._lock:
            if self._failure is None:
                self._failure = (peer, text)
                self._tell_others(peer, text)
            elif self._failure[0] not in (-1, peer):  # an I/O thread has heard of the first loss since the last progress()
                return self._error()  # the wait adds what it was for
        return PeerLostError(f"rank {self.rank}: {text}.", rank=self.rank, peer=peer, where=where)

    def _tell_others(self, culprit: int, reason: str) -> None:
        notice = msg.pack_abort(culprit, reason)
        for peer in self._peers:
            if peer != culprit and peer not in self._departed:
                self._channel.post(peer, notice)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"transport {self.name} of rank {self.rank} is closed")
