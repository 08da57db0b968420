"""What transports and kernels ask of an accelerator: ordered queues of work that nobody waits for on the host.

    host      enqueues and goes on; it never waits for the device
    stream    runs its work in order; different streams run at the same time, in any interleaving
    event     a mark in a stream; another stream can wait until it is passed
    pad       int32 words in device memory; a stream can wait until a word has a value, and can write a word, also one of a
              peer's memory. Neither occupies a multiprocessor.

[Note: What orders what]
    stream A   copy x -> peer | write_value(pad, 7)                       x is visible to whoever has seen the 7
    stream B                    wait_value(pad, 7) | read x               also in another process, also on another device
A write is ordered behind everything before it in its stream, a wait before everything after it in its stream, and nothing
else is ordered: neither by the time at which the host made a call nor by the order of calls for different streams.

[Note: The host may stand]
We never make the host wait for the device, but the driver may, in any call: a kernel that is launched for the first time is
loaded, memory is allocated or freed, a queue of work is full. The call then returns when the device has done what was enqueued
before it (CUDA programming guide, Lazy Loading, Potential Hazards; meta-pytorch/torchcomms #2334). If that waits for a peer
whose host stands likewise, in front of the call by which it would answer, both stand for ever. So a rank enqueues what peers
wait for before it enqueues its own wait for the same thing of theirs: published parameters before pulls, partials before sums,
what is read before credit for it. Then the rank that stands furthest behind waits only for what the others have enqueued, and
goes on. The simulated device makes hosts stand at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch


class Stream(ABC):
    """A queue of device work. Two objects for one queue are equal and have the same hash."""

    name: str


class Event(ABC):
    """A mark in a stream, recorded once."""

    timed: bool = False  # it keeps the time at which the device passed it

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has passed the mark. Never blocks; any thread may ask."""

    @abstractmethod
    def wait(self) -> None:
        """Block the calling thread until the device has passed the mark: for measurements, not for work."""


class Word(NamedTuple):
    """One word of a pad and a value for it."""

    pad: torch.Tensor  # int32, 1-D, contiguous; device memory of this rank, or a peer's that is mapped here
    place: int  # index in the pad
    value: int  # taken modulo 2**32, as int32


# A Word, or what it is made of: in loops over ranks its name would be a Python frame for each of them.
WordLike = tuple[torch.Tensor, int, int]


def as_int32(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def reached(word: int, value: int, *, exact: bool = False) -> bool:
    """What `wait_value` waits for. Not exact: word >= value, cyclic, so that counters may wrap around."""
    return as_int32(word - value) == 0 if exact else as_int32(word - value) >= 0


Span = tuple[torch.Tensor, int, torch.Tensor, int, int]  # destination, its first byte, source, its first byte, bytes


class Batch:
    """Work for one stream that is given to the driver in few calls, in its order: waits and writes of words that follow each
    other are one call. What is still held back goes at `submit`, which must be called before anything else is asked of the
    stream, also after an error: a write that is lost stops a peer.

    Nothing is checked, and no view is made: spans lie in uint8 tensors, 1-D and contiguous. It is empty after `submit`, and may
    be used again, by one thread at a time.
    """

    __slots__ = ("_device", "_stream")

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream

    def copy(self, dst: torch.Tensor, dst_start: int, src: torch.Tensor, src_start: int, nbytes: int) -> None:
        """dst[dst_start :][: nbytes] <- src[src_start :][: nbytes], as `Device.copy`."""
        to, at = dst.narrow(0, dst_start, nbytes), src.narrow(0, src_start, nbytes)
        self._device.copy(to, at, self._stream)

    def copy_all(self, spans: Sequence[Span]) -> None:
        """Several copies, in any order among themselves: nothing may tell one of them from the others."""
        for span in spans:
            self.copy(*span)

    def wait(self, pad: torch.Tensor, place: int, value: int, *, exact: bool = False) -> None:
        self._device.wait_value(self._stream, pad, place, value, exact=exact)

    def write(self, pad: torch.Tensor, place: int, value: int) -> None:
        self._device.write_value(self._stream, pad, place, value)

    def wait_all(self, words: Sequence[WordLike], *, exact: bool = False) -> None:
        """`wait` for several."""
        for pad, place, value in words:
            self.wait(pad, place, value, exact=exact)

    def write_all(self, words: Sequence[WordLike]) -> None:
        """`write` of several."""
        for pad, place, value in words:
            self.write(pad, place, value)

    def submit(self) -> None:
        return


class Device(ABC):
    """One accelerator as one rank uses it. All methods but `peek`, `poke`, `spoil` and `elapsed` only enqueue, and return at
    once."""

    torch_device: torch.device
    capturing: Callable[[], bool] | None = None  # whether the current stream is being captured into a graph; None: it cannot be

    # ---- streams and events ------------------------------------------------------------------------------------------
    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that kernels launched now go to."""

    @abstractmethod
    def side_stream(self, name: str) -> Stream:
        """A stream of our own, made once per name ("gather", "scatter", "reduce"); not ordered with the default stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make it the current stream of this thread."""

    @abstractmethod
    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        """Mark the place behind all work that is in the stream now. timing: and keep the time (device/timing.py)."""

    @abstractmethod
    def elapsed(self, start: Event, end: Event) -> int:
        """Nanoseconds from one mark to another of any two streams; both timed, passed, and in this order."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """What is enqueued in `stream` from now on runs after the event."""

    # ---- bytes -------------------------------------------------------------------------------------------------------
    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """dst <- src, both uint8, 1-D, contiguous, of one length; either may be a peer's memory. By a copy engine.

        The caller keeps both alive until the copy is done: nothing is recorded with the allocator.
        """

    # ---- words -------------------------------------------------------------------------------------------------------
    @abstractmethod
    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        """The stream waits until pad[index] >= value (cyclic), or == value if `exact`. Own memory only."""

    @abstractmethod
    def write_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int) -> None:
        """pad[index] = value, after everything before it in the stream has become visible to the whole system."""

    def write_values(self, stream: Stream, words: Sequence[WordLike]) -> None:
        """Several `write_value`, in any order among themselves; cheaper than one by one."""
        for word in words:
            self.write_value(stream, *word)

    def batch(self, stream: Stream) -> Batch:
        """To enqueue much at once."""
        return Batch(self, stream)

    # ---- out of band -------------------------------------------------------------------------------------------------
    @abstractmethod
    def peek(self, pad: torch.Tensor) -> list[int]:
        """The words as they are now, whatever the streams wait for. Blocks the calling thread: for a watchdog, not for work."""

    @abstractmethod
    def poke(self, words: Sequence[Word]) -> None:
        """Write now, whatever the streams wait for. Blocks the calling thread: for set-up and for releasing stuck streams."""

    @abstractmethod
    def spoil(self, memory: Sequence[torch.Tensor]) -> None:
        """Fill contiguous tensors with bytes 0xFF, which are NaN in every floating dtype, now, whatever the streams wait for.

        No multiprocessor may be needed for it: kernels that wait may hold them all. Blocks the calling thread: for a watchdog.
        """
