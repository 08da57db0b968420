"""The channel of transport `mpi`: control messages and payloads over MPI, and the progress of both.

| message | control lane | payload on | the receive is posted |
|---|---|---|---|
| PULL, FINISH, CREDIT, ABORT, GOODBYE | a record | | always one ahead: a persistent receive per peer |
| DEPOSIT or DATA of up to INLINE_BYTES | a record that holds the bytes | | |
| larger DATA (answer to a PULL) | nothing | parameter lane, tag 1 + request | by `post`, before the request leaves |
| larger DEPOSIT | a record | the lane of its channel, tag 0 | when its record comes |

Records for one peer that are queued together travel in one MPI message. Payloads are sent from and received into their places,
in chunks that MPI keeps in order (same tag, same pair): no count comes near 2**31, whatever MPI's version, and of gradients
only GRAD_CHUNKS per peer are under way at a time, so that a slice of parameters never waits for more than those.

[Note: One lock, never waited for by a sender]
All MPI calls of a channel are made under `Lanes.lock`. `post`, which is called with the transport's lock held, only tries it:
who holds it takes over what was queued meanwhile (see `push`). A holder may wait for the transport's lock, never the reverse.

[Note: The end]
A GOODBYE carries the number of payloads sent to that peer: it is delivered after the last of them. Who receives one and has not
said goodbye itself answers with its own number (FAREWELL in field a) and sends nothing more to that peer. So who closes knows
when all has come and gone: then its communicators are empty and can be used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commfuse_dp import mpi_launch
from commfuse_dp.errors import TransportError
from commfuse_dp.probe import RECEIVE, SEND, Probe
from commfuse_dp.transport.base import CHANNEL_GRAD, CHANNEL_REPLICA, GRAD_LANE, PARAM_LANE
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.parts import Channel, Receiver, payload_span
from commfuse_dp.transport.two_sided.mpi_progress import (
    BESIDE_SLEEP,
    CONTROL_BYTES,
    LENGTH_BYTES,
    WAIT_SLEEP,
    Control,
    Owner,
    Payload,
    Requests,
)
from commfuse_dp.transport.waiting import LONGEST_WAIT_S

CHUNK_BYTES = 1 << 20
GRAD_CHUNKS = 4  # under way per peer
INLINE_BYTES = 4 << 10
LINGER_S = 5.0  # longest wait of close() for the peers' goodbyes
FAILED_LINGER_S = 0.5  # the same when the job is about to be ended anyway

_MOST_TESTS = 16  # in one turn

_FAREWELL = 1
_DEPOSIT_TAG = 0


class Lanes(NamedTuple):
    """Communicators of the group's ranks, in its order."""

    mpi: Any  # mpi4py.MPI
    control: Any
    params: Any
    grads: Any
    ranks: tuple[int, ...]  # in MPI_COMM_WORLD
    serial: int
    places: list[str]  # how to find each rank, for errors
    lock: Any  # an RLock: held during every MPI call


_abandoned: list[Any] = []  # what MPI may still read or write after an unclean end


class MpiChannel(Channel):
    """See the module.

    Args:
        lanes: owned from now on.
        keep: called by `close` with the lanes if they can be used again.
    """

    def __init__(self, rank: int, lanes: Lanes, probe: Probe, *, keep: Callable[[Lanes], None]) -> None:
        self._lanes = lanes
        self._mpi = lanes.mpi
        self._lock = lanes.lock
        self._comms = {PARAM_LANE: lanes.params, GRAD_LANE: lanes.grads}
        self._keep = keep
        self._probe = probe
        self._peers = [peer for peer in range(len(lanes.ranks)) if peer != rank]
        upper = lanes.params.Get_attr(self._mpi.TAG_UB)
        self._tags = upper if upper is not None else 32767  # what MPI guarantees
        self._receiver: Receiver  # from `start` on
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._stop = self._closed = False
        # How often something came, for `poll`.
        self._events = self._events_seen = 0
        self._user_waits = False
        # Sending: not yet looked at, records by peer, chunks not yet issued by peer and lane.
        self._queue: deque[tuple[int, bytes, torch.Tensor | None]] = deque()
        self._records: dict[int, bytearray] = {}
        self._waiting: dict[tuple[int, int], deque[Payload]] = defaultdict(deque)
        self._grad_chunks: dict[int, int] = defaultdict(int)
        self._requests = Requests(lanes.mpi, self._on_broken)
        # The end.
        self._payloads_out: dict[int, int] = defaultdict(int)
        self._payloads_in: dict[int, int] = defaultdict(int)
        self._goodbyes: dict[int, tuple[int, int]] = {}  # peer -> (payloads that it has sent, FAREWELL or 0)
        self._parting: set[int] = set()  # own goodbye or farewell is said: nothing more is sent
        self._ended: set[int] = set()  # theirs has come, and all payloads before it
        self._lost: set[int] = set()
        self._thread = threading.Thread(target=self._run, name=f"commfuse-mpi-{rank}", daemon=True)

    # ---- the user's side ---------------------------------------------------------------------------------------------
    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if not self._peers:
            return
        with self._lock:
            for peer in self._peers:
                control = Control(peer)
                control.request = self._lanes.control.Recv_init([control.buffer, self._mpi.BYTE], peer, 0)
                control.start()
                self._requests.add(control.request, control)
        self._thread.start()

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        self._queue.append((dst, message, payload))
        if not hold:
            self.push()

    def push(self) -> None:
        # Whoever has the lock looks at the queue again after giving it back: what is appended meanwhile is not forgotten.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                self._send_queued()
            finally:
                self._lock.release()

    def poll(self, timeout_s: float) -> None:
        self._test()
        if self._error is not None:
            error, kind = self._error, type(self._error).__name__
            raise TransportError(f"the progress thread of transport mpi failed: {kind}: {error}") from error
        if timeout_s > 0 and self._peers:
            limit = time.monotonic() + min(timeout_s, LONGEST_WAIT_S)
            self._user_waits = True
            try:
                while self._events == self._events_seen and (now := time.monotonic()) < limit and self._error is None:
                    time.sleep(min(self._requests.pause(now, WAIT_SLEEP), limit - now))
                    self._test()
            finally:
                self._user_waits = False
        elif timeout_s > 0:
            time.sleep(min(timeout_s, LONGEST_WAIT_S))
        self._events_seen = self._events

    def flush(self, timeout_s: float) -> bool:
        return self._drive(
            lambda: not (self._queue or self._records or self._requests.sends or any(self._waiting.values())), timeout_s
        )

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if not self._peers:
            self._keep(self._lanes)
            return
        patience_s = LINGER_S if not mpi_launch.has_failed() else FAILED_LINGER_S
        self._drive(lambda: len(self._ended | self._lost) == len(self._peers), patience_s)
        self._stop = True
        self._thread.join(LINGER_S)
        if self._thread.is_alive() or self._mpi.Is_finalized():
            _abandoned.append(self)  # it is stuck inside MPI, or MPI is gone: nothing can be given back
            return
        with self._lock:
            if self._give_back():
                self._keep(self._lanes)
            else:
                _abandoned.append(self._requests)

    def describe(self, peer: int, called: int) -> str:
        return f"rank {called} ({self._lanes.places[peer]})"

    # ---- progress ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop and self._error is None:
            pause = self._requests.pause(time.monotonic(), BESIDE_SLEEP)
            time.sleep(WAIT_SLEEP[1] if self._user_waits else pause)
            if not self._user_waits:  # one is enough, and this one could be held up while it has the lock
                self._test()

    def _drive(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Make progress until ready(), for at most timeout_s. False if it is not."""
        limit = time.monotonic() + timeout_s
        while not ready():
            now = time.monotonic()
            if now >= limit or self._error is not None:
                return False
            time.sleep(self._requests.pause(now, WAIT_SLEEP))
            self._test()
        return True

    def _test(self) -> None:
        """Take in what has come and send what is queued, unless another thread is doing so."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._send_queued()
            for turn in range(_MOST_TESTS):
                if not self._take_in(first=turn == 0):
                    break
        except Exception as error:
            self._error = error
        finally:
            self._lock.release()
        self.push()

    def _take_in(self, *, first: bool) -> bool:
        """One test. True if another one is worth while at once."""
        completed, again = self._requests.test(first=first)
        for owner in completed:
            if isinstance(owner, Control):
                self._on_records(owner)
            else:
                self._on_chunk(owner)
        return again

    def _on_broken(self, owner: Owner, error: BaseException) -> None:
        self._lose(owner.peer, error)

    def _lose(self, peer: int, error: BaseException) -> None:
        self._lost.add(peer)
        self._parting.add(peer)
        self._news()
        for lane in self._comms:
            self._waiting.pop((peer, lane), None)
        if peer not in self._ended and not self._closed:
            self._receiver.lost(peer, f"MPI: {error}")

    def _news(self) -> None:
        self._events += 1
        self._requests.moved()

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _send_queued(self) -> None:
        while self._queue:
            dst, message, payload = self._queue.popleft()
            if dst not in self._parting:
                self._put(dst, message, payload)
        for dst in list(self._records):
            self._send_records(dst)

    def _put(self, dst: int, message: bytes, payload: torch.Tensor | None) -> None:
        kind, channel, _, request, _, _, nbytes = msg.HEADER.unpack_from(message)
        if kind == msg.PULL and nbytes > INLINE_BYTES:
            self._receive(dst, PARAM_LANE, self._tag(request), msg.pack(msg.DATA, c=request, y=nbytes))
        elif kind == msg.GOODBYE:
            message = msg.pack(msg.GOODBYE, x=self._payloads_out[dst])
            self._parting.add(dst)
        elif payload is not None and payload.numel() > INLINE_BYTES:
            grads = kind == msg.DEPOSIT and channel in (CHANNEL_GRAD, CHANNEL_REPLICA)
            lane = GRAD_LANE if grads else PARAM_LANE
            tag = self._tag(request) if kind == msg.DATA else _DEPOSIT_TAG
            self._payloads_out[dst] += 1
            self._waiting[dst, lane].append(Payload(dst, lane, tag, _view(payload), message, sending=True))
            if kind == msg.DEPOSIT:
                self._record(dst, message)
                self._send_records(dst)  # so that the receive is posted before the bytes come
            self._issue(dst, lane)
            return
        elif payload is not None and payload.numel():
            message += _view(payload).tobytes()
        self._record(dst, message)

    def _record(self, dst: int, message: bytes) -> None:
        records = self._records.get(dst)
        if records is not None and len(records) + len(message) > CONTROL_BYTES:
            self._send_records(dst)
            records = None
        if records is None:
            records = self._records[dst] = bytearray(LENGTH_BYTES)
        records += message

    def _send_records(self, dst: int) -> None:
        records = self._records.pop(dst, None)
        if records is not None:
            records[:LENGTH_BYTES] = len(records).to_bytes(LENGTH_BYTES, "little")
            item = Payload(dst, PARAM_LANE, 0, memoryview(records), None, sending=True)
            self._start(item, self._lanes.control.Isend, memoryview(records))

    def _issue(self, dst: int, lane: int) -> None:
        """Hand chunks to MPI: all of them, or as many gradients as may be under way."""
        waiting = self._waiting[dst, lane]
        while waiting and (lane == PARAM_LANE or self._grad_chunks[dst] < GRAD_CHUNKS):
            item = waiting[0]
            chunk = item.view[item.issued : item.issued + CHUNK_BYTES]
            item.issued += len(chunk)
            if item.issued == len(item.view):
                waiting.popleft()
            if lane == GRAD_LANE:
                self._grad_chunks[dst] += 1
            self._start(item, self._comms[lane].Isend, chunk)

    def _receive(self, src: int, lane: int, tag: int, message: bytes) -> None:
        item = Payload(src, lane, tag, _view(self._receiver.room_for(src, message)), message, sending=False)
        for start in range(0, len(item.view), CHUNK_BYTES):
            self._start(item, self._comms[lane].Irecv, item.view[start : start + CHUNK_BYTES])

    def _start(self, item: Payload, call: Callable[..., Any], chunk: memoryview) -> None:
        try:
            request = call([chunk, self._mpi.BYTE], item.peer, item.tag)
        except self._mpi.Exception as error:
            self._lose(item.peer, error)
            return
        item.left += 1
        self._requests.add(request, item)

    def _tag(self, request: int) -> int:
        return 1 + request % self._tags

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _on_chunk(self, item: Payload) -> None:
        item.left -= 1
        if item.sending:
            if item.message is None:
                return  # records: their buffer can go
            self._requests.moved()
            if item.lane == GRAD_LANE:
                self._grad_chunks[item.peer] -= 1
                self._issue(item.peer, GRAD_LANE)
            if not item.left and item.issued == len(item.view):
                payload_span(self._probe, SEND, item.message, item.peer, item.start_ns)
        elif not item.left:
            assert item.message is not None
            self._receiver.handle(item.peer, item.message)
            self._payloads_in[item.peer] += 1
            self._news()
            payload_span(self._probe, RECEIVE, item.message, item.peer, item.start_ns)
            self._part(item.peer)
        else:
            self._requests.moved()

    def _on_records(self, control: Control) -> None:
        peer = control.peer
        records = bytes(memoryview(control.buffer)[LENGTH_BYTES : control.length()])
        try:
            control.start()
        except self._mpi.Exception as error:
            self._lose(peer, error)
        batch: list[bytes] = []
        at = 0
        while at < len(records):
            message = records[at : at + msg.HEADER_BYTES]
            at += msg.HEADER_BYTES
            kind, payload_bytes = msg.kind_of(message), msg.payload_bytes(message)
            if kind == msg.GOODBYE:
                _, farewell, _, _, _, payloads, _ = msg.HEADER.unpack(message)
                self._goodbyes[peer] = (payloads, farewell)
                continue
            if payload_bytes > INLINE_BYTES:
                grads = msg.HEADER.unpack(message)[1] in (CHANNEL_GRAD, CHANNEL_REPLICA)
                self._receive(peer, GRAD_LANE if grads else PARAM_LANE, _DEPOSIT_TAG, message)
                continue
            if payload_bytes:
                landing = self._receiver.landing(peer, message)
                if landing is not None:
                    _view(landing)[:] = records[at : at + payload_bytes]
                at += payload_bytes
            elif text := msg.text_bytes(message):
                message = records[at - msg.HEADER_BYTES : at + text]
                at += text
            batch.append(message)
        if batch:
            self._receiver.handle(peer, *batch)
        self._news()
        self._part(peer)

    def _part(self, peer: int) -> None:
        """After the last payload of a peer that has said goodbye."""
        payloads, farewell = self._goodbyes.get(peer, (-1, 0))
        if self._payloads_in[peer] != payloads or peer in self._ended:
            return
        self._ended.add(peer)
        self._news()
        if not farewell:
            self._receiver.handle(peer, msg.pack(msg.GOODBYE))
            self._send_queued()  # our own goodbye may be among it
            if peer not in self._parting:
                self._parting.add(peer)
                self._record(peer, msg.pack(msg.GOODBYE, a=_FAREWELL, x=self._payloads_out[peer]))
                self._send_records(peer)

    def _give_back(self) -> bool:
        """Take back the receives that are still open. True if the communicators are empty."""
        clean = self._error is None and not self._lost and len(self._ended) == len(self._peers) and not self._requests.sends
        for request, owner in self._requests.open():
            if isinstance(owner, Control) or not owner.sending:
                clean = clean and isinstance(owner, Control)
                try:
                    request.Cancel()
                    if not _completes(request):
                        return False
                    if isinstance(owner, Control):
                        request.Free()
                except self._mpi.Exception:
                    clean = False
        return clean


def _completes(request: Any) -> bool:
    """A cancelled receive ends at once, unless its bytes are on their way."""
    limit = time.monotonic() + 1.0
    while not request.Test():
        if time.monotonic() >= limit:
            return False
        time.sleep(1e-3)
    return True


def _view(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data
