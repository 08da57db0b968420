"""Holds every multiprocessor of a GPU, so that work which ends meanwhile is known to need none.

The kernel has as many blocks as fit on the GPU at once by their threads alone, so when all have begun no multiprocessor has
room for one more warp, and none leaves before it is told. What is enqueued in another stream then ends only if something else
does it: a copy engine, or the channel that feeds the GPU.

[Note: It cannot hang]
Three things end it: `release`, a timer that calls it after `limit_s` (for a host that stands in a call of the driver), and the
kernel's own clock a second later. A trial that was ended by the last two is told as one whose work needed a multiprocessor.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from commfuse_dp.device.base import Device, Stream
from commfuse_dp.errors import CommFuseError

THREADS = 512
SPEC = ("hold", (("COMMFUSE_HOLD_THREADS", str(THREADS)),), str(Path(__file__).parent))  # of kernels/nvrtc.py
BEGIN_S = 5.0  # all blocks are there much sooner, unless somebody else has the GPU


class Held(Protocol):
    """Something that holds all multiprocessors inside a `with`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...

    @property
    def holding(self) -> bool:
        """Nobody has let it go yet."""


class Hold:
    """Raises ToolchainError or CompileError if the kernel cannot be had, CommFuseError if another program holds the GPU."""

    class _Argument(ctypes.Structure):
        _fields_ = (("words", ctypes.c_uint64), ("count", ctypes.c_uint64), ("limit_ns", ctypes.c_uint64))

    def __init__(self, device: torch.device, limit_s: float) -> None:
        from commfuse_dp.kernels import nvrtc

        properties = torch.cuda.get_device_properties(device)
        self._kernel = nvrtc.kernel(nvrtc.Spec(*SPEC), device)
        self._blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // THREADS)
        self._stream = torch.cuda.Stream(device)
        self._words = torch.zeros(3, dtype=torch.int32, pin_memory=True)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._limit_s = limit_s
        limit_ns = int(1e9 * (limit_s + 1.0))
        self._argument = self._Argument(self._words.data_ptr(), self._count.data_ptr(), limit_ns)
        self._timer: threading.Timer | None = None

    @property
    def holding(self) -> bool:
        return self._words.tolist() == [0, 1, 0]

    def release(self) -> None:
        self._words[0] = 1

    def __enter__(self) -> Hold:
        self._words.zero_()
        self._count.zero_()
        torch.cuda.synchronize(self._count.device)
        self._timer = threading.Timer(self._limit_s, self.release)
        self._timer.daemon = True
        self._timer.start()
        self._kernel.launch(self._blocks, THREADS, ctypes.addressof(self._argument), self._stream.cuda_stream)
        limit = time.monotonic() + min(BEGIN_S, self._limit_s)
        while not self.holding:
            if time.monotonic() > limit:
                here = int(self._words[1])
                self.__exit__(None, None, None)
                raise CommFuseError(
                    f"{self._blocks} blocks of {THREADS} threads did not fit on the GPU at once within {BEGIN_S:g} s "
                    f"(all there: {bool(here)}): is another program using it?"
                )
            time.sleep(0.0005)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
        if self._timer is not None:
            self._timer.cancel()
        self._stream.synchronize()  # bounded by the kernel's own clock


class Trial(NamedTuple):
    """needed: the work did not end while the multiprocessors were held. seconds: of the host, until it did or was given up."""

    needed: bool
    seconds: float


def trial(hold: Held, device: Device, stream: Stream, work: Callable[[Stream], None], patience_s: float) -> Trial:
    """Whether `work`, which enqueues something in `stream`, ends while `hold` holds. It must have run once before: what a first
    call loads or allocates may wait for the device."""
    with hold:
        start = time.monotonic()
        work(stream)
        event = device.record(stream)
        done = event.done()
        while not done and hold.holding and time.monotonic() - start < patience_s:
            time.sleep(0.0002)
            done = event.done()
        ended_while_held = done and hold.holding
        seconds = time.monotonic() - start
    event.wait()
    return Trial(not ended_while_held, seconds)
