"""The watchdog of a transport over grouped exchanges: deadlines, and ranks that run different programs.

It knows an exchange by the events before and behind it:

    deadline         the exchange has started, and is not through after deadline_s      DeadlineError: layer, step, slice, peers
    other order      a gradient came with a label that is not the expected one          MismatchError, before it is read
    other program    ranks disagree about what they have exchanged in an epoch          MismatchError, as soon as all have told
    lost peer        the connection by which they tell ended                            PeerLostError

After the first of them what was to come is spoiled and the communicators are aborted, so that no stream waits for an exchange
any more: see [Note: Release] in streams/watch.py.

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
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Device, Event, Word, as_int32
from commfuse_dp.errors import MismatchError, PeerLostError, Where
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.streams.watch import Failure, Watchdog, Watched

if TYPE_CHECKING:
    from commfuse_dp.transport.grouped.exchange import Exchanged

LINGER_S = 5.0  # longest time that `stop` waits for what the peers tell


class Ballot:
    """Every rank tells all others a few integers, without waiting for them. Over a gloo communicator that nobody else uses, and
    for one thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def cast(self, row: list[int]) -> Callable[[], list[list[int]] | None]:
        """row: of one length on all ranks. The n-th calls of all ranks belong together.

        Returns a function that gives the rows of all ranks, or None while they are not all there; it raises RuntimeError if a
        rank is lost."""
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(own) for _ in range(self._group.size())]
        work = self._group.allgather([rows], [own])

        def poll() -> list[list[int]] | None:
            if not work.is_completed():
                return None
            work.wait()  # raises what went wrong
            return [other.tolist() for other in rows]

        return poll


class Step(Watched):
    """One exchange under way."""

    def __init__(self, start: Event, peers: tuple[int, ...], where: Where, into: torch.Tensor) -> None:
        self.start, self.peers, self.where = start, peers, where
        self.into = into  # what it fills
        self.exchanged: Exchanged | None = None  # posted
        self.label: Label | None = None  # that comes with `into`, and for which the stream waits

    def begun(self) -> bool:
        return self.start.done()


class Label(NamedTuple):
    """See [Note: Labels]."""

    pad: torch.Tensor  # int32; where it comes. First the checksum, then what was exchanged, the latest last; 0: nothing
    checksum: int
    giver: int
    expected: tuple[int, ...]  # what this rank took of the giver, as in `pad`


class ExchangeWatch(Watchdog[Step]):
    """abort: breaks off all exchanges under way. ballot: None: ranks do not tell each other what they do. say: the words of a
    label, for errors."""

    def __init__(
        self,
        rank: int,
        membership: Membership,
        device: Device,
        *,
        deadline_s: float,
        abort: Callable[[], None],
        ballot: Ballot | None,
        name: str,
        say: Callable[[Sequence[int]], str],
    ) -> None:
        super().__init__(rank, membership, device, deadline_s=deadline_s, name=name)
        self._abort = abort
        self._say = say
        self._ballot = ballot
        self._rows: deque[list[int]] = deque()
        self._cast: tuple[list[int], Callable[[], list[list[int]] | None]] | None = None
        self._wake = threading.Event()
        self.start()

    # ---- the transport's side ----------------------------------------------------------------------------------------
    def note(self, queue: Hashable, wait: Step) -> None:
        super().note(queue, wait)
        self.check()  # what failed before it was noted is not told of it

    def tell(self, epoch: int, given: list[int], taken: list[int]) -> None:
        """The checksums of what this rank gave to and took from each rank in an epoch."""
        if self._ballot is None:
            return
        self._rows.append([epoch, *given, *taken])
        self._wake.set()

    @property
    def all_compared(self) -> bool:
        """False: the peers have not told as often as this rank has. The ballot must not be used any more then."""
        return not self._rows and self._cast is None

    def stop(self) -> None:
        """Compare what is still to be compared, for a while, and end the thread."""
        limit = time.monotonic() + min(LINGER_S, self.deadline_s)
        while self.failure is None and not self.all_compared and time.monotonic() < limit:
            self._wake.set()
            time.sleep(0.001)
        self._stopping.set()
        self._wake.set()
        super().stop()

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _rest(self, seconds: float) -> None:
        self._wake.wait(seconds if self._cast is None else min(seconds, 0.01))
        self._wake.clear()

    def _look(self) -> None:
        now = time.monotonic()
        for head, waited_s in self._heads(now):
            if head.label is not None and head.exchanged is not None and head.exchanged.done():
                self._read(head, head.label, now)
            elif waited_s >= self.deadline_s and not head.over():
                who = " and ".join(f"rank {self.called(peer)}" for peer in head.peers)
                culprit = head.peers[0] if len(head.peers) == 1 else -1
                self._late(culprit, f"{who}, to take the same step of an exchange", "one of them", head.where)
        if self.failure is None:
            self._compare()

    def _read(self, step: Step, label: Label, now: float) -> None:
        """The label is here, and the stream has not gone on."""
        checksum, *came = self._device.peek(label.pad)
        if step.over():
            return
        if checksum == as_int32(label.checksum):
            step.since = now  # the device is busy, nobody is late
            return
        here, giver = self.called(self.rank), self.called(label.giver)
        self.fail(
            MismatchError,
            label.giver,
            f"rank {here} and rank {giver} call their layers in different orders, or run different programs "
            f"({step.where}; transport {self._name}). What rank {giver} gave last: {self._say(came)}. What rank "
            f"{here} took it for: {self._say(label.expected)}. All ranks must run the same model in the same order; where "
            "branches depend on data, use transport='tcp' on CPU or 'symmetric' on GPUs of one host.",
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
            if not self._stopping.is_set():
                self.fail(PeerLostError, -1, f"rank {self.called(self.rank)} lost a peer (transport {self._name}): {text}")
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
                self.fail(
                    MismatchError,
                    peer,
                    f"rank {self.called(self.rank)} and rank {self.called(peer)} do not agree about what they exchanged up to "
                    f"the end of step {own[0]} (transport {self._name}): they run different programs, or call their layers in "
                    "another order. All ranks must run the same model in the same order; where branches depend on data, use "
                    "transport='tcp' on CPU or 'symmetric' on GPUs of one host.",
                )
                return

    def _failed(self, failure: Failure) -> None:
        try:
            steps = self._standing()
            if steps:
                self._spoil([step.into for step in steps])
        finally:
            self._abort()

    def release(self) -> None:
        """Write the labels that streams wait for, one after the other."""
        first: dict[int, Label] = {}
        for step in self._standing():
            if step.label is not None and step.exchanged is not None and step.exchanged.done():
                first.setdefault(step.label.pad.data_ptr(), step.label)
        if first:
            self._device.poke([Word(label.pad, 0, label.checksum) for label in first.values()])
