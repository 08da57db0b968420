"""What a rank sends over tcp to several peers: collectives leave one after the other, all else side by side."""

from __future__ import annotations

import fcntl
import itertools
import random
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from commfuse_dp.transport.tcp import turns
from commfuse_dp.transport.tcp.links import (
    COLLECTIVE_LANE,
    CONTROL_ROLE,
    DATA_ROLE,
    GRAD_LANE,
    HEADER,
    PARAM_LANE,
    Outgoing,
)
from commfuse_dp.transport.tcp.wire import Wire
from tests.conformance.transports.test_tcp import Recorder, message, tcp_pair

CHUNK = 256 << 10
LARGE = 24 << 20  # more than the kernel's queues of a connection take


@contextmanager
def sending_to(peers: int, handler: Recorder | None = None) -> Iterator[tuple[Wire, dict[int, socket.socket]]]:
    """A wire, and by peer the other end of its data connection."""
    near, far = {}, {}
    for peer, role in itertools.product(range(1, peers + 1), (DATA_ROLE, CONTROL_ROLE)):
        near[peer, role], far[peer, role] = tcp_pair()
        # Not settimeout(), which makes a MSG_WAITALL return what is there.
        far[peer, role].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 20, 0))
    wire = Wire(0, near, handler or Recorder({}), chunk_bytes=CHUNK)
    wire.start()
    try:
        yield wire, {peer: far[peer, DATA_ROLE] for peer in range(1, peers + 1)}
    finally:
        wire.close(0.0)
        for sock in far.values():
            sock.close()


def transfer(number: int, nbytes: int, lane: int = COLLECTIVE_LANE) -> Outgoing:
    return Outgoing(lane, message(number), memoryview(bytes(nbytes)))


def waiting(sock: socket.socket) -> int:
    """Bytes that have come and have not been read."""
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0\0\0\0"))[0])


def take(sock: socket.socket, nbytes: int) -> dict[bytes, int]:
    """Payload bytes by message, of frames with so many in all."""
    got: dict[bytes, int] = {}
    while sum(got.values()) < nbytes:
        _, _, size, _, name = HEADER.unpack(sock.recv(HEADER.size, socket.MSG_WAITALL))
        got[name] = got.get(name, 0) + len(sock.recv(size, socket.MSG_WAITALL))
    return got


def until(ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20.0
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_peers_are_served_in_the_order_in_which_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was given its message later has nothing of it before all but the last bytes of the earlier one have left."""
    monkeypatch.setattr(turns, "PATIENCE_S", 20.0)  # as if every peer took what it gets at any time
    order = [2, 3, 1]
    with sending_to(3) as (wire, far):
        for number, peer in enumerate(order):
            wire.data(peer, transfer(number, LARGE))
        for at, peer in enumerate(order):
            got = take(far[peer], LARGE - CHUNK)[message(at)]
            # Of the next peer's a part may have come: the turn passes when the kernel has sent what it has taken.
            for later in order[at + 2 :]:
                assert waiting(far[later]) == 0
            if got < LARGE:
                got += take(far[peer], LARGE - got)[message(at)]
            assert got == LARGE
        until(wire.idle)


def test_what_is_given_later_waits_for_what_the_kernel_has_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message is with the kernel, whole, when the second one is given: not a byte of that overtakes it."""
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
    queued = iter([turns.UNSENT_BYTES + 1] * 50)
    asked = []

    def unsent(sock: socket.socket) -> int:
        asked.append(next(queued, 0))
        return asked[-1]

    monkeypatch.setattr(turns, "unsent", unsent)
    with sending_to(2) as (wire, far):
        wire.data(1, transfer(1, 1000))
        assert take(far[1], 1000) == {message(1): 1000}
        until(wire.idle)
        wire.data(2, transfer(2, 1000))
        assert take(far[2], 1000) == {message(2): 1000}
        assert asked[-1] == 0 and len(asked) == 51


def test_the_next_peer_has_its_turn_without_anything_else_happening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to peers in turn: nothing but the kernel's word that one has left lets the next one go."""
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
    generator = random.Random(7)
    with sending_to(3) as (wire, far), ThreadPoolExecutor(3) as pool:
        given = [(generator.choice([1, 2, 3]), generator.choice([0, 1, 1000, 400_000])) for _ in range(120)]
        for number, (peer, nbytes) in enumerate(given):
            wire.data(peer, transfer(number, nbytes, generator.choice([COLLECTIVE_LANE, PARAM_LANE, GRAD_LANE])))
        sent = {peer: {message(n): size for n, (to, size) in enumerate(given) if to == peer and size} for peer in far}
        taking = {peer: pool.submit(take, sock, sum(sent[peer].values())) for peer, sock in far.items()}
        for peer, got in taking.items():
            assert got.result().items() >= sent[peer].items()
        until(wire.idle)


@pytest.mark.parametrize("lane", [PARAM_LANE, GRAD_LANE])
def test_what_has_priority_does_not_wait_for_a_transfer_to_another_peer(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the chunk under way, and what the kernel has taken."""
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
    with sending_to(2) as (wire, far):
        wire.data(1, transfer(1, LARGE, lane))
        until(lambda: waiting(far[1]) > 0)
        wire.data(2, transfer(2, 5))
        taken = 0
        while not waiting(far[2]):
            taken += sum(take(far[1], 1).values())
        assert taken < LARGE
        assert take(far[2], 5) == {message(2): 5}
        assert take(far[1], LARGE - taken) == {message(1): LARGE - taken}


@pytest.mark.parametrize("lanes", [(PARAM_LANE, PARAM_LANE), (GRAD_LANE, GRAD_LANE), (PARAM_LANE, GRAD_LANE)])
def test_slices_go_side_by_side(lanes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes nothing, as its own link is full, say, leaves this rank's link to the others at once."""
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
    with sending_to(2) as (wire, far):
        for peer, lane in enumerate(lanes, start=1):
            wire.data(peer, transfer(peer, LARGE, lane))
        until(lambda: waiting(far[1]) > 0)
        assert take(far[2], LARGE) == {message(2): LARGE}  # nobody has read what was sent to 1
        assert take(far[1], LARGE) == {message(1): LARGE}


def test_slices_pause_for_a_collective() -> None:
    """All peers read; while a collective leaves, hardly more than the chunk under way does of another transfer."""
    slices = {peer: transfer(peer, 4 * LARGE, lane) for peer, lane in ((1, PARAM_LANE), (3, GRAD_LANE))}
    collective = transfer(2, LARGE)
    left: list[int] = []

    class Noting(Recorder):
        def sent(self, peer: int, item: Outgoing) -> None:
            if item is collective:
                left.extend(other.done for other in slices.values())

    with sending_to(3, Noting({})) as (wire, far), ThreadPoolExecutor(2) as pool:
        for peer, item in slices.items():
            wire.data(peer, item)
        until(lambda: waiting(far[1]) > 0 and waiting(far[3]) > 0)
        before = [item.done for item in slices.values()]
        wire.data(2, collective)
        until(lambda: waiting(far[2]) > 0)
        taking = [pool.submit(take, far[peer], 4 * LARGE) for peer in slices]
        assert take(far[2], LARGE) == {message(2): LARGE}
        assert [taken.result() for taken in taking] == [{message(1): 4 * LARGE}, {message(3): 4 * LARGE}]
    for earlier, later in zip(before, left, strict=True):
        assert later - earlier < LARGE // 4  # side by side, as much as the collective has


def test_a_peer_that_takes_nothing_loses_its_turn() -> None:
    with sending_to(3) as (wire, far):
        for peer in (1, 2, 3):
            wire.data(peer, transfer(peer, LARGE))
        for peer in (2, 3):  # nobody reads what was sent to 1
            assert take(far[peer], LARGE) == {message(peer): LARGE}
        wire.data(2, transfer(9, 1000))
        assert take(far[2], 1000) == {message(9): 1000}
        assert take(far[1], LARGE) == {message(1): LARGE}  # it goes on when the peer does


def test_a_peer_that_is_gone_loses_its_turn() -> None:
    with sending_to(2) as (wire, far):
        wire.data(1, transfer(1, LARGE))
        wire.data(2, transfer(2, LARGE))
        far[1].close()
        assert take(far[2], LARGE) == {message(2): LARGE}


def test_what_has_no_payload_needs_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye, say: nobody reads what was given to another peer before, nor loses its turn by that."""
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
    with sending_to(3) as (wire, far):
        wire.data(1, transfer(1, LARGE))
        until(lambda: waiting(far[1]) > 0)
        wire.data(2, transfer(2, 0, GRAD_LANE))
        wire.data(3, transfer(3, LARGE))
        wire.data(3, transfer(4, 0, GRAD_LANE))  # behind a payload: it has to wait with that
        assert HEADER.unpack(far[2].recv(HEADER.size, socket.MSG_WAITALL))[4] == message(2)
        assert waiting(far[3]) == 0
        assert take(far[1], LARGE) == {message(1): LARGE}
        assert take(far[3], LARGE) == {message(3): LARGE}
        assert HEADER.unpack(far[3].recv(HEADER.size, socket.MSG_WAITALL))[4] == message(4)
