"""Transport `p2p` on GPUs: parameters and gradients in grouped exchanges, ordered by streams alone.

For GPUs without peer access, or on several hosts. **NCCL: not yet run on a GPU.** In lockstep and stream-ordered, see the
notes in base.py: no requests, no threads that answer, no host that waits. The same code runs over any `GroupedExchange`.

[Note: Timelines] (r = this rank; |: a wait)

  parameters, one step of the order, t places on
    r current   |wait_finished(e-1)   copy shards -> segment   (event p)                      |event x   GEMM reads the buffer
    r gather         |event p   |after (last reader of the buffer)   { segment -> r-t, r+t -> buffer }   (event x)
  So: a segment is read behind its packing; `wait_finished` waits for all our exchanges of the epoch before, and nobody
  reads our segment but in them; a buffer is written behind its last GEMM.

  gradients, one step
    r current   |event y of the last exchange from this place of the staging   GEMM -> staging   (event g)
    r scatter       |event g   |events of the releases of this place of the inbox   { staging -> r+t, r-t -> inbox }  (event y)
    r current or reduce                                                                  |event y   sum   (event: release)
  So: a place of the staging is written when its bytes have left, one of the inbox when its sum is through. Both are local: no
  credit is told.

[Note: Bytes in flight]
"gather" and "scatter" wait for each exchange before the next one is posted there, as a communicator works off one after the
other anyway. Staging gives compute `inbox_bytes` of slack towards each peer before it must wait for exchanges.

[Note: Kernels must not wait]
Pulls have no arrival word: a persistent kernel that waits for one would hold the multiprocessors that NCCL's kernels need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Device, Event
from commfuse_dp.device.timing import EventTimer
from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import (
    CHANNEL_COLLECTIVE,
    NOWHERE,
    PARAM_LANE,
    WHOLE,
    ExchangeFn,
    Outcome,
    PullRequest,
    Transfer,
)
from commfuse_dp.transport.checks import (
    check_finish,
    check_out,
    check_publications,
    check_pull,
    check_sizes,
)
from commfuse_dp.transport.closing import CLOSE_S, close_at_exit, forget, never_free
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.grouped.core import Core
from commfuse_dp.transport.grouped.exchange import GroupedExchange, open_grouped
from commfuse_dp.transport.grouped.messages import Messages
from commfuse_dp.transport.grouped.watch import Step
from commfuse_dp.transport.one_sided.parts import own_segments


class Brought(Transfer):
    """A slice whose exchange is enqueued."""

    __slots__ = ("_core", "_out", "_step", "landed")

    landed: Event

    def __init__(self, core: Core, out: torch.Tensor, event: Event, step: Step | None) -> None:
        self._core, self._out, self.landed, self._step = core, out, event, step

    def done(self) -> bool:
        self._core.check()
        return True

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if where is not NOWHERE and self._step is not None:
            self._step.where = where
        stream = self._core.enter()
        self._core.device.wait_event(stream, self.landed)
        self._core.check()  # on a device whose calls wait, the wait may just have ended badly
        return self._out


class NcclTransport(Messages):
    """See the module. Collective constructor.

    Args:
        grouped: exchanges with the peers, owned from now on.
        exchange: the group's collective object exchange, used here and in `expose`.
        device: may be simulated.
        inbox_bytes: room for what is computed for a peer, and for what comes from it and is not released: 2 * inbox_bytes per
            peer in all, once more for each further channel that is used.
    """

    name: ClassVar[str] = "p2p"
    lockstep: ClassVar[bool] = True
    device: Device

    def __init__(
        self,
        grouped: GroupedExchange,
        exchange: ExchangeFn,
        *,
        device: Device,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
    ) -> None:
        super().__init__(grouped.rank, grouped.world_size, message_limit=inbox_bytes, deadline_s=deadline_s, probe=probe)
        self.device = device
        self.probe.measure_by(EventTimer(device, self.probe))
        self._exchange = exchange
        self._core = Core(grouped, device, name=self.name, deadline_s=deadline_s, probe=self.probe)
        self.membership = self._core.membership
        self._core.layers = lambda: self.layers
        self._gather = device.side_stream("gather")
        self._published: dict[int, int] = {}  # key -> epoch
        self._packed: dict[int, Event] = {}  # key -> behind its packing; until "gather" waits for it
        self._free_to_write = self._own_finished = 0
        try:
            self._open_messages(exchange, self.message_limit)
        except BaseException:
            self._core.watch.stop()
            grouped.close()
            raise
        # A watchdog must not ask a device that is being torn down; but nobody waits long for others when a program ends.
        close_at_exit(self, lambda transport: transport._close(CLOSE_S))  # type: ignore[attr-defined]

    # ---- windows -----------------------------------------------------------------------------------------------------
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self._core.enter()
        table = check_sizes(sizes, self.sizes, self.world_size)
        device = self.device.torch_device

        def take(nbytes: int) -> torch.Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)

        self.segments = own_segments(table, self.rank, self._exchange, take, f" on {device}")
        self.sizes = table

    def publish(self, keys: Sequence[int], epoch: int, *, last: bool = False) -> None:
        stream = self._core.enter()
        readers = "exchanges" if self._core.peers and self._free_to_write < epoch - 1 else ""
        check_publications(self, keys, epoch, self._published, readers)
        self._published.update(dict.fromkeys(keys, epoch))
        if keys:
            self._packed.update(dict.fromkeys(keys, self.device.record(stream)))

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> Sequence[Brought]:
        """Of requests whose `after` is None, `out` may be fresh from the allocator: it is written behind all that is in the
        current stream."""
        return [self._pull(epoch, request) for request in requests]

    def _pull(self, epoch: int, request: PullRequest) -> Brought:
        owner, key, start, nbytes, out, after, give, _ = request
        stream = self._core.enter()
        self._core.check_peer(owner)
        check_pull(self, request, epoch, self._own_finished)
        out = check_out(out, nbytes, self.name)
        segment = self.segments[key]
        if min(give) < 0 or sum(give) > segment.numel():
            raise ValueError(f"pull: give = {give} of key {key}, of which this rank publishes {segment.numel()} bytes")
        if self._published.get(key, 0) != epoch:
            raise TransportError(
                f"pull: rank {self.membership.called(self.rank)} has published key {key} up to epoch "
                f"{self._published.get(key, 0)}, not {epoch}: a pull of a lockstep transport also gives; publish first"
            )
        device, gather = self.device, self._gather
        if nbytes:
            device.wait_event(gather, after if after is not None else device.record(stream))
        packed = self._packed.pop(key, None)
        if packed is not None:
            device.wait_event(gather, packed)
        taker = self._core.mirror(owner)
        where = self.describe(owner, key, epoch, start, nbytes)
        gift = segment.narrow(0, *give)
        parts = (taker, gift), (owner, out)
        event, step = self._core.trade(gather, PARAM_LANE, *parts, where, (key, epoch, give[0]), (key, epoch, start))
        counters = self.probe.counters
        counters.param_bytes_received += nbytes
        counters.param_bytes_sent += give[1]
        return Brought(self._core, out, event, step)

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        self._core.enter()
        check_finish(epoch, self._own_finished)
        self._own_finished = epoch
        self._core.tell(epoch)

    def wait_finished(self, epoch: int, where: Where = NOWHERE, *, meanwhile: Callable[[], object] | None = None) -> None:
        stream = self._core.enter()
        if epoch <= 0:
            return
        self._free_to_write = max(self._free_to_write, epoch)
        self.device.wait_event(stream, self.device.record(self._gather))

    def _renew(self, limit: int) -> int:
        self._open_messages(self._exchange, limit, CHANNEL_COLLECTIVE)
        return 2 * len(self._core.peers)

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._core.progress(timeout_s)

    def close(self, reason: str = "") -> None:
        """Also waits, within the deadline, for slower peers to take the last steps: they need this rank for them."""
        well = not reason and sys.exc_info()[0] is None and self._core.watch.failure is None
        self._close(self.deadline_s if well else min(CLOSE_S, self.deadline_s))

    def _close(self, patience_s: float) -> None:
        core = self._core
        forget(self)
        if not core.leave():
            return
        idle = False
        try:
            idle = core.end((self._gather, self.device.side_stream("scatter"), self.device.current_stream()), patience_s)
        finally:
            if idle:
                self.segments = ()
                self._forget_messages()
            else:
                never_free(self, "an exchange did not end; its memory is kept", self)


def open_nccl(
    group: dist.ProcessGroup | None,
    *,
    device: Device,
    inbox_bytes: int,
    deadline_s: float,
    probe: Probe | None = None,
) -> NcclTransport:
    """Collective over `group` (None: the default group): the transport on communicators of its own.

    Raises TransportError if torch.distributed is not initialised, if the communicators cannot be made, or if memory is short.
    """
    grouped = open_grouped(group, deadline_s=deadline_s, device=device.torch_device)
    return NcclTransport(
        grouped,
        exchange_of(group),
        device=device,
        inbox_bytes=inbox_bytes,
        deadline_s=deadline_s,
        probe=probe,
    )
