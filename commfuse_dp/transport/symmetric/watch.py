"""The watchdog of a stream-ordered transport: a thread that looks after waits which nobody waits for on the host.

Every wait that is put into a stream is noted here with an event behind it. The thread asks the events; a wait that does not end
is looked into by reading its words:

    deadline         a word that has not come within deadline_s                  DeadlineError: who, layer, step, slice, bytes
    other program    a word that holds another message's fingerprint             MismatchError, at once
    dead peer        its control socket ended without a goodbye                  PeerLostError, at once
    departed peer    it said goodbye, so whatever it wrote is there              PeerLostError, if a word is still missing

[Note: Release]
A stream that waits can be freed only by writing the word that it waits for. So after a failure the thread writes the awaited
words itself, again and again, for what is enqueued behind the first wait comes to the next one. The work that then runs reads
bytes that never came: the error is raised by the next call of the transport, at the latest by the `begin_step` of the next
step, and no call succeeds any more. Without this, the process would hang in the first call that waits for the device.

What was there before would pass for what never came, and the host may have enqueued an optimizer step behind it. So before the
first word is written, the memory that released work reads is filled with NaN (`Device.spoil`): this rank's inboxes, its own
segments, what it has computed for others, and the segments of peers that are gone. Sums, and products with own slices, are NaN
from then on, and so are the parameters after that optimizer step: lost, but never plausible. Memory of a peer that lives is
left alone, for its own step may be sound; it is told, and spoils its own.

[Note: Whose time is it]
The host runs ahead of the device: a wait may lie in a queue for a long time because of the compute before it. Its time
therefore counts from when the wait before it in its stream was over, and it is late only if, after that time, its word has not
come. If it has come, the device is busy, and the time starts again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Device, Event, Stream, Word, reached
from commfuse_dp.errors import (
    STEP_LOST,
    CommFuseError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    TransportError,
    Where,
)
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver

SUSPECT_S = 1.0  # a wait that lasts so long is looked into
TICK_S = 0.25  # between two looks while nothing happens
RELEASE_S = 0.01  # between two rounds of releasing


class Condition(NamedTuple):
    """A word that a stream waits for."""

    peer: int
    pad: torch.Tensor
    place: int
    value: int
    exact: bool = False
    before: int = 0  # exact: what the word holds until then


Place = Where | Callable[[], Where]  # the latter where it is too much to work out for a wait that nobody asks about


class Wait:
    """One or more words that a stream waits for, with an event behind them. Noted before it is put into the stream.

    places: where in the step they belong, one for each condition or one for all. doing: completes "rank 1 waits for rank 2
    ...", with what it is `about`, if anything, behind it.
    """

    __slots__ = ("_about", "_doing", "conditions", "event", "places", "since")

    def __init__(self, conditions: Sequence[Condition], places: Sequence[Place], doing: str, about: object = None) -> None:
        self.conditions = conditions  # may grow until there is an event
        self.event: Event | None = None  # behind the waits; None: they are just being put into the stream
        self.places = list(places)
        self._doing = doing
        self._about = about
        self.since = time.monotonic()

    @property
    def doing(self) -> str:
        return self._doing if self._about is None else f"{self._doing} {self._about}"

    def where(self, condition: Condition | None = None) -> Where:
        """The place of a condition; of the first if none is given."""
        single = condition is None or len(self.places) == 1
        place = self.places[0 if single else next(n for n, c in enumerate(self.conditions) if c is condition)]
        return place() if callable(place) else place

    def over(self) -> bool:
        return self.event is not None and self.event.done()


class Failure(NamedTuple):
    kind: type[CommFuseError]
    culprit: int  # -1: nobody in particular
    text: str
    where: Where | None = None


class Watchdog(Receiver):
    """Owns the control channel: its thread is the only one that uses it, until `stop`."""

    def __init__(self, rank: int, world_size: int, device: Device, channel: Channel, *, deadline_s: float, name: str) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.failure: Failure | None = None
        self.departed: set[int] = set()
        self.news = threading.Event()  # a failure, or a departure
        self.own_memory: Callable[[], Sequence[torch.Tensor]] = tuple  # that released work reads, see [Note: Release]
        self.memory_of: Callable[[int], Sequence[torch.Tensor]] = lambda peer: ()  # the same, of a peer that is gone
        self._gone: set[int] = set()  # their connections have ended
        self._spoiled: set[int] = set()  # this rank, and peers
        self._name = name
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._device = device
        self._channel = channel
        self._waits: dict[Stream, deque[Wait]] = {}
        self._lock = threading.RLock()
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._stopping = False
        channel.start(self)
        self._thread = threading.Thread(target=self._watch, name=f"commfuse-watchdog-{rank}", daemon=True)
        self._thread.start()

    # ---- the transport's side ----------------------------------------------------------------------------------------
    def note(self, stream: Stream, wait: Wait) -> None:
        with self._lock:
            self._waits.setdefault(stream, deque()).append(wait)

    def tell(self, message: bytes) -> None:
        """To all peers, soon."""
        for peer in self._peers:
            self._outgoing.append((peer, message))

    def fail(self, kind: type[CommFuseError], culprit: int, text: str, where: Where | None = None) -> None:
        """The first failure counts: it is told to all peers, and the streams are released."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = Failure(kind, culprit, text, where)
            notice = msg.pack_abort(culprit if culprit >= 0 else self.rank, text)
            for peer in self._peers:
                if (peer != culprit or kind is not PeerLostError) and peer not in self.departed:
                    self._outgoing.append((peer, notice))
            self.news.set()

    def error(self) -> CommFuseError:
        """What every call raises after a failure."""
        failure = self.failure
        assert failure is not None
        kind, culprit, text, where = failure
        text = f"{text} {STEP_LOST}" if self._spoiled else text
        if kind is PeerLostError or kind is DeadlineError:
            return kind(text, rank=self.rank, peer=culprit, where=where)  # type: ignore[call-arg]
        return kind(text)

    def release(self) -> bool:
        """Write what the streams wait for. True if nothing waits any more."""
        with self._lock:
            self._forget_finished()
            waits = [wait for queue in self._waits.values() for wait in queue]
        missing = [c for wait in waits for c in tuple(wait.conditions) if not _holds(self._device, c)]
        if missing:
            self._spoil({c.peer for c in missing})
            self._device.poke([Word(c.pad, c.place, c.value) for c in missing])
        return not waits

    def _spoil(self, late: set[int]) -> None:
        """What the work behind these peers' words reads must not look as if it had come."""
        fresh = ({self.rank} | late & (self._gone | self.departed)) - self._spoiled
        for rank in sorted(fresh):
            self._device.spoil(self.own_memory() if rank == self.rank else self.memory_of(rank))
        self._spoiled |= fresh

    def stop(self) -> None:
        """End the thread. The channel belongs to the caller from then on."""
        self._stopping = True
        self._thread.join(timeout=10.0)
        self._send()

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._stopping:
            try:
                self._send()
                failed = self.failure is not None
                self._channel.poll(RELEASE_S if failed else self._tick())
                self._send()
                if failed:  # a round later: a peer's end may be heard of from others first
                    self.release()
                elif self.failure is None:
                    self._look()
            except Exception as error:  # a device that failed, a channel that broke: whoever calls next is to know
                self.fail(TransportError, -1, f"rank {self.rank}, transport {self._name}: {type(error).__name__}: {error}")
                if self._stopping:
                    return
                time.sleep(RELEASE_S)

    def _tick(self) -> float:
        return min(TICK_S, self.deadline_s / 4, SUSPECT_S)

    def _send(self) -> None:
        while self._outgoing:
            peer, message = self._outgoing.popleft()
            if peer not in self.departed:
                self._channel.post(peer, message)

    def _forget_finished(self) -> None:
        now = time.monotonic()
        for queue in self._waits.values():
            moved = False
            while queue and queue[0].over():
                queue.popleft()
                moved = True
            if moved and queue:
                queue[0].since = now

    def _look(self) -> None:
        with self._lock:
            self._forget_finished()
            heads = [queue[0] for queue in self._waits.values() if queue]
            behind = [wait for queue in self._waits.values() for wait in queue if self.departed and self._awaits_departed(wait)]
        now = time.monotonic()
        for wait in behind:
            missing = next((c for c in wait.conditions if c.peer in self.departed and not _holds(self._device, c)), None)
            if missing is not None and not wait.over():
                self._report_departed(wait, missing)
                return
        for wait in heads:
            if now - wait.since >= min(SUSPECT_S, self.deadline_s / 2) and not wait.over():
                self._look_into(wait, now)

    def _awaits_departed(self, wait: Wait) -> bool:
        return any(condition.peer in self.departed for condition in wait.conditions)

    def _look_into(self, wait: Wait, now: float) -> None:
        missing = None
        for condition in wait.conditions:
            word = self._device.peek(condition.pad[condition.place : condition.place + 1])[0]
            if reached(word, condition.value, exact=condition.exact):
                continue
            if condition.exact and word != condition.before and not wait.over():
                where = wait.where(condition)
                self.fail(
                    MismatchError,
                    condition.peer,
                    f"rank {self.rank}: another message than expected came from rank {condition.peer} where rank {self.rank} "
                    f"waits for it {wait.doing} ({where}; transport {self._name}): the ranks run different programs, or "
                    "call their layers in another order. All ranks must run the same model in the same order.",
                    where,
                )
                return
            missing = missing if missing is not None else condition
        if missing is None:
            wait.since = now  # the device is busy, nobody is late: see [Note: Whose time is it]
        elif now - wait.since >= self.deadline_s and not wait.over():
            who, where = self._channel.describe(missing.peer), wait.where(missing)
            self.fail(
                DeadlineError,
                missing.peer,
                f"rank {self.rank} waited {self.deadline_s:g} s for {who}: {wait.doing} ({where}; transport "
                f"{self._name}). Either rank {missing.peer} is stuck or much slower, or it runs another program: look at its "
                "log first. If the step is really that slow, raise deadline_s.",
                where,
            )

    def _report_departed(self, wait: Wait, missing: Condition) -> None:
        who, where = self._channel.describe(missing.peer), wait.where(missing)
        text = (
            f"rank {self.rank}: {who} has closed its transport {self._name}, but it was waited for {wait.doing} "
            f"({where}). It ended early: look at its log."
        )
        self.fail(PeerLostError, missing.peer, text, where)

    # ---- receiver ----------------------------------------------------------------------------------------------------
    def handle(self, src: int, message: bytes) -> None:
        kind, culprit = msg.HEADER.unpack_from(message)[:2]
        if kind == msg.GOODBYE:
            self.departed.add(src)
            self.news.set()
        elif kind == msg.ABORT:
            reason = bytes(message[msg.HEADER_BYTES :]).decode(errors="replace")
            culprit = culprit if culprit != self.rank else src
            self._lost(culprit, reason if culprit == src else f"rank {src} reports: {reason}")
        else:
            self.fail(TransportError, -1, f"rank {src} sent a message of kind {kind}: do all ranks run the same version?")

    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        return None

    def lost(self, src: int, reason: str) -> None:
        self._gone.add(src)
        if src not in self.departed and not self._stopping:
            self._lost(src, reason)

    def _lost(self, culprit: int, reason: str) -> None:
        """Also names what this rank was waiting for: for the culprit if it was, else for whom it was."""
        with self._lock:
            waits = [wait for queue in self._waits.values() for wait in queue if not wait.over()]
        text = f"rank {self.rank} lost {self._channel.describe(culprit)} (transport {self._name}): {reason}."
        where = None
        if waits:
            waiting = next((wait for wait in waits if any(c.peer == culprit for c in wait.conditions)), waits[0])
            condition = next(
                (c for c in waiting.conditions if c.peer == culprit), min(waiting.conditions, key=lambda c: c.peer)
            )
            peer, where = condition.peer, waiting.where(condition)
            text += f" Rank {self.rank} was waiting for rank {peer}: {waiting.doing} ({where})."
        self.fail(PeerLostError, culprit, text, where)


def _holds(device: Device, condition: Condition) -> bool:
    word = device.peek(condition.pad[condition.place : condition.place + 1])[0]
    return reached(word, condition.value, exact=condition.exact)
