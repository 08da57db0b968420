"""The watchdog of a stream-ordered transport: a thread that looks after waits which nobody waits for on the host.

Every wait that is put into a stream is noted here, with an event behind it. The thread asks the events, and looks into a wait
that does not end. The first failure counts: it releases the streams, and every call of the transport raises it from then on.

[Note: Release]
A stream that waits can be freed only from outside, and again and again, for what is enqueued behind the first wait comes to the
next one. The work that then runs reads bytes that never came: the error is raised by the next call of the transport, at the
latest by the `begin_step` of the next step, and no call succeeds any more. Without this, the process would hang in the first
call that waits for the device.

What was there before would pass for what never came, and the host may have enqueued an optimizer step behind it. So before the
first stream is freed, the memory that released work reads is filled with NaN (`Device.spoil`). Sums, and products with own
slices, are NaN from then on, and so are the parameters after that optimizer step: lost, but never plausible.

[Note: A driver that does not answer]
While a call of the user's thread stands in the driver ([Note: The host may stand] in device/base.py), the watchdog's own calls
stand, too. If that call waits for a peer that never comes, there is neither an error nor a release. A second thread, which asks
the driver nothing, says so in the log.

[Note: Whose time is it]
The host runs ahead of the device: a wait may lie in a queue for a long time because of the compute before it. Its time
therefore counts from when its stream has come to it and the wait before it in its queue is over. If what it waits for is here
after all, the device is busy, nobody is late, and the time starts again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from commfuse_dp.device.base import Device, Event
from commfuse_dp.errors import STEP_LOST, CommFuseError, DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.transport.checks import too_late
from commfuse_dp.transport.membership import Membership

TICK_S = 0.25  # between two looks while nothing happens

_log = logging.getLogger("commfuse_dp")


class Failure(NamedTuple):
    kind: type[CommFuseError]
    culprit: int  # a rank of the transport; -1: nobody in particular
    text: str
    where: Where | None = None


class Watched:
    """A wait in a stream, noted before it is put there: a device whose calls wait is inside it."""

    end: Event | None = None  # behind it; None: it is just being put into the stream
    since: float | None = None  # when it was first seen to be waited for

    def begun(self) -> bool:
        """Its stream has come to it."""
        return True

    def over(self) -> bool:
        return self.end is not None and self.end.done()


Kind = TypeVar("Kind", bound=Watched)


class Watchdog(ABC, Generic[Kind]):
    """See the module. Subclasses know what is waited for; they call `start` when they are ready to be asked."""

    release_s = 0.01  # between two rounds of releasing

    def __init__(self, rank: int, membership: Membership, device: Device, *, deadline_s: float, name: str) -> None:
        self.rank, self.deadline_s = rank, deadline_s
        self.called = membership.called  # what a rank is called in errors
        self.failure: Failure | None = None
        self.news = threading.Event()  # of a failure, or whatever else the user's thread should look at
        self._name = name
        self._device = device
        self._queues: dict[Hashable, deque[Kind]] = {}
        self._spoiled = False
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._asking: object | None = None  # one for each round in which the driver is asked; None: in between
        self._thread = threading.Thread(target=self._watch, name=f"commfuse-watchdog-{rank}", daemon=True)
        self._second = threading.Thread(target=self._watch_the_watchdog, name=f"commfuse-second-{rank}", daemon=True)

    # ---- the transport's side ----------------------------------------------------------------------------------------
    def note(self, queue: Hashable, wait: Kind) -> None:
        """queue: waits of one come to their ends one after the other."""
        with self._lock:
            self._queues.setdefault(queue, deque()).append(wait)

    def check(self) -> None:
        """Raises what every call raises after a failure."""
        if self.failure is None:
            return
        kind, culprit, text, where = self.failure
        text = f"{text} {STEP_LOST}" if self._spoiled else text
        if kind is PeerLostError or kind is DeadlineError:
            raise kind(text, rank=self.called(self.rank), peer=self.called(culprit), where=where)  # type: ignore[call-arg]
        raise kind(text)

    def fail(self, kind: type[CommFuseError], culprit: int, text: str, where: Where | None = None) -> None:
        """The first failure counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = Failure(kind, culprit, text, where)
        try:
            self._failed(self.failure)
        finally:
            self.news.set()

    def stop(self) -> None:
        """End the threads."""
        self._stopping.set()
        self._thread.join(timeout=10.0)
        self._second.join(timeout=10.0)

    # ---- the thread --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()
        self._second.start()

    def _watch_the_watchdog(self) -> None:
        """See [Note: A driver that does not answer]. It counts rounds: a process that was stopped for a while has none."""
        before, rounds = None, 0
        while not self._stopping.wait(TICK_S):
            asking = self._asking
            before, rounds = asking, rounds + 1 if asking is not None and asking is before else 0
            if rounds == 1 + int(self.deadline_s / TICK_S):
                _log.critical(
                    "rank %d, transport %s: the driver has not answered for %g s. A call of this process stands until the "
                    "device is done (the first launch of a kernel, or an allocation), and the device waits, for a peer as it "
                    "seems; no error can be raised meanwhile. Look at the logs of the other ranks, and end the job. "
                    "CUDA_MODULE_LOADING=EAGER loads all kernels at the start.",
                    self.called(self.rank),
                    self._name,
                    self.deadline_s,
                )

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                failed = self.failure is not None
                self._rest(self.release_s if failed else min(TICK_S, self.deadline_s / 4))
                self._asking = object()
                if failed:  # a round later: a peer's end may be heard of from others first
                    self.release()
                elif self.failure is None:
                    self._look()
            except Exception as error:  # a device that failed, a channel that broke: whoever calls next is to know
                text = f"rank {self.called(self.rank)}, transport {self._name}: {type(error).__name__}: {error}"
                with contextlib.suppress(Exception):  # such a device cannot be spoiled, either
                    self.fail(TransportError, -1, text)
                if self._stopping.is_set():
                    return
                time.sleep(self.release_s)
            finally:
                self._asking = None

    @abstractmethod
    def _rest(self, seconds: float) -> None:
        """Until there is something to look at, for so long at most."""

    @abstractmethod
    def _look(self) -> None:
        """Find out whether something has failed, from `_heads` at least."""

    @abstractmethod
    def _failed(self, failure: Failure) -> None:
        """Once, for the first failure, in whichever thread has found it."""

    @abstractmethod
    def release(self) -> None:
        """Free what the streams wait for now, behind `_spoil`."""

    def _heads(self, now: float) -> list[tuple[Kind, float]]:
        """The waits that streams have come to, and for how long they have been there. Those that are over are forgotten."""
        found = []
        with self._lock:
            for queue in self._queues.values():
                while queue and queue[0].over():
                    queue.popleft()
                if not queue:
                    continue
                head = queue[0]
                if head.since is None and head.begun():
                    head.since = now
                if head.since is not None:
                    found.append((head, now - head.since))
        return found

    def _standing(self) -> list[Kind]:
        """All waits that are not over."""
        with self._lock:
            return [wait for queue in self._queues.values() for wait in queue if not wait.over()]

    def _spoil(self, memory: Sequence[torch.Tensor]) -> None:
        """What released work reads must not look as if it had come."""
        self._spoiled = True
        self._device.spoil(memory)

    def _late(self, culprit: int, who: str, suspect: str, where: Where) -> None:
        """who, suspect: as of `too_late`."""
        text = too_late(self.called(self.rank), self.deadline_s, who, suspect, where, self._name)
        self.fail(DeadlineError, culprit, text, where)
