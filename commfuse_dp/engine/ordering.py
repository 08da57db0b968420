"""When something that was called has happened: at once on a CPU, in the order of streams on a device.

The engine is written once. What differs is how "afterwards" is said: on the host a call that has returned is done, on a device
it is enqueued in a stream, and whoever needs its result on another stream waits there for an event. `Ordering` is the few
places where the engine has to say it.

[Note: Streams of a step]

    compute   | publish | GEMM | GEMM ...        wgrad  wgrad   ...   own wgrad   |           join | optimizer
    gather      wait epoch, copy  copy  copy ...                                                        (transport)
    scatter                                        send    send  ...                                    (transport)
    reduce                                                        wait compute, wait peers, sum  sum ---^

* A sum runs on `reduce`, so that compute never waits for a peer's partial. It reads the own partial that compute has
  produced (the event taken in `reducing`) and partials in the inbox (the transport makes the current stream, which is
  `reduce` then, wait for them).
* Buffers go round through the pool with the event after which nobody reads or writes them (buffers.py).
* Memory that the caching allocator handed out on compute may be read on `reduce` until `join`; it is kept alive until then
  (`hold`), as the allocator would otherwise give it to compute again at once. No record_stream: that would hold blocks back
  until a later, unknown moment and inflate the reserved memory.
* `join` speaks for the stream that calls it. A framework may look at gradients on a stream of its own (DeepSpeed does): that
  one has to join, too, or to wait for one that has; and what is held goes only when compute itself has joined.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from commfuse_dp.device.base import Device, Event, Stream

_NOTHING = nullcontext()


class Ordering:
    """A host that executes what it is told when it is told: nothing has to be said."""

    def mark(self) -> Event | None:
        """After everything called so far, on the current stream."""
        return None

    def after(self, event: Event | None) -> None:
        """What the current stream is given from now on comes after `event`."""
        return

    def reducing(self) -> AbstractContextManager[object]:
        """To be entered at once: sums are made in it, after everything called so far."""
        return _NOTHING

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep memory alive that a sum under way reads."""
        return

    def join(self) -> None:
        """What is called on the current stream from now on sees the results of all sums."""
        return


class StreamOrdering(Ordering):
    """A device: see [Note: Streams of a step]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reduce = device.side_stream("reduce")
        self._compute = device.current_stream()  # where the last sum's own partial was computed
        self._held: list[torch.Tensor] = []
        self._joined: set[Stream] = set()  # behind all sums
        self._reduced = False  # there have been some

    def mark(self) -> Event:
        return self._device.record(self._device.current_stream())

    def after(self, event: Event | None) -> None:
        if event is not None:
            self._device.wait_event(self._device.current_stream(), event)

    def reducing(self) -> AbstractContextManager[object]:
        device = self._device
        self._compute = device.current_stream()
        device.wait_event(self._reduce, device.record(self._compute))
        self._reduced = True
        self._joined.clear()
        return device.on(self._reduce)

    def hold(self, *tensors: torch.Tensor) -> None:
        self._held.extend(tensors)

    def join(self) -> None:
        stream = self._device.current_stream()
        if not self._reduced or stream in self._joined:
            return
        self._device.wait_event(stream, self._device.record(self._reduce))
        self._joined.add(stream)
        if stream == self._compute:
            self._held.clear()


def ordering_of(device: Device | None) -> Ordering:
    """device: of a stream-ordered transport; None: its waits block the host."""
    return StreamOrdering(device) if device is not None else Ordering()
