"""State of one rank that windows and messages of a stream-ordered transport share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from commfuse_dp.device.base import Device, Event, Stream, WordLike
from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.checks import check_peer, is_closed
from commfuse_dp.transport.membership import Membership
from commfuse_dp.transport.streams.watch import Watchdog
from commfuse_dp.transport.waiting import await_news


class StreamCore:
    """Every call of the transport begins with `check` or `enter`."""

    no_graph: ClassVar[str]  # why it cannot be captured
    watch: Watchdog[Any]

    def __init__(self, rank: int, membership: Membership, world_size: int, *, name: str, device: Device, probe: Probe) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        self.membership = membership
        self.device, self.probe = device, probe
        self.peers = [(rank + step) % world_size for step in range(1, world_size)]  # not all ranks turn to rank 0 first
        self.closed = False
        self._pid = os.getpid()
        self._capturing = device.capturing
        self._held: list[WordLike] = []
        self._held_on: Stream | None = None

    def leave(self) -> bool:
        """The transport closes. False: it has, or this is a copy made by fork: neither the thread nor the device is its own."""
        before, self.closed = self.closed, True
        return not before and os.getpid() == self._pid

    def check(self) -> None:
        if self.closed:
            raise is_closed(self.name, self.membership.called(self.rank))
        if self.watch.failure is not None:
            self.watch.check()

    def enter(self, *, flush: bool = True) -> Stream:
        """Raises what is wrong; hands over what was held back for company. Returns the current stream."""
        if self.closed or self.watch.failure is not None:  # asked here, too: most calls of a layer begin here
            self.check()
        if self._capturing is not None and self._capturing():
            raise TransportError(
                f"transport {self.name} cannot be captured into a CUDA graph: {self.no_graph}. Capture without CommFuse's "
                "layers, or use them outside the graph."
            )
        if flush and self._held:
            self.flush()
        return self.device.current_stream()

    def check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            check_peer(peer, self.rank, self.peers, self.world_size)

    def record(self, stream: Stream) -> Event:
        """Behind all that is in the stream now. Keeps the time while somebody watches."""
        return self.device.record(stream, timing=self.probe.timing is not None)

    def progress(self, timeout_s: float) -> None:
        """Wait for news, for a while."""
        self.enter()
        if timeout_s > 0:
            await_news(self.watch.news, timeout_s)
            self.check()

    # ---- writing words -----------------------------------------------------------------------------------------------
    def hold(self, stream: Stream, words: Sequence[WordLike], *, more: bool) -> None:
        """Write words behind what is in the stream now; `more`: or a little later."""
        if self._held and self._held_on != stream:
            self.flush()
        self._held += words
        self._held_on = stream
        if not more:
            self.flush()

    def flush(self) -> None:
        if self._held:
            assert self._held_on is not None
            self.device.write_values(self._held_on, self._held)
            self._held = []
