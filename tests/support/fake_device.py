"""A simulated accelerator: real copies on CPU tensors, in every order that streams, events and words allow, and no other.

    world = FakeWorld(ranks, seed=7)                     one for all ranks, which are threads of one process
    device = world.devices[rank]
    ... enqueue ...
    world.run()                                          deferred: executes, in an order drawn from the seed

Two ways of running:

* deferred (default): nothing runs before `run`, the current stream neither. Work of the caller's own is enqueued by
  `device.launch(function, reads=, writes=)`. As no call of the host can depend on the device, what a GPU does while the host
  still enqueues is among the orders of a run after all was enqueued; so the orders drawn here leave none out.
* inline (`deferred=False`): the stream that is current is the thread itself, so that ordinary code runs on it unchanged; a
  wait of that stream blocks the thread, and side streams run when somebody waits. For suites written for other transports.

[Note: What is detected]
Accesses to memory are compared by "happens before", as a race detector does, not by the order that came about: every stream
has a vector clock, carried on by events and by words. Two accesses to the same bytes, one of them a write, that nothing
orders raise `Race`, also when they happened to run in the right order. This is how a read before its wait is found, and a
buffer that is written again while a reader may be at it. A word that nobody will write is found by `run`, which names the
streams that stand and for what (`Stuck`). A thread of a rank that asks the device for words while `strict` is set, which on a
GPU would wait for it, raises `HostBlocked`.

Inline, some calls of a rank's own thread stand until all streams of its device are empty (`stands`), as the driver may make any
call do: see [Note: The host may stand] in device/base.py. Ranks that then wait for each other are `Stuck`, too.

[Note: Time]
Every stream has a clock of simulated nanoseconds: an operation begins when the one before it in its stream, and what it waits
for, are over, and lasts what `world.costs` says (nothing, if it is not given) or `delay` asks for. It does not depend on the
order that was drawn, nor on the machine. Engines and links are not shared: two copies at a time do not slow each other down.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commfuse_dp.device.base import Batch, Device, Event, Span, Stream, Word, as_int32, reached

STANDS = 0.02  # share of the calls in which hosts stand
PATIENCE_S = 20.0  # inline: longest time that a thread stands before the test is given up


class Race(AssertionError):
    """Two accesses to the same bytes that nothing orders."""


class Stuck(AssertionError):
    """Streams stand for words or events that nobody will write or record any more."""


class HostBlocked(AssertionError):
    """A rank's own thread waited for the device."""


class FakeStream(Stream):
    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.queue: deque[_Op] = deque()
        self.clock: dict[FakeStream, int] = {}
        self.now = 0  # simulated ns

    def __repr__(self) -> str:
        return f"rank {self.rank} {self.name}"


class FakeEvent(Event):
    def __init__(self, world: FakeWorld, timed: bool = False) -> None:
        self.world = world
        self.timed = timed
        self.at = 0  # simulated ns
        self.passed = False
        self.clock: dict[FakeStream, int] = {}

    def done(self) -> bool:
        if not self.passed and not self.world.deferred:
            self.world.advance()  # a device goes on by itself while somebody asks
        return self.passed

    def wait(self) -> None:
        if self.world.strict:
            raise HostBlocked("an event was waited for")
        if self.world.deferred:
            self.world.run()
        else:
            self.world.drive(lambda: self.passed)


@dataclass(eq=False)
class _Op:
    what: str
    run: Callable[[FakeStream], None]
    ready: Callable[[], bool] = lambda: True
    done: bool = False
    cost: int = 0  # simulated ns


@dataclass
class _Access:
    start: int
    stop: int
    write: bool
    stream: FakeStream
    time: int
    what: str


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(storage, first byte, end) of a tensor; strided ones as the whole stretch that they cover."""
    if tensor.numel() == 0:
        return 0, 0, 0
    reach = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), start, start + (reach + 1) * tensor.element_size()


@dataclass
class FakeWorld:
    """Streams, words and memory of all ranks. Thread-safe. `slow`: (rank, stream) that run only when nothing else can."""

    world_size: int
    seed: int = 0
    deferred: bool = True
    slow: frozenset[tuple[int, str]] = frozenset()
    strict: bool = False
    costs: Callable[[FakeStream, str, int], int] | None = None  # (stream, "copy" or torch's operation, bytes) -> ns
    stands: bool = False  # inline: hosts stand at times until their device has nothing left to do
    executed: int = 0
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.changed = threading.Condition(threading.RLock())
        self.streams: list[FakeStream] = []
        self.words: dict[int, dict[FakeStream, int]] = {}  # address -> clock of who wrote it last
        self.written: dict[int, list[tuple[int, int]]] = {}  # address -> (value, when) of every write
        self.accesses: dict[int, list[_Access]] = {}  # storage -> what was done to it
        self._kept: dict[int, torch.UntypedStorage] = {}  # an address must not come again for something else
        self._failure: AssertionError | None = None
        self.released = False  # somebody wrote words from outside: what runs after that is worthless, and not looked at
        self.devices = [FakeDevice(self, rank) for rank in range(self.world_size)]

    # ---- running -----------------------------------------------------------------------------------------------------
    def run(self, patience_s: float = 0.0) -> None:
        """Execute everything that is enqueued. Raises Stuck if something is left and nobody pokes for patience_s."""
        with self.changed:
            limit = time.monotonic() + patience_s
            while any(stream.queue for stream in self.streams):
                if self.step():
                    limit = time.monotonic() + patience_s
                elif time.monotonic() >= limit:
                    raise Stuck(f"seed {self.seed}: {self.standing()}")
                else:
                    self.changed.wait(0.005)

    def step(self) -> bool:
        """Execute one operation that may run now. False if there is none."""
        with _disable_current_modes():  # what the simulation does itself is nobody's access
            return self._step()

    def _step(self) -> bool:
        if self._failure is not None:
            raise self._failure
        runnable = [stream for stream in self.streams if stream.queue and stream.queue[0].ready()]
        if not runnable:
            return False
        quick = [stream for stream in runnable if (stream.rank, stream.name) not in self.slow]
        stream = self.random.choice(quick or runnable)
        op = stream.queue.popleft()
        self.trace.append(f"{stream}: {op.what}")
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        try:
            op.run(stream)
        except AssertionError as failure:  # every thread is to see it
            self._failure = failure
            raise
        stream.now += op.cost
        op.done = True
        self.executed += 1
        self.changed.notify_all()
        return True

    def advance(self) -> None:
        """Inline: execute whatever may run."""
        with self.changed:
            while self.step():
                pass

    def drive(self, done: Callable[[], bool]) -> None:
        """Inline: run until `done`, with the calling thread standing."""
        limit = time.monotonic() + PATIENCE_S
        with self.changed:
            while not done():
                if not self.step():
                    if time.monotonic() > limit:
                        raise Stuck(f"seed {self.seed}: {self.standing()}")
                    self.changed.wait(0.01)

    def cost(self, stream: FakeStream, what: str, nbytes: int) -> int:
        return self.costs(stream, what, nbytes) if self.costs is not None else 0

    def standing(self) -> str:
        return "; ".join(f"{stream} stands at {stream.queue[0].what}" for stream in self.streams if stream.queue)

    # ---- memory ------------------------------------------------------------------------------------------------------
    def keep(self, tensor: torch.Tensor) -> None:
        """Watch a tensor's storage, and keep it alive."""
        storage = tensor.untyped_storage()
        self._kept.setdefault(storage.data_ptr(), storage)

    def access(self, stream: FakeStream, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        storage, start, stop = _span(tensor)
        if start == stop or storage not in self._kept or self.released:
            return
        log = self.accesses.setdefault(storage, [])
        kept = []
        for other in log:
            overlap = other.start < stop and start < other.stop
            before = stream.clock.get(other.stream, 0) >= other.time
            if overlap and (write or other.write) and not before:
                first = f"{'write' if other.write else 'read'} by {other.stream} ({other.what})"
                second = f"{'write' if write else 'read'} by {stream} ({what})"
                raise Race(f"seed {self.seed}: nothing orders the {first} and the {second}")
            covered = before and start <= other.start and other.stop <= stop
            if not (covered and (write or (not other.write and other.stream is stream))):
                kept.append(other)
        kept.append(_Access(start, stop, write, stream, stream.clock.get(stream, 0), what))
        self.accesses[storage] = kept


class FakeBatch(Batch):
    """As CUDA's: words that follow each other are held back until a copy, or `submit`; copies in any order are shuffled."""

    __slots__ = ("_fake", "_held", "_on")

    def __init__(self, device: FakeDevice, stream: Stream) -> None:
        super().__init__(device, stream)
        self._fake, self._on = device, stream
        self._held: list[Callable[[], None]] = []

    def copy(self, dst: torch.Tensor, dst_start: int, src: torch.Tensor, src_start: int, nbytes: int) -> None:
        self.submit()
        super().copy(dst, dst_start, src, src_start, nbytes)

    def copy_all(self, spans: Sequence[Span]) -> None:
        self.submit()
        spans = list(spans)
        with self._fake.world.changed:
            self._fake.world.random.shuffle(spans)
        super().copy_all(spans)

    def wait(self, pad: torch.Tensor, place: int, value: int, *, exact: bool = False) -> None:
        self._held.append(lambda: self._fake.wait_value(self._on, pad, place, value, exact=exact))

    def write(self, pad: torch.Tensor, place: int, value: int) -> None:
        self._held.append(lambda: self._fake.write_value(self._on, pad, place, value))

    def submit(self) -> None:
        held, self._held = self._held, []
        for enqueue in held:
            enqueue()


class FakeDevice(Device):
    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.torch_device = torch.device("cpu")
        self.world, self.rank = world, rank
        self.captures = False
        self.counts: dict[str, int] = {}
        self._streams: dict[str, FakeStream] = {}
        self._local = threading.local()

    def beside(self) -> FakeDevice:
        """The same device for another transport, which has side streams of its own."""
        other = FakeDevice(self.world, self.rank)
        other._local, other._streams = self._local, {"main": self.side_stream("main")}
        return other

    # ---- streams and events ------------------------------------------------------------------------------------------
    def current_stream(self) -> FakeStream:
        return getattr(self._local, "stream", None) or self.side_stream("main")

    def side_stream(self, name: str) -> FakeStream:
        with self.world.changed:
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = FakeStream(self.rank, name)
                self.world.streams.append(stream)
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        before = self.current_stream()
        try:
            self._enter(stream)
            yield
        finally:
            self._enter(before)

    def _enter(self, stream: FakeStream) -> None:
        self._local.stream = stream
        if not self.world.deferred:  # the thread becomes that stream, so it stands until the stream has come to this place
            self._enqueue(stream, _Op("host goes on here", lambda at: None))

    def record(self, stream: Stream, *, timing: bool = False) -> FakeEvent:
        event = FakeEvent(self.world, timing)

        def run(at: FakeStream) -> None:
            event.passed, event.clock, event.at = True, dict(at.clock), at.now

        self._enqueue(stream, _Op("mark (timed)" if timing else "record", run))
        return event

    def elapsed(self, start: Event, end: Event) -> int:
        assert isinstance(start, FakeEvent) and isinstance(end, FakeEvent)
        assert start.timed and end.timed, "an event that keeps no time"
        assert start.passed and end.passed, "an event that has not been passed"
        assert end.at >= start.at, "the other way round: CUDA does not say what it answers then"
        return end.at - start.at

    def wait_event(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, FakeEvent)

        def run(at: FakeStream) -> None:
            _merge(at.clock, event.clock)
            at.now = max(at.now, event.at)

        self._enqueue(stream, _Op("wait for an event", run, lambda: event.passed))

    def delay(self, nanoseconds: int, stream: Stream | None = None) -> None:
        """Work that takes that long, on the current stream if none is given."""
        self._enqueue(stream or self.current_stream(), _Op("delay", lambda at: None, cost=nanoseconds))

    # ---- work --------------------------------------------------------------------------------------------------------
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        assert dst.dtype == src.dtype == torch.uint8 and dst.dim() == src.dim() == 1 and dst.shape == src.shape
        assert dst.is_contiguous() and src.is_contiguous()
        assert isinstance(stream, FakeStream)
        cost = self.world.cost(stream, "copy", dst.numel())
        self._enqueue_work(stream, "copy", lambda: dst.copy_(src), (src,), (dst,), cost)

    def launch(
        self,
        function: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        what: str = "kernel",
        stream: Stream | None = None,
        cost: int = 0,
    ) -> None:
        """A kernel of the caller's own, on the current stream if none is given. cost: simulated ns."""
        self._enqueue_work(stream or self.current_stream(), what, function, reads, writes, cost)

    def _enqueue_work(
        self,
        stream: Stream,
        what: str,
        function: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        cost: int,
    ) -> None:
        for tensor in (*reads, *writes):
            self.world.keep(tensor)

        def run(at: FakeStream) -> None:
            for tensor in reads:
                self.world.access(at, tensor, write=False, what=what)
            for tensor in writes:
                self.world.access(at, tensor, write=True, what=what)
            function()

        self._enqueue(stream, _Op(what, run, cost=cost))

    # ---- words -------------------------------------------------------------------------------------------------------
    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        address = pad.data_ptr() + 4 * index
        value = as_int32(value)

        def run(at: FakeStream) -> None:
            _merge(at.clock, self.world.words.get(address, {}))
            written = self.world.written.get(address, ())
            at.now = max(at.now, min((when for word, when in written if reached(word, value, exact=exact)), default=0))

        with _disable_current_modes():
            what = f"wait for word {index} {'==' if exact else '>='} {value} (is {int(pad[index])} when enqueued)"
        self._enqueue(stream, _Op(what, run, lambda: reached(int(pad[index]), value, exact=exact)))

    def write_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int) -> None:
        def run(at: FakeStream) -> None:
            pad[index] = as_int32(value)
            address = pad.data_ptr() + 4 * index
            self.world.words[address] = dict(at.clock)
            self.world.written.setdefault(address, []).append((as_int32(value), at.now))

        self._enqueue(stream, _Op(f"write word {index} = {as_int32(value)}", run))

    def batch(self, stream: Stream) -> FakeBatch:
        return FakeBatch(self, stream)

    # ---- out of band -------------------------------------------------------------------------------------------------
    def peek(self, pad: torch.Tensor) -> list[int]:
        self._host_waits("peek")
        with self.world.changed, _disable_current_modes():
            return [int(word) for word in pad]

    def poke(self, words: Sequence[Word]) -> None:
        self._host_waits("poke")
        with self.world.changed, _disable_current_modes():
            self.world.released = True
            for word in words:
                word.pad[word.place] = as_int32(word.value)
                self.world.words[word.pad.data_ptr() + 4 * word.place] = {}
            self.world.changed.notify_all()

    def spoil(self, memory: Sequence[torch.Tensor]) -> None:
        self._host_waits("spoil")
        with self.world.changed, _disable_current_modes():
            self.world.released = True
            for tensor in memory:
                tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def capturing(self) -> bool:
        return self.captures

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _enqueue(self, stream: Stream, op: _Op) -> None:
        assert isinstance(stream, FakeStream) and stream.rank == self.rank
        kind = op.what.split()[0]
        with self.world.changed:
            self.stand_at_times()
            self.counts[kind] = self.counts.get(kind, 0) + 1
            stream.queue.append(op)
            self.world.changed.notify_all()
            if not self.world.deferred and stream is self.current_stream():
                self.world.drive(lambda: op.done)

    def stand_at_times(self) -> None:
        """See [Note: The host may stand] in device/base.py."""
        world = self.world
        with world.changed:
            if world.stands and not world.deferred and not _watchdog() and world.random.random() < STANDS:
                with _disable_current_modes():
                    world.drive(lambda: not any(stream.queue for stream in world.streams if stream.rank == self.rank))

    def _host_waits(self, what: str) -> None:
        if self.world.strict and not _watchdog():
            raise HostBlocked(f"rank {self.rank}: {what}() in {threading.current_thread().name} waits for the device")


def _watchdog() -> bool:
    """It is no rank's own thread that calls."""
    return threading.current_thread().name.startswith("commfuse-")


def _merge(clock: dict[FakeStream, int], other: dict[FakeStream, int]) -> None:
    for stream, at in other.items():
        clock[stream] = max(at, clock.get(stream, 0))
