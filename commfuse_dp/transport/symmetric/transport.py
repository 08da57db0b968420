"""Transport `symmetric`: GPUs of one host copy from and to each other's memory, ordered by streams and words alone.

Bytes are moved by copy engines, order is made by stream memory operations: no multiprocessor is used and no thread waits, see
[Note: Stream-ordered transports] in base.py. Run by processes that share one GPU, not yet on several; its order is proved over
a simulated device.

[Note: Timelines] (r = reader or receiver, o = owner; |: a wait)

  parameters, one epoch
    o current   |finished(r) >= e-1   copy shards -> segment   write published[o, key] = e  to every rank
    r gather    |after (last reader of the buffer)   |published[o, key] >= e   copy segment of o -> buffer   write arrival
    r current                                                                 |arrival (or the kernel)  GEMM reads the buffer
    r gather    ... all copies of e ...   write finished[r] = e  to every rank
  So: a segment is written only after the copies of all readers; a buffer only after its last GEMM; nothing is read early.

  Once all is published, o writes complete[o] = e, and r, which has published all, too, waits for that instead of each key.

  gradients, one message
    r' current  |event: the last bytes at this place of the staging have left    GEMM -> staging
    r' scatter       |event of current   |credit >= the message whose place is taken   copy staging -> inbox   write arrival
    o  current or reduce                                                        |arrival == fingerprint   sum   write credit
  So: staging and inbox are overwritten only when what was there has been read; a sum starts only when the bytes are there.

[Note: Words for pulls]
A slice has an arrival word of its own, whose value is the number of its pulls: it is known when the pull is enqueued, it only
rises, and in a program of a steady order all slices of a layer have the same. The write follows its copy in stream "gather",
slice by slice, so a kernel's tile may start while the next slice is still coming. Nothing is written between the copies of one
`copy_all`, which run in any order: it serves where there are no words (see [Note: Kernels that wait]), and one event tells that
all are there. Waits for an own word are enqueued behind the write that they wait for, so the two cannot wait in a circle,
whatever channels the streams are mapped to.

[Note: Where credit is waited for]
In the stream "scatter", not in the stream that computes: the staging gives compute another inbox's length of slack. Messages
leave in the order of `send`, to whichever peer: one that is slow to give credit holds up those behind it. There is no circle:
take the first message in program order that has not left. Everything before it has, so its receiver can sum what fills its
inbox, once its own compute has come there; and that waits only for messages that come later. But all that one call owes to
one owner before the owner's own partial exists must fit into the inbox, or the owner must copy arrivals out of it without
waiting for that partial (as the engine does).

[Note: Out of the allocator's hands]
A fresh buffer from torch's allocator may have been used by the current stream a moment ago. Another stream may write to it only
behind that: a `pull` without `after` therefore runs behind everything in the current stream. Window buffers and staging live
as long as the transport or the caller's pool, so nothing is ever freed under a copy.

[Note: Kernels that wait]
A kernel that waits for an arrival word holds its multiprocessors. That is harmless while the copy that it waits for is made by
a copy engine, as between two GPUs. Inside one GPU CUDA may copy by a kernel (NCCL's ce_coll.cc asks CUDA 13.1 for copy engines
there, as that is not the default), for which a persistent kernel that waits on every multiprocessor leaves no room: both would
wait for ever. So if any two ranks share a GPU, pulls have no arrival word, and kernels are launched behind `Transfer.wait`.

[Note: The end]
`close` waits (host, bounded) until this rank's streams have done what it enqueued, since the peers wait for some of it, then
says goodbye. Memory of a peer that has gone stays mapped. If a stream cannot be freed, the memory is kept until the process
ends: freeing it would wait for the stream for ever.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from commfuse_dp.device.base import Device
from commfuse_dp.device.timing import EventTimer
from commfuse_dp.errors import CommFuseError
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import WHOLE, ExchangeFn, Outcome, Transport
from commfuse_dp.transport.budget import LEAST_RING
from commfuse_dp.transport.closing import CLOSE_S, close_at_exit, done_within, never_free
from commfuse_dp.transport.membership import numbers_of
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel
from commfuse_dp.transport.symmetric.core import Core, Layout
from commfuse_dp.transport.symmetric.memory import SymmetricMemory
from commfuse_dp.transport.symmetric.messages import Messages
from commfuse_dp.transport.symmetric.watch import WordWatch
from commfuse_dp.transport.symmetric.windows import Windows


class SymmetricTransport(Windows, Messages):
    """See the module. Collective constructor.

    Args:
        device, memory: the GPU and the memory shared with the peers' ones; both may be simulated.
        channel: control messages: goodbyes, deaths, failures. Owned from now on.
        inbox_bytes: room for messages from each peer, once per channel; once more for what is computed for each peer. Memory
            in all: 4 * inbox_bytes * (world_size - 1), and a little.
        kernels_may_wait: see [Note: Kernels that wait]. False: pulls have no `arrival`.
    """

    name: ClassVar[str] = "symmetric"
    device: Device

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: ExchangeFn,
        *,
        device: Device,
        memory: SymmetricMemory,
        channel: Channel,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
        kernels_may_wait: bool = True,
    ) -> None:
        Transport.__init__(self, rank, world_size, message_limit=inbox_bytes, deadline_s=deadline_s, probe=probe)
        self.membership.numbers = numbers_of(exchange)  # the watchdog may speak before `open_transport` knows them
        self.device = device
        self.probe.measure_by(EventTimer(device, self.probe))
        self._channel = channel
        layout = Layout(world_size, inbox_bytes)
        purpose = f"inboxes (inbox_bytes = {inbox_bytes} for each of {world_size - 1} peers)"
        try:
            with torch.inference_mode(False):
                blocks = memory.allocate(layout.nbytes, purpose)
        except BaseException:
            channel.close()
            raise
        self._watch = WordWatch(rank, self.membership, world_size, device, channel, deadline_s=deadline_s, name=self.name)
        self._core = Core(
            rank,
            self.membership,
            world_size,
            exchange,
            name=self.name,
            device=device,
            memory=memory,
            layout=layout,
            blocks=blocks,
            watch=self._watch,
            probe=self.probe,
        )
        self.kernels_may_wait = kernels_may_wait
        self._words = {}
        self._open_windows()
        self._open_messages(layout, inbox_bytes)
        self._watch.own_memory = lambda: (*self._memory_of(rank), *self._message_memory())
        self._watch.memory_of = self._memory_of
        close_at_exit(self)

    def finish(self, epoch: int, outcome: Outcome = WHOLE) -> None:
        super().finish(epoch)
        self._staging.rewind()

    def _renew(self, limit: int) -> int:
        layout = Layout(self.world_size, min(LEAST_RING, self.message_limit), limit)
        with torch.inference_mode(False):
            blocks = self._core.memory.allocate(layout.nbytes, f"messages of calls, {limit} bytes for each of the peers")
        self._core.take(blocks, layout)  # those of before are kept by `memory`
        self._open_messages(layout, limit)
        return 2 * self.world_size - 1

    # ---- progress and end --------------------------------------------------------------------------------------------
    def progress(self, timeout_s: float = 0.0) -> None:
        self._core.progress(timeout_s)

    def abort(self, reason: str) -> None:
        """Tell all peers that this rank has failed: their streams are released and their next calls raise."""
        if not self._core.closed:
            self._watch.tell(msg.pack_abort(self.rank, reason))

    def close(self, reason: str = "") -> None:
        core = self._core
        if reason:
            self.abort(reason)
        if not core.leave():
            return
        idle = False
        try:
            with contextlib.suppress(CommFuseError):
                idle = self._settle()
        finally:
            self._watch.tell(msg.pack(msg.GOODBYE))
            self._watch.stop()
            self._channel.flush(min(CLOSE_S, self.deadline_s))
            self._channel.close()
            if idle:
                core.blocks.clear()
                self._forget_windows()
                self._forget_messages()
                core.memory.close()
            else:
                never_free(self, "a stream still waits; its memory is kept", self)

    def _settle(self) -> bool:
        """Wait until the own streams have done what was enqueued; True if they have."""
        device = self.device
        if self._watch.failure is None:
            self._core.flush()
            self._leave()
        streams = {device.side_stream("gather"), device.side_stream("scatter"), device.current_stream()}
        events = [device.record(stream) for stream in streams]
        patience_s = min(CLOSE_S, self.deadline_s)
        return done_within(events, patience_s) or done_within(events, CLOSE_S, self._watch.release)
