"""The watchdog of a transport over grouped exchanges: deadlines, and ranks that run different programs.

The host never waits for an exchange, so a thread looks after them by the events before and behind each:

    deadline         the exchange has started, and is not through after deadline_s      DeadlineError: layer, step, slice, peers
    other program    ranks disagree about what they have exchanged in an epoch          MismatchError, as soon as all have told
    lost peer        the connection by which they tell ended                            PeerLostError

After the first of them the communicators are aborted, so that no stream stands any more; the data is then worthless, and every
later call of the transport raises.

[Note: Fingerprints cost no message on the way]
Exchanges carry no tags: the n-th of a pair meets the n-th, whatever it is. So each rank keeps, for every peer and direction, a
checksum over the identities (key, epoch, place, bytes) of all that it gave and took. Once per epoch the ranks tell each other
their checksums on a control communicator of CPU tensors, in this thread. The host runs ahead of the device and meets no wait
inside a step, so also ranks whose streams stand for each other come to the end of their step, tell, and are found out at once.
Ranks that disagree about sizes or counts stand; ranks that disagree about slices of equal size would have computed with each
other's: the step's data is worthless, and the error is raised at the latest by the second `begin_step` after it.

[Note: Whose time is it]
An exchange may stand in its queue for a long time because of the compute before it. Its time counts from when its stream has
come to it, and the one before it on its lane is through.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Event
from commfuse_dp.errors import CommFuseError, DeadlineError, MismatchError, PeerLostError, TransportError, Where

TICK_S = 0.25  # between two looks
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
    """One exchange under way. Noted before it is posted: a device whose calls wait stands inside that."""

    __slots__ = ("end", "peers", "since", "start", "where")

    def __init__(self, start: Event, peers: tuple[int, ...], where: Where) -> None:
        self.start, self.peers, self.where = start, peers, where
        self.end: Event | None = None  # behind the exchange
        self.since: float | None = None  # when it was first seen to have started

    def over(self) -> bool:
        return self.end is not None and self.end.done()


class Failure(NamedTuple):
    kind: type[CommFuseError]
    peer: int  # -1: nobody in particular
    text: str
    where: Where | None


class ExchangeWatch:
    """abort: breaks off all exchanges under way. ballot: None: ranks do not tell each other what they do."""

    def __init__(self, rank: int, *, deadline_s: float, abort: Callable[[], None], ballot: Ballot | None, name: str) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.failure: Failure | None = None
        self.news = threading.Event()  # a failure
        self._name = name
        self._abort = abort
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
            self._lanes.setdefault(lane, deque()).append(step)

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
                self._compare()
            except Exception as error:  # a device that failed: whoever calls next is to know
                self._fail(TransportError, -1, f"rank {self.rank}, transport {self._name}: {type(error).__name__}: {error}")

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
            elif now - head.since >= self.deadline_s and not head.over():
                self._late(head)

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
        self.failure = Failure(kind, peer, text, where)
        self._abort()
        self.news.set()
