"""One-sided transport over plain TCP sockets: for CPU tensors and ranks on several hosts (or in several namespaces).

Why not leave it to gloo: its TCP path costs much CPU time per byte (wake-ups, copies), and where the cores that move the bytes
also compute, that time is stolen from the step. It also needs the owner of a slice to call `send` at the right moment. Here an
I/O thread answers pulls as soon as the epoch is published, whatever the owner's compute is doing.

    rank 1 (user)   pull(0, key, epoch, out=window) --------------------- wait() ok
    rank 1 (I/O)        PULL \\                              / straight into `window`
    rank 0 (I/O)              held until published, then DATA, in chunks, gradients behind parameters
    rank 0 (user)   ... publish(key, epoch) ... computes, takes no part

Messages go the same way: computed into a staging ring that mirrors the owner's inbox, DEPOSIT carries them into that inbox.
The protocol is `one_sided`; what this file adds is its `Channel` over `wire`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import RECEIVE, SEND, Probe, now_ns
from commfuse_dp.transport.base import CHANNEL_GRAD, CHANNEL_REPLICA, ExchangeFn
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.memory import FetchedMemory
from commfuse_dp.transport.one_sided.parts import Channel, Receiver, payload_span
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.tcp.connect import Links, connect_all
from commfuse_dp.transport.tcp.links import COLLECTIVE_LANE, CONTROL_LANE, GRAD_LANE, PARAM_LANE, Frame, Outgoing
from commfuse_dp.transport.tcp.wire import Wire
from commfuse_dp.transport.waiting import await_news

LINGER_S = 2.0  # after everything is handed to the kernel: longest wait for the peers' acknowledgement


class TcpChannel(Channel):
    """Messages and payloads between `OneSidedTransport` and the wire; the receiver is called by the wire's I/O thread."""

    def __init__(self, rank: int, links: Links, probe: Probe) -> None:
        self._rank = rank
        self._places = links.places
        self._probe = probe
        self._receiver: Receiver  # from `start` on
        self._news = threading.Event()
        self._error: BaseException | None = None
        self._arriving: dict[tuple[int, int], tuple[memoryview | None, int]] = {}  # (peer, lane) -> (landing, start_ns)
        self._text: dict[int, bytearray] = {}
        self.wire = Wire(rank, links.sockets, self)

    # ---- the user's side ---------------------------------------------------------------------------------------------
    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.wire.start()

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        if payload is not None and payload.numel():
            self.wire.data(dst, Outgoing(_lane(message), message, payload.numpy().data))
        elif payload is not None or msg.kind_of(message) == msg.GOODBYE:
            self.wire.data(dst, Outgoing(_lane(message), message, memoryview(b"")))
        else:
            self.wire.control(dst, message, wake=not hold)

    def push(self) -> None:
        self.wire.push()

    def poll(self, timeout_s: float) -> None:
        if timeout_s > 0:
            self.wire.push()
            await_news(self._news, timeout_s)
        if self._error is not None:
            raise TransportError(
                f"rank {self._rank}: the I/O thread of transport tcp failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def flush(self, timeout_s: float) -> bool:
        limit = time.monotonic() + timeout_s
        while not self.wire.idle():
            if time.monotonic() >= limit or self._error is not None:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        self.wire.close(LINGER_S)
        self._arriving.clear()

    def describe(self, peer: int, called: int) -> str:
        return f"rank {called} ({self._places[peer]})"

    # ---- the I/O thread's side ---------------------------------------------------------------------------------------
    def sink(self, peer: int, frame: Frame) -> memoryview:
        """Where the chunk's payload (frame.nbytes bytes) goes."""
        if frame.lane == CONTROL_LANE:
            self._text[peer] = bytearray(frame.nbytes)
            return memoryview(self._text[peer])
        if frame.offset == 0:
            landing = self._receiver.landing(peer, frame.message)
            view = None if landing is None else landing.numpy().data
            self._arriving[peer, frame.lane] = (view, now_ns())
        view, _ = self._arriving[peer, frame.lane]
        if view is None:
            return memoryview(bytearray(frame.nbytes))  # nobody wants it any more: read it and throw it away
        return view[frame.offset : frame.offset + frame.nbytes]

    def deliver(self, peer: int, frame: Frame) -> None:
        """A frame has been received with all of its payload."""
        if frame.lane == CONTROL_LANE:
            self._receiver.handle(peer, frame.message + bytes(self._text.pop(peer, b"")))
        else:
            total = msg.payload_bytes(frame.message)
            if frame.offset + frame.nbytes < total:
                return
            _, start_ns = self._arriving.pop((peer, frame.lane), (None, 0))
            self._receiver.handle(peer, frame.message)
            if total:
                payload_span(self._probe, RECEIVE, frame.message, peer, start_ns)
        self._news.set()

    def sent(self, peer: int, item: Outgoing) -> None:
        """The last byte of `item` has been handed to the kernel."""
        payload_span(self._probe, SEND, item.message, peer, item.start_ns)

    def lost(self, peer: int, reason: str) -> None:
        """The connection ended (EOF included: whether that was in order is the receiver's to know)."""
        self._receiver.lost(peer, reason)
        self._news.set()

    def broken(self, error: BaseException) -> None:
        """The I/O thread itself failed; nothing will be sent or received any more."""
        self._error = error
        self._news.set()


class TcpTransport(OneSidedTransport):
    """`tcp`: see the module.

    address: of this rank; default: environment COMMFUSE_TCP_ADDRESS, else the interface GLOO_SOCKET_IFNAME, else the interface
    on the route to MASTER_ADDR, else loopback. Raises MismatchError on all ranks if settings differ.
    """

    name: ClassVar[str] = "tcp"

    def _connect(
        self, exchange: ExchangeFn, members: Sequence[int], address: str | None = None
    ) -> tuple[Channel, FetchedMemory]:
        links = connect_all(self.rank, exchange, deadline_s=self.deadline_s, inbox_bytes=self.message_limit, address=address)
        memory = FetchedMemory(self.rank, self.world_size, exchange, self.message_limit)
        channel = TcpChannel(self.rank, links, self.probe)
        self.wire = channel.wire  # counts what it has moved, headers included
        return channel, memory


def _lane(message: bytes) -> int:
    """Compute waits for a plain collective whole, and for slices of parameters that were asked for ahead of time later, if at
    all. Gradients yield to everything else. A goodbye must overtake nothing: it goes to the end of the last lane."""
    kind, channel = msg.HEADER.unpack(message)[:2]
    if kind == msg.GOODBYE or (kind == msg.DEPOSIT and channel in (CHANNEL_GRAD, CHANNEL_REPLICA)):
        return GRAD_LANE
    return COLLECTIVE_LANE if kind == msg.DEPOSIT else PARAM_LANE
