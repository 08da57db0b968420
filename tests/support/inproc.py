"""One-sided transport between threads of one process, for tests: every fault can be injected, nothing needs a real sleep.

    world = InprocWorld(3, inbox_bytes=1 << 20, deadline_s=5, faults=Faults(seed=1, max_delay=4))
    transport = world.transport(rank)           in the thread of each rank

[Note: What may be reordered]
Delays are counted in polls of the receiver (its ticks), not in seconds: a message that is held back for k ticks is seen by
the k-th poll after it was sent, and a receiver with nothing else to do skips ahead to the next message. Delays are drawn
from a generator seeded by (seed, source, destination) in the order in which the source sends, so they are the same in every
run. Messages of different sources are never ordered. Between one pair of ranks
* PUBLISH, FINISH and BROKEN keep their order among themselves: an epoch is never seen before the one that it follows;
* DEPOSIT and CREDIT overtake everything, also each other (they are matched by tag and by place);
* GOODBYE and the end of a rank come after everything that the rank has sent.
Real transports keep more order than this, so what works here does not lean on it.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Memory, Receiver, check_same_sizes, cut
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.one_sided.ring import align

_DEATH = b""  # in place of a message: the source has ended


@dataclass
class Faults:
    """What goes wrong. Deterministic; see the note on reordering.

    max_delay: longest delay in ticks of the receiver; 0 keeps the order of sending.
    drop: called as drop(src, dst, kind, number) with the name of the kind (messages.KIND_NAMES) and a running number per
        (src, dst, kind) from 0; True loses the message.
    """

    seed: int = 0
    max_delay: int = 0
    drop: Callable[[int, int, str, int], bool] | None = None


@dataclass
class _Mailbox:
    """Messages on their way to one rank."""

    arrival: threading.Condition = field(default_factory=threading.Condition)
    queue: list[tuple[int, int, int, bytes]] = field(default_factory=list)  # heap of (due tick, number, source, message)
    held: list[tuple[int, bytes]] = field(default_factory=list)
    tick: int = 0
    rung: bool = False  # somebody wants `take` to return
    number: int = 0
    last_due: dict[tuple[int, bool], int] = field(default_factory=dict)  # (source, ordered lane only) -> latest due tick

    def put(self, src: int, message: bytes, delay: int) -> None:
        """Called with `arrival` held."""
        kind = msg.kind_of(message) if message else msg.GOODBYE
        due = self.tick + 1 + delay
        if kind in (msg.PUBLISH, msg.FINISH, msg.BROKEN):
            due = self.last_due[src, True] = max(due, self.last_due.get((src, True), 0))
        elif kind in (msg.GOODBYE, msg.ABORT):
            due = max(due, self.last_due.get((src, False), 0))
        self.last_due[src, False] = max(due, self.last_due.get((src, False), 0))
        self.number += 1
        heapq.heappush(self.queue, (due, self.number, src, message))
        self.arrival.notify()

    def take(self, timeout_s: float) -> list[tuple[int, bytes]]:
        with self.arrival:
            if timeout_s > 0 and not self.queue and not self.rung:
                self.arrival.wait(timeout_s)
            self.rung = False
            self.tick += 1
            if timeout_s > 0 and self.queue:
                self.tick = max(self.tick, self.queue[0][0])  # nothing else to do: time flies
            due = []
            while self.queue and self.queue[0][0] <= self.tick:
                due.append(heapq.heappop(self.queue)[2:])
            return due


class InprocWorld:
    """The ranks of one process. Thread-safe; `transport(rank)` is called once in the thread of each rank."""

    def __init__(
        self, world_size: int, *, inbox_bytes: int = 1 << 20, deadline_s: float = 10.0, faults: Faults | None = None
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size {world_size}: at least 1")
        self.world_size = world_size
        self.inbox_bytes = inbox_bytes
        self.deadline_s = deadline_s
        self.faults = faults if faults is not None else Faults()
        self.rings = {
            (owner, src): torch.zeros(align(inbox_bytes), dtype=torch.uint8)
            for owner in range(world_size)
            for src in range(world_size)
            if owner != src
        }
        self.segments: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        self.mailboxes = [_Mailbox() for _ in range(world_size)]
        self.dead: set[int] = set()
        self._held_pairs: set[tuple[int, int]] = set()
        self._randoms: dict[tuple[int, int], random.Random] = {}
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    def transport(self, rank: int, *, probe: Probe | None = None, members: Sequence[int] | None = None) -> InprocTransport:
        return InprocTransport(rank, self, probe=probe, members=members)

    def exchange_for(self, rank: int) -> ExchangeFn:
        """The collective object exchange of one rank. Raises TransportError if a rank is missing past the deadline."""

        def exchange(item: Any) -> list[Any]:
            self._slots[rank] = item
            try:
                self._barrier.wait(self.deadline_s)
                everyone = list(self._slots)
                self._barrier.wait(self.deadline_s)
            except threading.BrokenBarrierError:
                raise TransportError(
                    f"rank {rank}: not all {self.world_size} ranks came to a collective call in time"
                ) from None
            return everyone

        return exchange

    # ---- faults ------------------------------------------------------------------------------------------------------
    def hold(self, src: int, dst: int) -> None:
        """Keep back what `src` sends to `dst` from now on, until `let_go`."""
        with self.mailboxes[dst].arrival:
            self._held_pairs.add((src, dst))

    def let_go(self, src: int, dst: int) -> None:
        """Deliver what was kept back, in the order of sending, and keep back nothing more."""
        box = self.mailboxes[dst]
        with box.arrival:
            self._held_pairs.discard((src, dst))
            kept = [message for source, message in box.held if source == src]
            box.held = [entry for entry in box.held if entry[0] != src]
            for message in kept:
                box.put(src, message, 0)

    def kill(self, rank: int) -> None:
        """Let `rank` die without a goodbye: its own next call raises, its peers lose it."""
        self.dead.add(rank)
        for peer in range(self.world_size):
            if peer != rank:
                self.send(rank, peer, _DEATH)

    def send(self, src: int, dst: int, message: bytes) -> None:
        box = self.mailboxes[dst]
        with box.arrival:
            delay = 0
            if message:
                kind = msg.kind_of(message)
                number = self._numbers[src, dst, kind] = self._numbers.get((src, dst, kind), -1) + 1
                if self.faults.drop is not None and self.faults.drop(src, dst, msg.KIND_NAMES[kind], number):
                    return
                if self.faults.max_delay:
                    if (src, dst) not in self._randoms:
                        self._randoms[src, dst] = random.Random(f"{self.faults.seed}/{src}/{dst}")
                    delay = self._randoms[src, dst].randint(0, self.faults.max_delay)
            if (src, dst) in self._held_pairs:
                box.held.append((src, message))
            else:
                box.put(src, message, delay)


class _InprocChannel(Channel):
    def __init__(self, rank: int, world: InprocWorld) -> None:
        self._rank = rank
        self._world = world
        self._receiver: Receiver | None = None
        self._waiting: dict[int, list[bytes]] = {}  # messages that are held for company, by destination
        self._sending = threading.Lock()  # another thread may post, too

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        with self._sending:
            self._waiting.setdefault(dst, []).append(message)
            if not hold:
                self._send(dst)

    def push(self) -> None:
        with self._sending:
            for dst in list(self._waiting):
                self._send(dst)

    def _send(self, dst: int) -> None:
        for message in self._waiting.pop(dst, ()):
            if self._rank not in self._world.dead:
                self._world.send(self._rank, dst, message)

    def poll(self, timeout_s: float) -> None:
        assert self._receiver is not None
        if timeout_s > 0:
            self.push()
        if self._rank in self._world.dead:
            raise TransportError(f"rank {self._rank} was killed by fault injection")
        if self._world.world_size == 1:
            time.sleep(timeout_s)  # nobody can ever send anything
            return
        for src, message in self._world.mailboxes[self._rank].take(timeout_s):
            if message == _DEATH:
                self._receiver.lost(src, "it was killed by fault injection")
            else:
                self._receiver.handle(src, message)

    def wake(self) -> None:
        box = self._world.mailboxes[self._rank]
        with box.arrival:
            box.rung = True
            box.arrival.notify()

    def flush(self, timeout_s: float) -> bool:
        self.push()
        return True

    def close(self) -> None:
        pass


class _InprocMemory(Memory):
    in_place: ClassVar[bool] = True

    def __init__(self, rank: int, world: InprocWorld) -> None:
        self._rank = rank
        self._world = world
        self.segments = dict(enumerate(world.segments))
        self.outgoing = {owner: ring for (owner, src), ring in world.rings.items() if src == rank}
        self.incoming = {src: ring for (owner, src), ring in world.rings.items() if owner == rank}

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        exchange = self._world.exchange_for(self._rank)
        check_same_sizes(sizes, exchange(sizes), exchange)
        whole = torch.zeros(sum(align(row[self._rank]) for row in sizes), dtype=torch.uint8)
        self._world.segments[self._rank][:] = cut(whole, [row[self._rank] for row in sizes])
        exchange(None)


class InprocTransport(OneSidedTransport):
    """One rank of an `InprocWorld`."""

    name: ClassVar[str] = "inproc"
    in_place: ClassVar[bool] = True

    def __init__(
        self, rank: int, world: InprocWorld, *, probe: Probe | None = None, members: Sequence[int] | None = None
    ) -> None:
        super().__init__(
            rank,
            world.world_size,
            world.exchange_for(rank),
            inbox_bytes=world.inbox_bytes,
            deadline_s=world.deadline_s,
            probe=probe,
            members=members,
            world=world,
        )

    def _connect(self, exchange: ExchangeFn, members: Sequence[int], world: InprocWorld) -> tuple[Channel, Memory]:
        return _InprocChannel(self.rank, world), _InprocMemory(self.rank, world)
