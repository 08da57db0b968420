"""A two-sided transport behind the one-sided interface: every pull is paired with a send that its owner makes.

`OneSidedTransport` brings the protocol (epochs, inbox ring, credits, peers); this file its `Channel` over sends and receives:

| message | control lane | with a payload on | tag | the receive is posted |
|---|---|---|---|---|
| PULL, FINISH, CREDIT, ABORT, GOODBYE | 40 bytes (+ text) | | | always one ahead, by the reader |
| DATA (answer to a PULL) | nothing, unless empty | parameter lane | request | by `pull`, before the request leaves |
| DEPOSIT | 40 bytes | gradient lane | n-th deposit of the pair | when its announcement comes |

[Note: Requests, not mirrored sends]
In a program that is the same on all ranks, pull number n of a key from rank r+k could be paired with an unasked send to rank
r-k: no requests would be needed. But ranks with uneven shards fill their windows at different times, so that one keeps a slice
over the turn to backward that another fetches twice: the counts differ, and one rank waits for ever for a send that its peer
sees no reason for. With a request, a changed order is slower, never wrong. The request is sent as early as the pull (a window
ahead of the compute), and a thread answers it, so its time is hidden and the owner's compute takes no part.
Where waits stand in streams (nccl.py) no thread could answer in time: there the engine's window walks alike on all ranks.

[Note: Order on every lane]
Answers of a pair leave in the order of the requests only if they ask for epochs that are published; a request for a later epoch
is answered when its time has come. Tags keep them apart (gloo, MPI). Where tags are ignored (NCCL), answers must leave in the
order in which their receives were posted, so there the first request held back holds back the later ones of that peer
(`keeps_tags`, `_serve`).

[Note: Streams] (not yet run on a GPU)
What the host has seen of a GPU is what it called, not what is done. Every call that hands something over (publish, send,
release, pull) therefore marks the current stream, and whatever is posted afterwards, in whichever thread, starts behind the
latest mark, on the device: `Marks`. The host never waits for the compute here. What has arrived is known to the host (a
thread has waited for it), so what it launches then needs no more.

    compute   pack segment (publish: mark)      wgrad -> staging (send: mark)    sum inbox (release: mark)
    posting                | answer: send segment               | send staging            | next receive -> inbox

[Note: Threads]
A handle's wait is the only call that finishes a transfer for sure (gloo), so threads wait and tell the receiver: for each peer
one reads control messages and one per data lane waits for payloads in the order of their posting; one thread waits for all
sends, only to keep their memory until they are done. None of them has a deadline of its own: a peer may be silent for hours
between two steps. Deadlines belong to the waits of the user's thread.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.device.base import Event, Word
from commfuse_dp.errors import TransportError
from commfuse_dp.probe import RECEIVE, SEND, Probe, now_ns
from commfuse_dp.transport import messages as msg
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, PARAM_LANE, ExchangeFn, Handle, Tag, Transfer, TwoSidedTransport
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.marks import Marks
from commfuse_dp.transport.news import News
from commfuse_dp.transport.one_sided import OneSidedTransport
from commfuse_dp.transport.p2p import TorchP2PTransport, open_lanes
from commfuse_dp.transport.parts import Channel, Memory, Receiver, check_same_sizes
from commfuse_dp.transport.ring import align

FOREVER_S = 30 * 24 * 3600.0  # patience of the threads that wait for peers; finite, for timeouts are added to a clock
LINGER_S = 5.0  # longest wait of close() for the peers' goodbyes
EXIT_LINGER_S = 60.0  # the same at the end of the process: see [Note: Threads at exit]

# [Note: Threads at exit]
# A thread that waits inside gloo or MPI cannot be called back. If a peer's end wakes it while the interpreter is being torn
# down, Python ends the thread in the middle of C++, which aborts the process. So a clean end waits for the peers to end, too.
_left_behind: list[threading.Thread] = []


def _await_left_behind() -> None:
    if hasattr(sys, "last_type"):  # an uncaught exception: whoever started this process should know at once
        return
    limit = time.monotonic() + EXIT_LINGER_S
    for thread in _left_behind:
        thread.join(max(0.0, limit - time.monotonic()))


atexit.register(_await_left_behind)  # registered first, so it runs after the transports have been closed

_HEADER_TAG, _TEXT_TAG = 0, 1
_TAG_MASK = (1 << 31) - 1


class OwnMemory(Memory):
    """Segments, staging and inbox rings as ordinary tensors of one device."""

    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int, device: torch.device) -> None:
        self._rank = rank
        self._exchange = exchange
        self._device = device
        self._segments: list[torch.Tensor] = []
        peers = [peer for peer in range(world_size) if peer != rank]
        self._outgoing = {peer: self._bytes(align(inbox_bytes)) for peer in peers}
        self._incoming = {peer: self._bytes(align(inbox_bytes)) for peer in peers}

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        failure = None
        try:
            self._segments = [self._bytes(row[self._rank]).zero_() for row in sizes]
        except RuntimeError as error:  # what torch raises when an allocation fails
            failure = f"no memory on {self._device} for {sum(row[self._rank] for row in sizes)} published bytes ({error})"
        answers = self._exchange(([tuple(row) for row in sizes], failure))
        check_same_sizes(sizes, [theirs for theirs, _ in answers])
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if failures:
            raise TransportError("; ".join(failures) + ". Use more ranks, or lower inbox_bytes or prefetch_bytes.")

    def segment(self, owner: int, key: int) -> torch.Tensor:
        assert owner == self._rank, "peers' segments are fetched, not mapped"
        return self._segments[key]

    def outgoing(self, dst: int) -> torch.Tensor:
        return self._outgoing[dst]

    def incoming(self, src: int) -> torch.Tensor:
        return self._incoming[src]

    def close(self) -> None:
        """Nothing to give back: the tensors go when the last reference does."""

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class TwoSidedChannel(Channel):
    """See the module."""

    def __init__(self, two_sided: TwoSidedTransport, marks: Marks | None = None) -> None:
        self._two_sided = two_sided
        self._posting = marks.posting if marks is not None else contextlib.nullcontext
        self._peers = [peer for peer in range(two_sided.world_size) if peer != two_sided.rank]
        self._probe = two_sided.probe
        self._receiver: Receiver | None = None
        self._news = News()
        self._deposits_sent: dict[int, int] = defaultdict(int)
        self._deposits_due: dict[int, int] = defaultdict(int)
        self._parted: set[int] = set()  # said goodbye; its last payloads may still be under way
        self._due: dict[tuple[int, int], queue.SimpleQueue[_Due | None]] = {
            (peer, lane): queue.SimpleQueue() for peer in self._peers for lane in (PARAM_LANE, GRAD_LANE)
        }
        self._sends: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._sends_queued = self._sends_done = 0
        self._threads: list[threading.Thread] = []
        self._reaper = threading.Thread(target=self._reap, name="commfuse-p2p-sends", daemon=True)
        self._closed = False

    # ---- the user's side ---------------------------------------------------------------------------------------------
    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for peer in self._peers:
            self._spawn(self._read, peer)
            self._spawn(self._await_payloads, peer, PARAM_LANE)
            self._spawn(self._await_payloads, peer, GRAD_LANE)
        self._reaper.start()

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        try:
            self._post(dst, message, payload)
        except TransportError as error:
            if dst not in self._parted and not self._closed:
                assert self._receiver is not None
                self._receiver.lost(dst, str(error))
                self._news.ring()

    def poll(self, timeout_s: float) -> None:
        if timeout_s > 0:
            self._news.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        while self._sends_done < self._sends_queued:
            if time.monotonic() >= limit:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """Wait for the peers' goodbyes: a communicator that is destroyed earlier takes with it what they still receive."""
        if self._closed:
            return
        self._closed = True
        self._sends.put(None)
        limit = time.monotonic() + LINGER_S
        for thread in (*self._threads, self._reaper):
            thread.join(max(0.0, limit - time.monotonic()))
        waiting = [thread for thread in self._threads if thread.is_alive()]
        if waiting:  # inside the communicator, which must then stay
            _left_behind.extend(waiting)
        else:
            self._two_sided.close()

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _post(self, dst: int, message: bytes, payload: torch.Tensor | None) -> None:
        kind, _, _, request, _, _, nbytes = msg.HEADER.unpack_from(message)
        full = payload is not None and payload.numel() > 0
        if kind == msg.DATA and full:
            assert payload is not None
            self._isend(payload, dst, PARAM_LANE, request & _TAG_MASK, message)
            return
        if kind == msg.PULL and nbytes:
            self._irecv(dst, PARAM_LANE, request & _TAG_MASK, msg.pack(msg.DATA, c=request, y=nbytes))
        text = message[msg.HEADER_BYTES :]
        self._isend(_tensor(message[: msg.HEADER_BYTES]), dst, CONTROL_LANE, _HEADER_TAG)
        if text:
            self._isend(_tensor(text), dst, CONTROL_LANE, _TEXT_TAG)
        if kind == msg.DEPOSIT and full:
            assert payload is not None
            number = self._deposits_sent[dst] = (self._deposits_sent[dst] + 1) & _TAG_MASK
            self._isend(payload, dst, GRAD_LANE, number, message)

    def _isend(self, buffer: torch.Tensor, dst: int, lane: int, tag: int, message: bytes | None = None) -> None:
        with self._posting():
            handle = self._two_sided.isend(buffer, dst, lane=lane, tag=tag)
        self._sends_queued += 1  # only ever changed under the transport's lock, which `post` is called with
        self._sends.put(_Sent(handle, dst, message, now_ns()))

    def _reap(self) -> None:
        while (item := self._sends.get()) is not None:
            try:
                item.handle.wait()
                if item.message is not None:
                    self._span(SEND, item.message, item.dst, item.start_ns)
            except TransportError:
                pass  # the reader of that peer meets the same loss and reports it
            self._sends_done += 1

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _irecv(self, src: int, lane: int, tag: int, message: bytes) -> None:
        assert self._receiver is not None
        landing = self._receiver.landing(src, message)
        if landing is None:  # nobody wants it any more, but the send must find its receive
            landing = torch.empty(msg.payload_bytes(message), dtype=torch.uint8)
        with self._posting():
            handle = self._two_sided.irecv(landing, src, lane=lane, tag=tag)
        self._due[src, lane].put(_Due(handle, message, now_ns()))

    def _read(self, src: int) -> None:
        """Control messages of one peer, until its goodbye or its end."""
        assert self._receiver is not None
        header = torch.empty(msg.HEADER_BYTES, dtype=torch.uint8)
        try:
            while True:
                self._two_sided.irecv(header, src, lane=CONTROL_LANE, tag=_HEADER_TAG).wait()
                message = header.numpy().tobytes()
                kind = msg.kind_of(message)
                if kind == msg.GOODBYE:
                    self._parted.add(src)
                    break
                if kind == msg.DEPOSIT and msg.payload_bytes(message):
                    number = self._deposits_due[src] = (self._deposits_due[src] + 1) & _TAG_MASK
                    self._irecv(src, GRAD_LANE, number, message)
                    continue
                if text_bytes := msg.text_bytes(message):
                    text = torch.empty(text_bytes, dtype=torch.uint8)
                    self._two_sided.irecv(text, src, lane=CONTROL_LANE, tag=_TEXT_TAG).wait()
                    message += text.numpy().tobytes()
                self._receiver.handle(src, message)
                self._news.ring()
        except TransportError as error:
            self._end(src, str(error))
        finally:
            self._due[src, PARAM_LANE].put(None)

    def _await_payloads(self, src: int, lane: int) -> None:
        """Payloads of one peer and lane in the order of posting; the goodbye comes last of all, after both lanes."""
        assert self._receiver is not None
        try:
            while (item := self._due[src, lane].get()) is not None:
                item.handle.wait()
                self._receiver.handle(src, item.message)
                self._news.ring()
                self._span(RECEIVE, item.message, src, item.start_ns)
        except TransportError as error:
            self._end(src, str(error))
        if lane == PARAM_LANE:
            self._due[src, GRAD_LANE].put(None)
        elif src in self._parted:
            self._receiver.handle(src, msg.pack(msg.GOODBYE))
            self._news.ring()

    def _end(self, src: int, reason: str) -> None:
        assert self._receiver is not None
        if src not in self._parted and not self._closed:
            self._receiver.lost(src, reason)
            self._news.ring()

    def _span(self, lane: str, message: bytes, peer: int, start_ns: int) -> None:
        if self._probe.sink is not None:
            kind, _, key, seq, part, _, nbytes = msg.HEADER.unpack(message)
            name, place = ("message", {"key": key, "seq": seq, "part": part}) if kind == msg.DEPOSIT else ("slice", {})
            self._probe.span(lane, name, start_ns, now_ns(), nbytes=nbytes, peer=peer, **place)

    def _spawn(self, target, *args: int) -> None:  # type: ignore[no-untyped-def]
        name = "-".join(("commfuse-p2p", target.__name__.strip("_"), *map(str, args)))
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


class _Due(NamedTuple):
    handle: Handle
    message: bytes
    start_ns: int


class _Request(NamedTuple):
    key: int
    epoch: int
    request: int
    start: int
    nbytes: int


class _Sent(NamedTuple):
    handle: Handle
    dst: int
    message: bytes | None  # None: control
    start_ns: int


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class PairedTransport(OneSidedTransport):
    """A `TwoSidedTransport` as a one-sided one: see the module.

    Args:
        two_sided: owned from now on. Its handles must be patient (deadline FOREVER_S): they are waited for by threads.
        exchange: the group's collective object exchange, used in `expose`.
        inbox_bytes: room for unreleased messages, per pair and direction; the same amount again is used for staging.
        deadline_s: longest single wait of the user's thread, in seconds.
        device: where segments, staging and inboxes live. CUDA has not been run yet: see [Note: Streams].
    """

    in_place: ClassVar[bool] = False

    def __init__(
        self,
        two_sided: TwoSidedTransport,
        exchange: ExchangeFn,
        *,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.name = two_sided.name  # type: ignore[misc]
        device = device if device is not None else torch.device("cpu")
        self._marks = Marks(device) if device.type == "cuda" else None
        self._in_order = not two_sided.keeps_tags
        self._requests: dict[int, deque[_Request]] = defaultdict(deque)  # of each peer, in order, if tags are ignored
        rank, world_size = two_sided.rank, two_sided.world_size
        super().__init__(
            rank,
            world_size,
            channel=TwoSidedChannel(two_sided, self._marks),
            memory=OwnMemory(rank, world_size, exchange, inbox_bytes, device),
            inbox_bytes=inbox_bytes,
            deadline_s=deadline_s,
            probe=probe if probe is not None else two_sided.probe,
        )

    def publish(self, key: int, epoch: int, *, more: bool = False) -> None:
        self._mark()
        super().publish(key, epoch)
        if self._in_order:
            with self._lock:
                for src in self._requests:
                    self._serve(src)

    def pull(
        self,
        owner: int,
        key: int,
        epoch: int,
        *,
        start: int = 0,
        nbytes: int | None = None,
        out: torch.Tensor | None = None,
        after: Event | None = None,
    ) -> Transfer:
        self._mark()  # `out` may still be read
        return super().pull(owner, key, epoch, start=start, nbytes=nbytes, out=out, after=after)

    def send(self, dst: int, tag: Tag, buffer: torch.Tensor, *, when: Word | None = None) -> None:
        self._mark()
        super().send(dst, tag, buffer)

    def release(self, src: int, tag: Tag, *, more: bool = False) -> None:
        self._mark()
        super().release(src, tag, more=more)

    def _mark(self) -> None:
        if self._marks is not None:
            self._marks.mark()

    def _on_pull(self, src: int, key: int, epoch: int, request: int, _d: int, start: int, nbytes: int) -> None:
        if not self._in_order or self._published[self.rank].get(key, 0) > epoch:
            super()._on_pull(src, key, epoch, request, _d, start, nbytes)
            return
        self._requests[src].append(_Request(key, epoch, request, start, nbytes))
        self._serve(src)

    def _serve(self, src: int) -> None:
        """Answer the requests of a peer up to the first one whose time has not come. Called under the lock."""
        waiting = self._requests[src]
        while waiting and self._published[self.rank].get(waiting[0].key, 0) == waiting[0].epoch:
            key, _, request, start, nbytes = waiting.popleft()
            self._answer(src, key, request, start, nbytes)


def open_p2p(
    group: dist.ProcessGroup | None,
    *,
    inbox_bytes: int,
    deadline_s: float,
    probe: Probe | None = None,
    device: torch.device | None = None,
) -> PairedTransport:
    """Collective over `group` (None: the default group): transport `p2p` on communicators of its own.

    Raises TransportError if torch.distributed is not initialised or the communicators cannot be made.
    """
    probe = probe if probe is not None else Probe()
    lanes = open_lanes(group, setup_s=deadline_s, device=device)
    two_sided = TorchP2PTransport(lanes.groups, down=lanes.down, deadline_s=FOREVER_S, probe=probe, keep=lanes.keep)
    return PairedTransport(
        two_sided, exchange_of(group), inbox_bytes=inbox_bytes, deadline_s=deadline_s, probe=probe, device=device
    )
