"""MPI requests under way, tested together, and how long to sleep between two tests.

[Note: Progress without a spinning core]
Most MPIs move bytes only inside MPI calls, and their own waits spin. So nothing here waits inside MPI: all requests are tested
together (one Testsome), by a thread of ours while the user's thread computes, and by the user's thread itself where it waits.
Between two tests they sleep, the longer the longer nothing has come: an eighth of that time, within bounds. A wait of T thus
ends at most about T/8 late, a busy transfer is looked after several times a millisecond, and an idle one costs a few percent of
a core. Measured with MPICH and two ranks on two cores, sleeping is also quicker than spinning: the copies need the cores.

MPI does not say whether a test moved bytes, but the clock does: one that took much longer than an idle one is repeated at once.
Over TCP that is what keeps a link busy: bare MPICH moved 1 MB at 2 Gbit/s in 18 ms with tests every 0.5 ms, in 4.2 ms (the
link's own time) with repetition, and for less CPU time. Chunks of 1 MB were the best there; 16 MB at once took twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from commfuse_dp.probe import now_ns

CONTROL_BYTES = 16 << 10  # largest MPI message of records
LENGTH_BYTES = 4  # of the length before the records

# Sleep between two tests, in seconds: shortest, longest. The user's thread waits for just this; the other one looks after what
# goes on beside the compute, whose core it shares.
WAIT_SLEEP = (1e-6, 1e-3)
BESIDE_SLEEP = (1e-4, 2e-3)

_BUSY = 3  # times the usual length of an idle test


class Control:
    """The persistent receive of one peer's records: their length, then the records."""

    __slots__ = ("buffer", "peer", "request")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.buffer = bytearray(CONTROL_BYTES)
        self.request: Any = None

    def start(self) -> None:
        self.buffer[:LENGTH_BYTES] = bytes(LENGTH_BYTES)
        self.request.Start()

    def length(self) -> int:
        """Bytes of the message that has come, 0 if none has."""
        return int.from_bytes(self.buffer[:LENGTH_BYTES], "little")


class Payload:
    """A transfer in chunks, or records on their way (`message` is None)."""

    __slots__ = ("issued", "lane", "left", "message", "peer", "sending", "start_ns", "tag", "view")

    def __init__(self, peer: int, lane: int, tag: int, view: memoryview, message: bytes | None, *, sending: bool) -> None:
        self.peer = peer
        self.lane = lane
        self.tag = tag
        self.view = view
        self.message = message
        self.sending = sending
        self.issued = 0  # bytes
        self.left = 0  # requests under way
        self.start_ns = now_ns()


Owner = Control | Payload


class Requests:
    """Requests and whose they are. Not thread-safe, except `pause` and `moved`.

    Args:
        mpi: mpi4py.MPI.
        broken: called with the owner of a request that MPI ended with an error, and the error.
    """

    def __init__(self, mpi: Any, broken: Callable[[Owner, BaseException], None]) -> None:
        self._mpi = mpi
        self._broken = broken
        self._requests: list[Any] = []
        self._owners: list[Owner] = []
        self.sends = 0  # how many of them
        self._last_event = time.monotonic()
        self._idle_ns = [2e3, 6e3]  # length of an idle test: at once after another, and after a sleep

    def add(self, request: Any, owner: Owner) -> None:
        self._requests.append(request)
        self._owners.append(owner)
        self.sends += isinstance(owner, Payload) and owner.sending

    def open(self) -> list[tuple[Any, Owner]]:
        """Those still under way, records' receives included."""
        return list(zip(self._requests, self._owners, strict=True))

    def moved(self) -> None:
        """Something has come or gone: look again soon."""
        self._last_event = time.monotonic()

    def pause(self, now: float, bounds: tuple[float, float]) -> float:
        """How long to sleep before the next test, in seconds."""
        return min(max((now - self._last_event) / 8, bounds[0]), bounds[1])

    def test(self, *, first: bool) -> tuple[list[Owner], bool]:
        """Whose requests are complete, one entry per request, and whether it is worth while to test again at once.

        A payload's request is forgotten, a control must be started again. first: a sleep lies before this test."""
        if not self._requests:
            return [], False
        start = time.perf_counter_ns()
        try:
            done = self._mpi.Request.Testsome(self._requests)
        except self._mpi.Exception as failure:
            return self._sort_out(failure), True
        if not done:
            return [], self._was_busy(time.perf_counter_ns() - start, first)
        completed = [self._owners[index] for index in done]
        for index in sorted(done, reverse=True):
            if isinstance(self._owners[index], Payload):
                self._remove(index)
        return completed, True

    def _was_busy(self, spent_ns: int, first: bool) -> bool:
        """Whether a test without a result moved bytes: see [Note: Progress without a spinning core]."""
        idle = self._idle_ns[first]
        self._idle_ns[first] += (spent_ns - idle) / (8 if spent_ns < idle else 1024)
        busy = spent_ns > _BUSY * idle
        if busy and not first:  # twice in a row: not just an interruption
            self.moved()
        return busy

    def _remove(self, index: int) -> None:
        request, owner = self._requests.pop(), self._owners.pop()
        if index < len(self._requests):
            self._requests[index], removed = request, self._owners[index]
            self._owners[index] = owner
            owner = removed
        self.sends -= isinstance(owner, Payload) and owner.sending

    def _sort_out(self, failure: BaseException) -> list[Owner]:
        """After an error of Testsome, which does not say whose it was: what is complete; `broken` is told of the rest.

        Payloads that it ended, well or not, count as broken; records that came in have a length.
        """
        completed: list[Owner] = []
        lost: list[tuple[Owner, BaseException]] = []
        for index in reversed(range(len(self._requests))):
            request, owner = self._requests[index], self._owners[index]
            bad = request == self._mpi.REQUEST_NULL
            try:
                if not bad and not request.Test():
                    continue
            except self._mpi.Exception as error:
                bad, failure = True, error
            if isinstance(owner, Control):
                bad = bad or owner.length() == 0
            if bad or isinstance(owner, Payload):
                self._remove(index)
            if bad:
                lost.append((owner, failure))
            else:
                completed.append(owner)
        for owner, reason in lost:
            self._broken(owner, reason)
        return completed
