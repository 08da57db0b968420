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

import time
from typing import ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import RECEIVE, SEND, Probe, now_ns
from commfuse_dp.transport.base import CHANNEL_GRAD, CHANNEL_REPLICA, ExchangeFn
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.news import News
from commfuse_dp.transport.one_sided.parts import Channel, Receiver, payload_span
from commfuse_dp.transport.one_sided.protocol import OneSidedTransport
from commfuse_dp.transport.tcp.connect import Links, connect_all
from commfuse_dp.transport.tcp.links import COLLECTIVE_LANE, CONTROL_LANE, GRAD_LANE, PARAM_LANE, Frame, Outgoing, Source
from commfuse_dp.transport.tcp.memory import StagedMemory
from commfuse_dp.transport.tcp.wire import Handler, Wire

LINGER_S = 2.0  # after everything is handed to the kernel: longest wait for the peers' acknowledgement

_EMPTY = Source(memoryview(b""))


class TcpChannel(Channel, Handler):
    """Messages and payloads between `OneSidedTransport` and the wire; the receiver is called by the wire's I/O thread."""

    def __init__(self, rank: int, links: Links, memory: StagedMemory, probe: Probe, *, zero_copy: bool) -> None:
        self._rank = rank
        self._places = links.places
        self._memory = memory
        self._probe = probe
        self._receiver: Receiver | None = None
        self._news = News()
        self._error: BaseException | None = None
        self._arriving: dict[tuple[int, int], tuple[memoryview | None, int]] = {}  # (peer, lane) -> (landing, start_ns)
        self._text: dict[int, bytearray] = {}
        self.wire = Wire(rank, links.sockets, self, zero_copy=zero_copy)

    # ---- the user's side ---------------------------------------------------------------------------------------------
    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.wire.start()

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        if payload is not None and payload.numel():
            self.wire.data(dst, Outgoing(_lane(message), message, self._memory.source(payload)))
        elif payload is not None or msg.kind_of(message) == msg.GOODBYE:
            self.wire.data(dst, Outgoing(_lane(message), message, _EMPTY))
        else:
            self.wire.control(dst, message, wake=not hold)

    def push(self) -> None:
        self.wire.push()

    def poll(self, timeout_s: float) -> None:
        if timeout_s > 0:
            self.wire.push()
            self._news.wait(timeout_s)
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
        if frame.lane == CONTROL_LANE:
            self._text[peer] = bytearray(frame.nbytes)
            return memoryview(self._text[peer])
        if frame.offset == 0:
            assert self._receiver is not None
            landing = self._receiver.landing(peer, frame.message)
            view = None if landing is None else landing.numpy().data
            self._arriving[peer, frame.lane] = (view, now_ns())
        view, _ = self._arriving[peer, frame.lane]
        if view is None:
            return memoryview(bytearray(frame.nbytes))  # nobody wants it any more: read it and throw it away
        return view[frame.offset : frame.offset + frame.nbytes]

    def deliver(self, peer: int, frame: Frame) -> None:
        assert self._receiver is not None
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
        self._news.ring()

    def sent(self, peer: int, item: Outgoing) -> None:
        payload_span(self._probe, SEND, item.message, peer, item.start_ns)

    def lost(self, peer: int, reason: str) -> None:
        assert self._receiver is not None
        self._receiver.lost(peer, reason)
        self._news.ring()

    def broken(self, error: BaseException) -> None:
        self._error = error
        self._news.ring()


class TcpTransport(OneSidedTransport):
    """`tcp`: see the module.

    Args:
        exchange: the group's collective object exchange, used while the transport is set up and in `expose`.
        inbox_bytes: room for unreleased messages, per pair and direction; the same amount again is used for staging.
        deadline_s: longest single wait, also for the connections of the start, in seconds.
        address: this rank's address; default: environment COMMFUSE_TCP_ADDRESS, else the interface GLOO_SOCKET_IFNAME, else
            the interface on the route to MASTER_ADDR, else loopback.
        zero_copy: send with sendfile instead of a copy into the socket; see [Note: Sending without a copy] in `wire`.

    Raises:
        TransportError, MismatchError: on all ranks, if one cannot listen or reach its peers, or settings differ.
    """

    name: ClassVar[str] = "tcp"

    def __init__(
        self,
        rank: int,
        world_size: int,
        exchange: ExchangeFn,
        *,
        inbox_bytes: int,
        deadline_s: float,
        probe: Probe | None = None,
        address: str | None = None,
        zero_copy: bool = False,
    ) -> None:
        probe = probe if probe is not None else Probe()
        links = connect_all(rank, exchange, deadline_s=deadline_s, inbox_bytes=inbox_bytes, address=address)
        memory = StagedMemory(rank, world_size, exchange, inbox_bytes)
        channel = TcpChannel(rank, links, memory, probe, zero_copy=zero_copy)
        self._wire = channel.wire
        super().__init__(
            rank, world_size, channel=channel, memory=memory, inbox_bytes=inbox_bytes, deadline_s=deadline_s, probe=probe
        )

    @property
    def wire_bytes_sent(self) -> int:
        """Bytes handed to the sockets so far, headers included."""
        return self._wire.bytes_sent

    @property
    def wire_bytes_received(self) -> int:
        return self._wire.bytes_received


def _lane(message: bytes) -> int:
    """Compute waits for a plain collective whole, and for slices of parameters that were asked for ahead of time later, if at
    all. Gradients yield to everything else. A goodbye must overtake nothing: it goes to the end of the last lane."""
    kind, channel = msg.HEADER.unpack(message)[:2]
    if kind == msg.GOODBYE or (kind == msg.DEPOSIT and channel in (CHANNEL_GRAD, CHANNEL_REPLICA)):
        return GRAD_LANE
    return COLLECTIVE_LANE if kind == msg.DEPOSIT else PARAM_LANE
