"""The watchdog of transport `symmetric`: streams wait for words, which a thread can read and write.

    deadline         a word that has not come within deadline_s                  DeadlineError: who, layer, step, slice, bytes
    other program    a word that holds another message's fingerprint             MismatchError, at once
    dead peer        its control socket ended without a goodbye                  PeerLostError, at once
    departed peer    it said goodbye, so whatever it wrote is there              PeerLostError, if a word is still missing

After a failure the thread writes the awaited words itself: see [Note: Release] in streams/watch.py. What it spoils before are
this rank's inboxes, its own segments, what it has computed for others, and the segments of peers that are gone. Memory of a
peer that lives is left alone, for its own step may be sound; it is told, and spoils its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Device, Word, reached
from commfuse_dp.errors import MismatchError, PeerLostError, TransportError, Where
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver
from commfuse_dp.transport.streams.watch import Failure, Watchdog, Watched

SUSPECT_S = 1.0  # a wait that lasts so long is looked into


class Condition(NamedTuple):
    """A word that a stream waits for."""

    peer: int
    pad: torch.Tensor
    place: int
    value: int
    exact: bool = False
    before: int = 0  # exact: what the word holds until then


Awaited = tuple[int, torch.Tensor, int, int, bool, int]  # a Condition, or what it is made of, as in WordLike
Place = Where | Callable[[], Where]  # the latter where it is too much to work out for a wait that nobody asks about


class Wait(Watched):
    """One or more words that a stream waits for, with an event behind them.

    places: where in the step they belong, one for each condition or one for all. doing: completes "rank 1 waits for rank 2
    ...", with what it is `about`, if anything, behind it.
    """

    def __init__(self, awaited: Sequence[Awaited], places: Sequence[Place], doing: str, about: object = None) -> None:
        self._awaited = awaited  # may grow until there is an event
        self.places = list(places)
        self._doing = doing
        self._about = about

    @property
    def conditions(self) -> list[Condition]:
        return [Condition(*fields) for fields in tuple(self._awaited)]

    @property
    def doing(self) -> str:
        return self._doing if self._about is None else f"{self._doing} {self._about}"

    def where(self, condition: Condition | None = None) -> Where:
        """The place of a condition; of the first if none is given."""
        single = condition is None or len(self.places) == 1
        wanted = condition[:3:2] if condition is not None else ()  # peer and place
        place = self.places[0 if single else next(n for n, fields in enumerate(self._awaited) if fields[:3:2] == wanted)]
        return place() if callable(place) else place


class WordWatch(Watchdog[Wait], Receiver):
    """Owns the control channel: its thread is the only one that uses it, until `stop`."""

    def __init__(
        self,
        rank: int,
        membership: Membership,
        world_size: int,
        device: Device,
        channel: Channel,
        *,
        deadline_s: float,
        name: str,
    ) -> None:
        super().__init__(rank, membership, device, deadline_s=deadline_s, name=name)
        self.departed: set[int] = set()  # is news, too
        self.own_memory: Callable[[], Sequence[torch.Tensor]] = tuple  # that released work reads
        self.memory_of: Callable[[int], Sequence[torch.Tensor]] = lambda peer: ()  # the same, of a peer that is gone
        self._gone: set[int] = set()  # their connections have ended
        self._spoiled_of: set[int] = set()  # this rank, and peers
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._channel = channel
        self._outgoing: deque[tuple[int, bytes]] = deque()
        channel.start(self)
        self.start()

    # ---- the transport's side ----------------------------------------------------------------------------------------
    def tell(self, message: bytes) -> None:
        """To all peers, soon."""
        for peer in self._peers:
            self._outgoing.append((peer, message))

    def _failed(self, failure: Failure) -> None:
        kind, culprit, text, _ = failure
        notice = msg.pack_abort(culprit if culprit >= 0 else self.rank, text)
        for peer in self._peers:
            if (peer != culprit or kind is not PeerLostError) and peer not in self.departed:
                self._outgoing.append((peer, notice))

    def release(self) -> None:
        missing = [c for wait in self._standing() for c in wait.conditions if not _holds(self._device, c)]
        if missing:
            self._spoil_for({c.peer for c in missing})
            self._device.poke([Word(c.pad, c.place, c.value) for c in missing])

    def _spoil_for(self, late: set[int]) -> None:
        """What the work behind these peers' words reads."""
        fresh = ({self.rank} | late & (self._gone | self.departed)) - self._spoiled_of
        for rank in sorted(fresh):
            self._spoil(self.own_memory() if rank == self.rank else self.memory_of(rank))
        self._spoiled_of |= fresh

    def stop(self) -> None:
        """The channel belongs to the caller from then on."""
        super().stop()
        self._send()

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _rest(self, seconds: float) -> None:
        self._send()
        self._channel.poll(min(seconds, SUSPECT_S))
        self._send()

    def _send(self) -> None:
        while self._outgoing:
            peer, message = self._outgoing.popleft()
            if peer not in self.departed:
                self._channel.post(peer, message)

    def _look(self) -> None:
        now = time.monotonic()
        heads = self._heads(now)
        for wait in self._standing() if self.departed else ():
            missing = next((c for c in wait.conditions if c.peer in self.departed and not _holds(self._device, c)), None)
            if missing is not None and not wait.over():
                self._report_departed(wait, missing)
                return
        for wait, waited_s in heads:
            if waited_s >= min(SUSPECT_S, self.deadline_s / 2) and not wait.over():
                self._look_into(wait, waited_s, now)

    def _look_into(self, wait: Wait, waited_s: float, now: float) -> None:
        missing = None
        for condition in wait.conditions:
            word = self._device.peek(condition.pad[condition.place : condition.place + 1])[0]
            if reached(word, condition.value, exact=condition.exact):
                continue
            if condition.exact and word != condition.before and not wait.over():
                where, here = wait.where(condition), self.called(self.rank)
                self.fail(
                    MismatchError,
                    condition.peer,
                    f"rank {here}: another message than expected came from rank {self.called(condition.peer)} where rank "
                    f"{here} waits for it {wait.doing} ({where}; transport {self._name}): the ranks run different programs, or "
                    "call their layers in another order. All ranks must run the same model in the same order.",
                    where,
                )
                return
            missing = missing if missing is not None else condition
        if missing is None:
            wait.since = now  # the device is busy, nobody is late: see [Note: Whose time is it] in streams/watch.py
        elif waited_s >= self.deadline_s and not wait.over():
            who = f"{self._describe(missing.peer)}: {wait.doing}"
            self._late(missing.peer, who, f"rank {self.called(missing.peer)}", wait.where(missing))

    def _report_departed(self, wait: Wait, missing: Condition) -> None:
        who, where = self._describe(missing.peer), wait.where(missing)
        text = (
            f"rank {self.called(self.rank)}: {who} has closed its transport {self._name}, but it was waited for {wait.doing} "
            f"({where}). It ended early: look at its log."
        )
        self.fail(PeerLostError, missing.peer, text, where)

    # ---- receiver ----------------------------------------------------------------------------------------------------
    def handle(self, src: int, *messages: bytes) -> None:
        for message in messages:
            self._take_in(src, message)

    def _take_in(self, src: int, message: bytes) -> None:
        kind, culprit = msg.HEADER.unpack_from(message)[:2]
        if kind == msg.GOODBYE:
            self.departed.add(src)
            self.news.set()
        elif kind == msg.ABORT:
            reason = bytes(message[msg.HEADER_BYTES :]).decode(errors="replace")
            culprit = culprit if culprit != self.rank else src
            self._lost(culprit, reason if culprit == src else f"rank {self.called(src)} reports: {reason}")
        else:
            who = self.called(src)
            self.fail(TransportError, -1, f"rank {who} sent a message of kind {kind}: do all ranks run the same version?")

    def _describe(self, peer: int) -> str:
        return self._channel.describe(peer, self.called(peer))

    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        return None

    def lost(self, src: int, reason: str) -> None:
        self._gone.add(src)
        if src not in self.departed and not self._stopping.is_set():
            self._lost(src, reason)

    def _lost(self, culprit: int, reason: str) -> None:
        """Also names what this rank was waiting for: for the culprit if it was, else for whom it was."""
        waits = self._standing()
        here = self.called(self.rank)
        text = f"rank {here} lost {self._describe(culprit)} (transport {self._name}): {reason}."
        where = None
        if waits:
            waiting = next((wait for wait in waits if any(c.peer == culprit for c in wait.conditions)), waits[0])
            condition = next(
                (c for c in waiting.conditions if c.peer == culprit), min(waiting.conditions, key=lambda c: c.peer)
            )
            peer, where = condition.peer, waiting.where(condition)
            text += f" Rank {here} was waiting for rank {self.called(peer)}: {waiting.doing} ({where})."
        self.fail(PeerLostError, culprit, text, where)


def _holds(device: Device, condition: Condition) -> bool:
    word = device.peek(condition.pad[condition.place : condition.place + 1])[0]
    return reached(word, condition.value, exact=condition.exact)
