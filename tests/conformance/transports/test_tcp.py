"""What only the TCP transport has: a wire, connections, addresses, processes on the other side of a socket."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from commfuse_dp.errors import MismatchError, PeerLostError, TransportError, Where
from commfuse_dp.probe import RECEIVE, SEND, Probe
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag, Transport
from commfuse_dp.transport.one_sided.messages import HEADER_BYTES
from commfuse_dp.transport.tcp import connect as tcp_connect
from commfuse_dp.transport.tcp.connect import ADDRESS_VARIABLE, connect_all
from commfuse_dp.transport.tcp.links import (
    CONTROL_LANE,
    CONTROL_ROLE,
    DATA_ROLE,
    GRAD_LANE,
    HEADER,
    PARAM_LANE,
    Frame,
    Outgoing,
)
from commfuse_dp.transport.tcp.transport import TcpTransport
from commfuse_dp.transport.tcp.wire import LOWAT_FLOOR, MAGIC, Wire
from tests.support import single
from tests.support.leftovers import shared_memory
from tests.support.processes import RankPipe, RankProcesses
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import pattern, pull_bytes

WHERE = Where(layer="blocks.1.fc", step=5, slice="0/1", nbytes=321)
LOOPBACK = "127.0.0.1"


def message(number: int) -> bytes:
    return bytes([number]) * HEADER_BYTES


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far


def turned_away(sock: socket.socket) -> bool:
    """The other side ends the connection and says nothing: an end of file, or a reset if it left something unread."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class Recorder:
    """What a wire calls. Keeps payloads by message, in the order of their completion."""

    def __init__(self, sizes: dict[bytes, int]) -> None:
        self.sizes = sizes
        self.buffers: dict[bytes, bytearray] = {}
        self.delivered: list[tuple[int, int, bytes, bytes]] = []  # peer, lane, message, payload
        self.ended: list[tuple[int, str]] = []
        self.error: BaseException | None = None
        self.changed = threading.Event()

    def sink(self, peer: int, frame: Frame) -> memoryview:
        size = frame.nbytes if frame.lane == CONTROL_LANE else self.sizes[frame.message]
        buffer = self.buffers.setdefault(frame.message, bytearray(size))
        return memoryview(buffer)[frame.offset : frame.offset + frame.nbytes]

    def deliver(self, peer: int, frame: Frame) -> None:
        payload = self.buffers.get(frame.message, b"")
        if frame.offset + frame.nbytes == len(payload):
            self.delivered.append((peer, frame.lane, frame.message, bytes(payload)))
            self.changed.set()

    def sent(self, peer: int, item: Outgoing) -> None: ...

    def lost(self, peer: int, reason: str) -> None:
        self.ended.append((peer, reason))
        self.changed.set()

    def broken(self, error: BaseException) -> None:
        self.error = error
        self.changed.set()

    def wait_for(self, ready: Any, timeout_s: float = 20.0) -> None:
        limit = time.monotonic() + timeout_s
        while not ready():
            assert self.error is None, self.error
            assert time.monotonic() < limit, "the wire did not do it in time"
            self.changed.wait(0.05)
            self.changed.clear()


# ---- the wire --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_wire_takes_frames_in_any_pieces(seed: int) -> None:
    """A hand-made stream, cut at random (in the middle of headers, many frames at once), against what it was made of.

    Sizes lie around the low-water mark: a mark above what is still due would hang here.
    """
    choice = random.Random(seed)
    sizes = [0, 1, 55, LOWAT_FLOOR - 1, LOWAT_FLOOR, LOWAT_FLOOR + 1, 300_000]
    choice.shuffle(sizes)
    payloads = {message(n + 1): choice.randbytes(size) for n, size in enumerate(sizes)}
    stream = bytearray()
    for name, payload in payloads.items():
        step = max(1, choice.randint(len(payload) // 3, len(payload) + 1))
        for at in range(0, len(payload) or 1, step):
            piece = payload[at : at + step]
            stream += HEADER.pack(MAGIC, PARAM_LANE, len(piece), at, name) + piece
    near, far = tcp_pair()
    control, _far_control = tcp_pair()
    recorder = Recorder({name: len(payload) for name, payload in payloads.items()})
    wire = Wire(0, {(1, DATA_ROLE): near, (1, CONTROL_ROLE): control}, recorder)
    wire.start()
    try:
        at, delivered = 0, 0
        while at < len(stream):
            end = min(len(stream), at + choice.choice([1, 7, 56, 57, 1000, 40_000, 200_000]))
            far.sendall(stream[at:end])
            at = end
            if choice.random() < 0.2:  # let the wire meet an incomplete frame
                recorder.wait_for(lambda upto=at: wire.bytes_received >= upto - LOWAT_FLOOR - 300_000)
        recorder.wait_for(lambda: len(recorder.delivered) == len(payloads))
        delivered = [(name, payload) for _, _, name, payload in recorder.delivered]
        assert delivered == list(payloads.items())
        assert wire.bytes_received == len(stream)
        far.close()
        _far_control.close()
        recorder.wait_for(lambda: bool(recorder.ended))
        assert [peer for peer, _ in recorder.ended] == [1]
    finally:
        wire.close(0.0)


@pytest.mark.parametrize("size", [LOWAT_FLOOR, LOWAT_FLOOR + 1, 1_000_000])
def test_last_bytes_are_not_waited_past(size: int) -> None:
    """A chunk that comes in two parts, and nothing after it: a low-water mark above what is due would sleep for ever."""
    near, far = tcp_pair()
    control, far_control = tcp_pair()
    recorder = Recorder({message(1): size})
    wire = Wire(0, {(1, DATA_ROLE): near, (1, CONTROL_ROLE): control}, recorder)
    wire.start()
    try:
        payload = random.Random(size).randbytes(size)
        far.sendall(HEADER.pack(MAGIC, GRAD_LANE, size, 0, message(1)))
        recorder.wait_for(lambda: wire.bytes_received == HEADER.size)
        far.sendall(payload[: size // 2])
        far.sendall(payload[size // 2 :])
        recorder.wait_for(lambda: bool(recorder.delivered))
        assert recorder.delivered == [(1, GRAD_LANE, message(1), payload)]
    finally:
        wire.close(0.0)
        far.close()
        far_control.close()


def test_wire_refuses_a_stream_out_of_step() -> None:
    near, far = tcp_pair()
    control, far_control = tcp_pair()
    recorder = Recorder({})
    wire = Wire(0, {(1, DATA_ROLE): near, (1, CONTROL_ROLE): control}, recorder)
    wire.start()
    far.sendall(b"GET / HTTP/1.1\r\n" * 8)
    assert turned_away(far)
    far_control.close()
    recorder.wait_for(lambda: bool(recorder.ended))
    wire.close(0.0)


def test_parameters_overtake_gradients() -> None:
    """With megabytes of gradients queued and the peer not reading, a parameter slice is the next frame but one chunk."""
    chunk = 64 << 10
    size = 24 << 20
    near, far = tcp_pair()
    control, far_control = tcp_pair()
    sockets = {(1, DATA_ROLE): near, (1, CONTROL_ROLE): control}
    wire = Wire(0, sockets, Recorder({}), chunk_bytes=chunk, notsent_bytes=chunk)
    wire.start()
    try:
        wire.data(1, Outgoing(GRAD_LANE, message(1), memoryview(bytes(size))))
        wire.data(1, Outgoing(GRAD_LANE, message(2), memoryview(bytes(10))))
        full, before = 0, -1
        while full < 10:  # nobody reads: once the kernel's queues are full, the count stands still
            full = full + 1 if wire.bytes_sent == before and before > 0 else 0
            before = wire.bytes_sent
            time.sleep(0.02)
        assert before < size, "the kernel took everything: the test needs a larger transfer"
        wire.data(1, Outgoing(PARAM_LANE, message(3), memoryview(b"slice")))
        wire.control(1, message(4))
        assert far_control.recv(HEADER.size, socket.MSG_WAITALL)[16:] == message(4)  # not held up at all

        order, position, param_at, got = [], 0, -1, defaultdict(int)
        while got[message(2)] < 10:
            _, lane, nbytes, offset, name = HEADER.unpack(far.recv(HEADER.size, socket.MSG_WAITALL))
            if lane == PARAM_LANE:
                param_at = position
            assert offset == got[name] and nbytes <= chunk
            got[name] += len(far.recv(nbytes, socket.MSG_WAITALL))
            position += HEADER.size + nbytes
            if name not in order:
                order.append(name)
        assert got == {message(1): size, message(2): 10, message(3): 5}
        assert order == [message(1), message(3), message(2)]
        assert before <= param_at <= before + HEADER.size + chunk
    finally:
        wire.close(0.0)
        far.close()


# ---- the transport ---------------------------------------------------------------------------------------------------
def test_large_slices_messages_spans_and_bytes() -> None:
    """Several chunks each way at once, at odd offsets; what the probe and the wire counted is what was moved."""
    size, nbytes, start = 7_000_003, 5_000_001, 1_234_567

    def body(rank: int, exchange: ExchangeFn) -> tuple[int, int, list[Any]]:
        spans: list[Any] = []
        probe = Probe()
        probe.sink = lambda lane, name, start_ns, end_ns, extra: spans.append(
            (lane, end_ns >= start_ns, extra["nbytes"], extra["peer"])
        )
        transport = TcpTransport(rank, 2, exchange, inbox_bytes=size, deadline_s=30, probe=probe, address=LOOPBACK)
        try:
            transport.expose([[size, size]])
            for epoch in (1, 2):
                transport.wait_finished(epoch - 1)
                transport.segments[0].copy_(pattern(rank, epoch, nbytes=size))
                transport.publish((0,), epoch)
                out = torch.empty(nbytes, dtype=torch.uint8)
                fetch = single.pull(transport, 1 - rank, 0, epoch, start=start, nbytes=nbytes, out=out)
                buffer = single.reserve(transport, 1 - rank, size - 1)
                assert buffer is not None
                buffer.copy_(pattern(7, rank, epoch, nbytes=size - 1))
                single.send(transport, 1 - rank, Tag(CHANNEL_GRAD, seq=epoch), buffer)
                assert torch.equal(fetch.wait(WHERE), pattern(1 - rank, epoch, nbytes=size)[start : start + nbytes])
                got = single.receive(transport, 1 - rank, Tag(CHANNEL_GRAD, seq=epoch), WHERE)
                assert torch.equal(got, pattern(7, 1 - rank, epoch, nbytes=size - 1))
                single.release(transport, 1 - rank, Tag(CHANNEL_GRAD, seq=epoch))
                transport.finish(epoch)
            transport.wait_finished(2)
            exchange("end")
            return transport.wire.bytes_sent, transport.wire.bytes_received, spans
        finally:
            transport.close()

    moved = 2 * (nbytes + size - 1)
    for rank, (sent, received, spans) in enumerate(run_ranks(2, body)):
        assert moved < sent < moved * 1.001 and moved < received < moved * 1.001
        for lane in (SEND, RECEIVE):
            mine = sorted(nbytes for name, ordered, nbytes, peer in spans if name == lane and ordered and peer == 1 - rank)
            assert mine == sorted([nbytes, size - 1] * 2)


def open_one(rank: int, world_size: int, exchange: ExchangeFn, **settings: Any) -> Transport:
    settings = {"inbox_bytes": 4096, "deadline_s": 15.0, "address": LOOPBACK, **settings}
    return TcpTransport(rank, world_size, exchange, **settings)


def failing(world_size: int, body: Any) -> list[str]:
    """Every rank must raise TransportError; the texts."""

    def main(rank: int, exchange: ExchangeFn) -> str:
        with pytest.raises((TransportError, MismatchError)) as caught:
            body(rank, exchange).close()
        return str(caught.value)

    return run_ranks(world_size, main)


def test_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this host has no IPv6 loopback")

    def body(rank: int, exchange: ExchangeFn) -> None:
        transport = open_one(rank, 2, exchange, address="::1")
        transport.expose([[9, 9]])
        transport.segments[0].fill_(rank)
        transport.publish((0,), 1)
        assert pull_bytes(transport, 1 - rank, 0, 1, size=9).tolist() == [1 - rank] * 9
        transport.finish(1)  # else close() waits for late readers
        transport.close()

    run_ranks(2, body)


def test_close_gives_all_memory_back_whoever_still_holds_the_transport() -> None:
    def main(rank: int, exchange: ExchangeFn) -> Transport:
        transport = TcpTransport(rank, 2, exchange, inbox_bytes=1 << 16, deadline_s=20.0, address=LOOPBACK)
        transport.expose([[1 << 16, 1 << 16]])
        transport.segments[0].fill_(rank)
        transport.publish((0,), 1)
        landing = torch.empty(1 << 16, dtype=torch.uint8)
        single.pull(transport, 1 - rank, 0, 1, out=landing).wait(WHERE)
        transport.finish(1)
        single.pull(transport, 1 - rank, 0, 2, out=landing)  # of a peer that leaves instead
        transport.close()
        assert landing.eq(1 - rank).all()
        return transport

    before = shared_memory()
    held = run_ranks(2, main)
    assert shared_memory() == before
    for transport in held:
        with pytest.raises(TransportError, match="closed"):
            transport.segments[0]
        with pytest.raises(TransportError, match="closed"):
            single.reserve(transport, 1 - transport.rank, 8)


def test_strangers_are_turned_away() -> None:
    """Before its peer comes to rank 0: one stranger talks nonsense, one knows another token, one says nothing."""
    strangers: list[socket.socket] = []

    def body(rank: int, exchange: ExchangeFn) -> str:
        def meddled(item: Any) -> list[Any]:
            everyone = exchange(item)
            if rank == 1 and isinstance(item, tuple) and not strangers:
                card = everyone[0]
                wrong = tcp_connect._HELLO.pack(tcp_connect._HELLO_MAGIC, 1, DATA_ROLE, b"x" * 16)
                for greeting in (b"GET / HTTP/1.1\r\n\r\n" * 3, wrong, b""):
                    stranger = socket.create_connection((card.host, card.port), timeout=10)
                    stranger.sendall(greeting)
                    strangers.append(stranger)
            return everyone

        links = connect_all(rank, meddled, deadline_s=20, inbox_bytes=64, address=LOOPBACK)
        assert all(turned_away(stranger) for stranger in strangers)
        for sock in links.sockets.values():
            sock.close()
        return links.places[1 - rank]

    names = run_ranks(2, body)
    assert len(strangers) == 3 and all(LOOPBACK in name and str(os.getpid()) in name for name in names)


def test_bad_address_is_named_on_all_ranks() -> None:
    texts = failing(2, lambda rank, exchange: open_one(rank, 2, exchange, address="192.0.2.77" if rank else LOOPBACK))
    assert all("rank 1" in text and "192.0.2.77" in text and ADDRESS_VARIABLE in text for text in texts)


def test_unknown_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    texts = failing(2, lambda rank, exchange: open_one(rank, 2, exchange, address=None))
    assert all("nosuch0" in text and "lo" in text for text in texts)


def test_address_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (ADDRESS_VARIABLE, "GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    assert tcp_connect.choose_address() == LOOPBACK
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert tcp_connect.choose_address().startswith("127.0.0.")  # the source address of the route, which the kernel chooses
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert tcp_connect.choose_address() == LOOPBACK
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.1.2.3")
    assert tcp_connect.choose_address() == "10.1.2.3"


def test_loopback_between_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connect, "_place", lambda: threading.current_thread().name)
    texts = failing(2, lambda rank, exchange: open_one(rank, 2, exchange))
    assert all("loopback" in text and "[0, 1]" in text for text in texts)


def test_different_inboxes_are_refused() -> None:
    texts = failing(2, lambda rank, exchange: open_one(rank, 2, exchange, inbox_bytes=4096 + 64 * rank))
    assert all("inbox_bytes" in text and "4160" in text for text in texts)


def test_a_rank_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def meddled(rank: int, exchange: ExchangeFn) -> ExchangeFn:
        def replace(item: Any) -> list[Any]:
            everyone = exchange(item)
            return [card._replace(port=1) for card in everyone] if isinstance(item, tuple) else everyone

        return replace

    texts = failing(2, lambda rank, exchange: open_one(rank, 2, meddled(rank, exchange), deadline_s=0.5))
    assert all("rank 1: cannot reach rank 0" in text for text in texts)


# ---- processes -------------------------------------------------------------------------------------------------------
def _wait_for_a_dead_peer(rank: int, pipe: RankPipe, victim: int, fork: bool) -> tuple[str, int, float]:
    transport = open_one(rank, 3, pipe.exchange, deadline_s=120.0)
    if rank == victim and fork and os.fork() == 0:
        time.sleep(200)  # a child that outlives its parent, as data loaders do
        os._exit(0)
    pipe.exchange("ready")
    pipe.report("waiting")
    if rank == victim:
        signal.pause()
    other = 3 - rank - victim
    try:
        single.receive(transport, other, Tag(CHANNEL_GRAD), WHERE)
    except PeerLostError as error:
        return str(error), error.peer, time.monotonic()
    finally:
        transport.close()
    raise AssertionError("nothing was sent")


@pytest.mark.parametrize("fork", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "with a forked child"])
def test_killed_rank_is_named_by_all(fork: bool) -> None:
    victim = 1
    with RankProcesses(3, _wait_for_a_dead_peer, victim, fork) as ranks:
        for _ in range(3):
            ranks.next_report()
        killed = ranks.kill(victim)
        results = ranks.results(100.0)
    assert sorted(results) == [0, 2]
    for text, peer, seen in results.values():
        assert peer == victim and "blocks.1.fc" in text and f"rank {victim}" in text
        assert seen - killed < 60.0, "the deadline is 120 s"
