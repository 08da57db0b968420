"""A two-sided transport behind the one-sided interface: every pull is paired with a send that its owner makes.

`OneSidedTransport` brings the protocol (epochs, inbox ring, credits, peers); this file its `Channel` over sends and receives:

| message | control lane | with a payload on | tag | the receive is posted |
|---|---|---|---|---|
| PULL, FINISH, CREDIT, ABORT, GOODBYE | 40 bytes (+ text) | | | always one ahead, by the reader |
| DATA (answer to a PULL) | 40 bytes | parameter lane | request | by `pull`, before the request leaves |
| DEPOSIT | 40 bytes | gradient lane | n-th deposit of the pair | when its announcement comes |

[Note: Requests, not sends in lockstep]
In a program that is the same on all ranks, pull number n of a key from rank r+k could be paired with an unasked send to rank
r-k: no requests would be needed. But ranks with uneven shards fill their windows at different times, so that one keeps a slice
over the turn to backward that another fetches twice: the counts differ, and one rank waits for ever for a send that its peer
sees no reason for. With a request, a changed order is slower, never wrong. The request is sent as early as the pull (a window
ahead of the compute), and a thread answers it, so its time is hidden and the owner's compute takes no part.
Where streams wait (`grouped`) no thread could answer in time: there the engine's window walks alike on all ranks.

[Note: Threads]
A transfer's wait is the only call that finishes a transfer for sure (gloo), so threads wait and tell the receiver. One for each
peer reads its control messages and the payloads that they announce, in the order of the announcements; one waits for all sends,
only to keep their memory until they are done. A payload is sent right behind its announcement, so a reader waits for bytes that
are under way. None of them has a deadline of its own: a peer may be silent for hours between two steps. Deadlines belong to the
waits of the user's thread.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import RECEIVE, SEND, Probe, now_ns
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, PARAM_LANE, ExchangeFn
from commfuse_dp.transport.exchange import exchange_of
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.memory import FetchedMemory
from commfuse_dp.transport.one_sided.parts import Channel, Receiver, payload_span
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.two_sided.p2p import open_lanes
from commfuse_dp.transport.waiting import await_news

FOREVER_S = 30 * 24 * 3600.0  # patience of the threads that wait for peers; finite, for timeouts are added to a clock
_FOREVER = datetime.timedelta(seconds=FOREVER_S)
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


class _Transfer(NamedTuple):
    """A send or receive under way."""

    work: dist.Work
    peer: int
    buffer: torch.Tensor  # gloo reads or writes it until the end
    start_ns: int
    message: bytes | None  # that a payload belongs to; None: of control


class TwoSidedChannel(Channel):
    """See the module.

    lanes: a communicator for each, all of the same ranks, for CPU tensors. keep: called by `close` if they can be used again.
    """

    answers_goodbyes: ClassVar[bool] = True

    def __init__(self, lanes: Mapping[int, dist.ProcessGroup], probe: Probe, keep: Callable[[], None]) -> None:
        self._lanes = dict(lanes)
        self._rank, self._backend = lanes[PARAM_LANE].rank(), lanes[PARAM_LANE].name()
        self._peers = [peer for peer in range(lanes[PARAM_LANE].size()) if peer != self._rank]
        self._probe, self._keep = probe, keep
        self._under_way = 0  # transfers that were not waited for successfully
        self._counting = threading.Lock()  # they are waited for in several threads
        self._receiver: Receiver  # from `start` on
        self._news = threading.Event()
        self._deposits_sent: dict[int, int] = defaultdict(int)
        self._deposits_due: dict[int, int] = defaultdict(int)
        self._asked: dict[tuple[int, int], _Transfer] = {}  # (owner, request) -> the receive of its answer
        self._sends: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._sends_queued = self._sends_done = 0
        self._threads: list[threading.Thread] = []
        self._reaper = threading.Thread(target=self._reap, name="commfuse-p2p-sends", daemon=True)
        self._closed = False
        self._parted: set[int] = set()  # said goodbye
        self._left: set[int] = set()  # were told goodbye: nothing more is sent to them, for they read nothing more

    # ---- the user's side ---------------------------------------------------------------------------------------------
    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for peer in self._peers:
            thread = threading.Thread(target=self._read, args=(peer,), name=f"commfuse-p2p-{peer}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._reaper.start()

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        if dst in self._left:
            return
        if msg.kind_of(message) == msg.GOODBYE:
            self._left.add(dst)
        try:
            self._post(dst, message, payload)
        except RuntimeError as error:
            self._lose(dst, error)

    def poll(self, timeout_s: float) -> None:
        if timeout_s > 0:
            await_news(self._news, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        while self._sends_done < self._sends_queued:
            if time.monotonic() >= limit:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """Wait for the peers' goodbyes, with which their readers answer: a communicator that is destroyed earlier takes with it
        what they still receive."""
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
            self._lanes = {}
            if not self._under_way:
                self._keep()

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _post(self, dst: int, message: bytes, payload: torch.Tensor | None) -> None:
        kind, _, _, request, _, _, nbytes = msg.HEADER.unpack_from(message)
        if kind == msg.PULL and nbytes:
            answer = msg.pack(msg.DATA, c=request, y=nbytes)
            self._asked[dst, request] = self._irecv(dst, PARAM_LANE, request & _TAG_MASK, answer)
        text = message[msg.HEADER_BYTES :]
        self._isend(_tensor(message[: msg.HEADER_BYTES]), dst, CONTROL_LANE, _HEADER_TAG)
        if text:
            self._isend(_tensor(text), dst, CONTROL_LANE, _TEXT_TAG)
        if payload is None or not payload.numel():
            return
        if kind == msg.DATA:
            self._isend(payload, dst, PARAM_LANE, request & _TAG_MASK, message)
        else:
            number = self._deposits_sent[dst] = (self._deposits_sent[dst] + 1) & _TAG_MASK
            self._isend(payload, dst, GRAD_LANE, number, message)

    def _isend(self, buffer: torch.Tensor, dst: int, lane: int, tag: int, message: bytes | None = None) -> None:
        sending = self._begin("send", buffer, dst, lane, tag, message)
        self._sends_queued += 1  # only ever changed under the transport's lock, which `post` is called with
        self._sends.put(sending)

    def _reap(self) -> None:
        while (sending := self._sends.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the reader of that peer meets the same loss and reports it
                self._end(sending, SEND)
            self._sends_done += 1
            del sending  # what it has sent can go

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _irecv(self, src: int, lane: int, tag: int, message: bytes) -> _Transfer:
        return self._begin("recv", self._receiver.room_for(src, message), src, lane, tag, message)

    def _control(self, src: int, nbytes: int, tag: int) -> bytes:
        """The next control message of so many bytes."""
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._end(self._begin("recv", data, src, CONTROL_LANE, tag), RECEIVE)
        return data.numpy().tobytes()

    def _read(self, src: int) -> None:
        """Messages of one peer, until its goodbye or its end."""
        try:
            while src not in self._parted:
                message = self._control(src, msg.HEADER_BYTES, _HEADER_TAG)
                kind = msg.kind_of(message)
                payload = self._payload(src, kind, message)
                if payload is not None:
                    self._end(payload, RECEIVE)
                    del payload  # with what was received, until the next message
                if text_bytes := msg.text_bytes(message):
                    message += self._control(src, text_bytes, _TEXT_TAG)
                if kind == msg.GOODBYE:
                    self._parted.add(src)
                self._receiver.handle(src, message)
                self._news.set()
        except RuntimeError as error:
            self._lose(src, error)

    def _payload(self, src: int, kind: int, message: bytes) -> _Transfer | None:
        """The receive of what a message announces, if anything."""
        if kind not in (msg.DATA, msg.DEPOSIT) or not msg.payload_bytes(message):
            return None
        if kind == msg.DATA:
            return self._asked.pop((src, msg.HEADER.unpack_from(message)[3]))
        number = self._deposits_due[src] = (self._deposits_due[src] + 1) & _TAG_MASK
        return self._irecv(src, GRAD_LANE, number, message)

    # ---- transfers ---------------------------------------------------------------------------------------------------
    def _begin(self, way: str, buffer: torch.Tensor, peer: int, lane: int, tag: int, message: bytes | None = None) -> _Transfer:
        if not self._lanes:
            raise TransportError("transport p2p is closed")
        work = getattr(self._lanes[lane], way)([buffer], peer, tag)
        with self._counting:
            self._under_way += 1
        return _Transfer(work, peer, buffer, now_ns(), message)

    def _end(self, transfer: _Transfer, track: str) -> None:
        """Wait for it."""
        transfer.work.wait(_FOREVER)
        with self._counting:
            self._under_way -= 1
        if transfer.message is not None:
            payload_span(self._probe, track, transfer.message, transfer.peer, transfer.start_ns)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        if peer not in self._parted and not self._closed:
            known = isinstance(error, TransportError)
            self._receiver.lost(peer, str(error) if known else f"{self._backend}: {str(error).splitlines()[0][:300]}")
            self._news.set()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class PairedTransport(OneSidedTransport):
    """`p2p` between CPU tensors: see the module. lanes, keep: as of `TwoSidedChannel`; owned from now on."""

    name: ClassVar[str] = "p2p"

    def _connect(
        self,
        exchange: ExchangeFn,
        members: Sequence[int],
        lanes: Mapping[int, dist.ProcessGroup],
        keep: Callable[[], None] = lambda: None,
    ) -> tuple[TwoSidedChannel, FetchedMemory]:
        memory = FetchedMemory(self.rank, self.world_size, exchange, self.message_limit)
        return TwoSidedChannel(lanes, self.probe, keep), memory


def open_p2p(
    group: dist.ProcessGroup | None, *, inbox_bytes: int, deadline_s: float, probe: Probe | None = None
) -> PairedTransport:
    """Collective over `group` (None: the default group): transport `p2p`, for CPU tensors, on communicators of its own.

    Raises TransportError if torch.distributed is not initialised or the communicators cannot be made.
    """
    lanes = open_lanes(group, setup_s=deadline_s)
    place = lanes.item[PARAM_LANE]
    return PairedTransport(
        place.rank(),
        place.size(),
        exchange_of(group),
        inbox_bytes=inbox_bytes,
        deadline_s=deadline_s,
        probe=probe,
        lanes=lanes.item,
        keep=lanes.keep,
    )
