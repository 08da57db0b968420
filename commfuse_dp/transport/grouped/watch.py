"""The watchdog of a transport over grouped exchanges: deadlines, and ranks that run different programs.

The host never waits for an exchange, so a thread looks after them by the events before and behind each:

    deadline         the exchange has started, and is not through after deadline_s      DeadlineError: layer, step, slice, peers
    other order      a gradient came with a label that is not the expected one          MismatchError, before it is read
    other program    ranks disagree about what they have exchanged in an epoch          MismatchError, as soon as all have told
    lost peer        the connection by which they tell ended                            PeerLostError

After the first of them the communicators are aborted, so that no stream waits any more, and every later call of the transport
raises. What was to come is filled with NaN before that: sums that are enqueued behind it, and an optimizer step behind them,
must not find what was there before, which would pass for it.

[Note: Labels]
Exchanges carry no tags: the n-th of a pair meets the n-th, whatever it is. So each rank keeps, for every peer and direction, a
checksum over the identities (key, epoch, place, bytes) of all that it gave and took. Every gradient travels with a label, a few
words beside it: the checksum of all that was given to this peer so far, parameters included, and what that was last. The
receiver's stream waits for exactly the checksum of what it took. So a rank that called its layers in another order and computed
with slices of equal size that it took for others, is found with the first gradient that is exchanged after it, before that is
added up: the stream waits, this thread reads the label, names both orders, and fills with NaN what is then released. Slices of
parameters have no label, which would double the calls; what they spoil cannot reach an optimizer but by a gradient.

[Note: Fingerprints cost no message on the way]
What no gradient follows (an evaluation), and steps that a rank takes alone, is found by comparing the checksums once per epoch,
on a control communicator of CPU tensors, in this thread. The host runs ahead of the device and meets no wait inside a step, so
also ranks whose streams wait for each other come to the end of their step, tell, and are found out at once. An evaluation's
outputs may be wrong until then: the error is raised at the latest by the second `begin_step` after it.

[Note: Whose time is it]
An exchange may lie in its queue for a long time because of the compute before it. Its time counts from when its stream has
come to it, and the one before it on its lane is through.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Device, Event, Word, as_int32
from commfuse_dp.errors import (
    STEP_LOST,
    CommFuseError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    TransportError,
    Where,
)

if TYPE_CHECKING:
    from commfuse_dp.transport.grouped.exchange import Exchanged

TICK_S = 0.25  # between two looks
RELEASE_S = 0.001  # between two rounds of releasing
LINGER_S = 5.0  # longest time that `stop` waits for what the peers tell


class Ballot(ABC):
    """Every rank tells all others a few integers, without waiting for them."""

    @abstractmethod
    def cast(self, row: list[int]) -> Callable[[], list[list[int]] | None]:
        """row: of one length on all ranks. The n-th calls of all ranks belong together.

        Returns a function that gives the rows of all ranks, or None while they are not all there; it raises RuntimeError if a
        rank is lost."""


class TorchBallot(Ballot):
    """Over a gloo communicator that nobody else uses. For one thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def cast(self, row: list[int]) -> Callable[[], list[list[int]] | None]:
        own = torch.tensor(row, dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(self._group.size())]
        work = self._group.allgather([rows], [own])

        def poll() -> list[list[int]] | None:
            if not work.is_completed():
                return None
            work.wait()  # raises what went wrong
            return [other.tolist() for other in rows]

        return poll


class Step:
    """One exchange under way. Noted before it is posted: a device whose calls wait is inside that."""

    __slots__ = ("end", "exchanged", "into", "label", "peers", "since", "start", "where")

    def __init__(self, start: Event, peers: tuple[int, ...], where: Where, into: torch.Tensor) -> None:
        self.start, self.peers, self.where = start, peers, where
        self.into = into  # what it fills
        self.exchanged: Exchanged | None = None  # posted
        self.label: Label | None = None  # that comes with `into`, and for which the stream waits
        self.end: Event | None = None  # behind the exchange
        self.since: float | None = None  # when it was first seen to have started

    def over(self) -> bool:
        return self.end is not None and self.end.done()


class Label(NamedTuple):
    """See [Note: Labels]."""

    pad: torch.Tensor  # int32; where it comes. First the checksum, then what was exchanged, the latest last; 0: nothing
    checksum: int
    giver: int
    expected: tuple[int, ...]  # what this rank took of the giver, as in `pad`


class Failure(NamedTuple):
    kind: type[CommFuseError]
    peer: int  # -1: nobody in particular
    text: str
    where: Where | None


class ExchangeWatch:
    """abort: breaks off all exchanges under way. ballot: None: ranks do not tell each other what they do. say: the words of a
    label, for errors."""

    def __init__(
        self,
        rank: int,
        device: Device,
        *,
        deadline_s: float,
        abort: Callable[[], None],
        ballot: Ballot | None,
        name: str,
        say: Callable[[Sequence[int]], str],
    ) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.failure: Failure | None = None
        self.news = threading.Event()  # a failure
        self._name = name
        self._device = device
        self._abort = abort
        self._say = say
        self._spoiled = False
        self._ballot = ballot
        self._lanes: dict[int, deque[Step]] = {}
        self._rows: deque[list[int]] = deque()
        self._cast: tuple[list[int], Callable[[], list[list[int]] | None]] | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name=f"commfuse-watchdog-{rank}", daemon=True)
        self._thread.start()

    # ---- the transport's side ----------------------------------------------------------------------------------------
    def note(self, lane: int, step: Step) -> None:
        with self._lock:
            if self.failure is None:
                self._lanes.setdefault(lane, deque()).append(step)
        self.check()

    def tell(self, epoch: int, given: list[int], taken: list[int]) -> None:
        """The checksums of what this rank gave to and took from each rank in an epoch."""
        if self._ballot is None:
            return
        self._rows.append([epoch, *given, *taken])
        self._wake.set()

    def check(self) -> None:
        """Raises what every call raises after a failure."""
        if self.failure is not None:
            kind, peer, text, where = self.failure
            text = f"{text} {STEP_LOST}" if self._spoiled else text
            if kind is PeerLostError or kind is DeadlineError:
                raise kind(text, rank=self.rank, peer=peer, where=where)  # type: ignore[call-arg]
            raise kind(text)

    def stop(self) -> bool:
        """Compare what is still to be compared, for a while, and end the thread.

        False: the peers have not told as often as this rank has, so the ballot must not be used any more."""
        limit = time.monotonic() + min(LINGER_S, self.deadline_s)
        while self.failure is None and (self._rows or self._cast is not None) and time.monotonic() < limit:
            self._wake.set()
            time.sleep(0.001)
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=10.0)
        return not self._rows and self._cast is None

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._stopping and self.failure is None:
            self._wake.wait(min(TICK_S, self.deadline_s / 4) if self._cast is None else 0.01)
            self._wake.clear()
            try:
                self._look()
                if self.failure is None:
                    self._compare()
            except Exception as error:  # a device that failed: whoever calls next is to know
                with contextlib.suppress(Exception):  # it cannot be spoiled, either
                    self._fail(TransportError, -1, f"rank {self.rank}, transport {self._name}: {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # of a device that failed
            while not self._stopping and self._release():
                time.sleep(RELEASE_S)

    def _look(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        now = time.monotonic()
        for queue in lanes:
            while queue and queue[0].over():
                queue.popleft()
            if not queue:
                continue
            head = queue[0]
            if head.since is None:
                if head.start.done():
                    head.since = now
            elif head.label is not None and head.exchanged is not None and head.exchanged.done():
                self._read(head, head.label, now)
            elif now - head.since >= self.deadline_s and not head.over():
                self._late(head)

    def _read(self, step: Step, label: Label, now: float) -> None:
        """The label is here, and the stream has not gone on."""
        checksum, *came = self._device.peek(label.pad)
        if step.over():
            return
        if checksum == as_int32(label.checksum):
            step.since = now  # the device is busy, nobody is late
            return
        self._fail(
            MismatchError,
            label.giver,
            f"rank {self.rank} and rank {label.giver} call their layers in different orders, or run different programs "
            f"({step.where}; transport {self._name}). What rank {label.giver} gave last: {self._say(came)}. What rank "
            f"{self.rank} took it for: {self._say(label.expected)}. All ranks must run the same model in the same order; where "
            "branches depend on data, use transport='tcp' on CPU or 'symmetric' on GPUs of one host.",
            step.where,
        )

    def _late(self, step: Step) -> None:
        who = " and ".join(f"rank {peer}" for peer in step.peers)
        self._fail(
            DeadlineError,
            step.peers[0] if len(step.peers) == 1 else -1,
            f"rank {self.rank} waited {self.deadline_s:g} s for {who}, to take the same step of an exchange ({step.where}; "
            f"transport {self._name}). Either one of them is stuck or much slower, or it runs another program: look at its log "
            "first. If the step is really that slow, raise deadline_s.",
            step.where,
        )

    def _compare(self) -> None:
        if self._cast is None:
            if self._ballot is None or not self._rows:
                return
            row = self._rows[0]
            self._cast = row, self._ballot.cast(row)
            self._rows.popleft()  # not before: `stop` looks at both
        own, poll = self._cast
        try:
            rows = poll()
        except RuntimeError as error:
            text = str(error).splitlines()[0][:300]
            if not self._stopping:
                self._fail(PeerLostError, -1, f"rank {self.rank} lost a peer (transport {self._name}): {text}")
            return
        if rows is None:
            return
        self._cast = None
        if self._rows:
            self._wake.set()
        size = (len(own) - 1) // 2
        for peer, row in enumerate(rows):
            gave = row[1 + self.rank] == own[1 + size + peer]
            took = row[1 + size + self.rank] == own[1 + peer]
            if peer != self.rank and not (row[0] == own[0] and gave and took):
                self._fail(
                    MismatchError,
                    peer,
                    f"rank {self.rank} and rank {peer} do not agree about what they exchanged up to the end of step {own[0]} "
                    f"(transport {self._name}): they run different programs, or call their layers in another order. All ranks "
                    "must run the same model in the same order; where branches depend on data, use transport='tcp' on CPU or "
                    "'symmetric' on GPUs of one host.",
                )
                return

    def _fail(self, kind: type[CommFuseError], peer: int, text: str, where: Where | None = None) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = Failure(kind, peer, text, where)  # no step is noted from now on
        try:
            steps = self._standing()
            self._spoiled = bool(steps)
            self._device.spoil([step.into for step in steps])
        finally:
            self._abort()
            self.news.set()

    def _standing(self) -> list[Step]:
        with self._lock:
            steps = [step for queue in self._lanes.values() for step in queue]
        return [step for step in steps if not step.over()]

    def _release(self) -> bool:
        """Write the labels that streams wait for, one after the other. False if none is waited for."""
        first: dict[int, Label] = {}
        for step in self._standing():
            if step.label is not None and step.exchanged is not None and step.exchanged.done():
                first.setdefault(step.label.pad.data_ptr(), step.label)
        self._device.poke([Word(label.pad, 0, label.checksum) for label in first.values()])
        return any(step.label is not None for step in self._standing())
