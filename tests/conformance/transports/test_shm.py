"""What only shared memory has: real memory, descriptors, processes that die."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag
from commfuse_dp.transport.free_memory import available_memory
from commfuse_dp.transport.shm import sockets
from commfuse_dp.transport.shm import transport as shm
from commfuse_dp.transport.shm.transport import ShmTransport
from tests.support import single
from tests.support.leftovers import shared_memory
from tests.support.processes import RankPipe, RankProcesses
from tests.support.threads import run_ranks
from tests.support.transports import ShmCluster, pattern

WHERE = Where(layer="blocks.0.fc", step=3, slice="1/0", nbytes=99)
ODD_SIZE = 37 * 4096 + 100
SHM_DIR = "/dev/shm"


# What is open and mapped now, each by its identity: other tests of this process may let go of theirs at any time.
def descriptors() -> set[tuple[int, int, int]]:
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists the folder
            status = os.fstat(fd)
            found.add((fd, status.st_dev, status.st_ino))
    return found


def mappings() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:commfuse" in line}


def named() -> list[str]:
    """What this process has mapped or open of /dev/shm under a name, which could stay there: there must never be any."""
    places = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if SHM_DIR in line]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            places.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [place for place in places if place.startswith(SHM_DIR) and not place.endswith("(deleted)")]


# ---- resources ---------------------------------------------------------------------------------------------------------
def test_nothing_is_leaked() -> None:
    cluster = ShmCluster()

    def body(transport: Any, exchange: Any) -> None:
        transport.segments[0].fill_(1)
        transport.publish((0,), 1)
        assert single.pull(transport, (transport.rank + 1) % 3, 0, 1).wait().numel() == ODD_SIZE
        assert named() == []
        exchange("end")

    cluster.run(3, body, sizes=[[ODD_SIZE] * 3], inbox_bytes=ODD_SIZE)
    gc.collect()
    before = (descriptors(), mappings(), set(threading.enumerate()))
    for _ in range(3):
        cluster.run(3, body, sizes=[[ODD_SIZE] * 3], inbox_bytes=ODD_SIZE)
    gc.collect()
    assert descriptors() <= before[0] and mappings() <= before[1] and set(threading.enumerate()) <= before[2]
    assert not [place for place in shared_memory() if place.startswith(SHM_DIR)]


def test_descriptors_held_while_open() -> None:
    """Per rank N - 1 sockets, one epoll set and its bell stay; before Python 3.13 also a copy that each mmap object keeps."""
    open_now = []

    def body(transport: Any, exchange: Any) -> None:
        exchange("open")
        if transport.rank == 0:
            open_now.append(descriptors())
        exchange("counted")

    gc.collect()
    before = descriptors()
    ShmCluster().run(3, body, sizes=[[8] * 3])
    kept_by_mmap = 0 if sys.version_info >= (3, 13) else 1 + 2 + 3  # inbox, rings of two peers, segments of three ranks
    assert len(open_now[0] - before) == 3 * (2 + 2 + kept_by_mmap)


def test_a_tensor_that_outlives_close_stays_readable() -> None:
    gc.collect()
    before = mappings()  # other tests of this process may have left engines that Python has not collected yet

    def body(transport: Any, exchange: Any) -> torch.Tensor:
        transport.segments[0].copy_(pattern(transport.rank, nbytes=5000))
        transport.publish((0,), 1)
        got = single.pull(transport, 1 - transport.rank, 0, 1).wait()
        exchange("read")
        return got

    kept = ShmCluster().run(2, body, sizes=[[5000, 5000]])
    gc.collect()
    assert len(mappings() - before) >= 2
    for rank in range(2):
        assert torch.equal(kept[rank], pattern(1 - rank, nbytes=5000))
    del kept
    gc.collect()
    assert mappings() <= before


def test_writes_are_seen_where_they_are_read_without_a_copy() -> None:
    """Two mappings of one page: what the owner writes into its segment changes what a peer's view shows."""
    views = []

    def body(transport: Any, exchange: Any) -> None:
        transport.publish((0,), 1)
        if transport.rank == 1:
            views.append(single.pull(transport, 0, 0, 1).wait())
        exchange("pulled")
        if transport.rank == 0:
            transport.segments[0].fill_(77)
        exchange("written")
        if transport.rank == 1:
            assert views[0].tolist() == [77] * 16
            assert views[0].data_ptr() != transport.segments[0].data_ptr()
            views.clear()

    ShmCluster().run(2, body, sizes=[[16, 16]])


# ---- memory that is not there ------------------------------------------------------------------------------------------
def test_too_little_memory_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "available_memory", lambda: 100 << 20)
    before = descriptors()

    def too_large_inbox(rank: int, exchange: Any) -> str:
        with pytest.raises(TransportError) as caught:
            ShmTransport(rank, 2, exchange, inbox_bytes=20 << 20, deadline_s=5)
        return str(caught.value)

    def too_large_windows(rank: int, exchange: Any) -> str:
        transport = ShmTransport(rank, 2, exchange, inbox_bytes=1 << 20, deadline_s=5)
        with pytest.raises(TransportError) as caught:
            transport.expose([[1 << 20, 50 << 20]])
        transport.close()
        return str(caught.value)

    for text in run_ranks(2, too_large_inbox):
        assert str(40 << 20) in text and str(100 << 20) in text and "inbox_bytes" in text
    for text in run_ranks(2, too_large_windows):
        assert str(51 << 20) in text and str(100 << 20) in text and "shards" in text
    assert descriptors() <= before


def test_memory_that_the_kernel_refuses_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may, whatever was available a moment before."""

    def allocate(nbytes: int) -> int:
        if nbytes >= 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocated(nbytes)

    allocated = shm._allocate
    monkeypatch.setattr(shm, "_allocate", allocate)
    gc.collect()  # what other tests have left would go in the middle
    before = descriptors()

    def body(rank: int, exchange: Any) -> str:
        inbox = 1 << 20 if rank == 1 else 4096
        with pytest.raises(TransportError) as caught:
            ShmTransport(rank, 2, exchange, inbox_bytes=inbox, deadline_s=5)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "rank 1: cannot get" in text and "No space left" in text and "inboxes" in text
    assert descriptors() <= before


def test_available_memory_is_plausible() -> None:
    free = available_memory()
    assert free is not None and 0 < free < 1 << 50


# ---- connections -------------------------------------------------------------------------------------------------------
def test_a_stranger_on_the_socket_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without the token connects to every listener first; the ranks still find each other."""
    strangers: list[socket.socket] = []

    def body(rank: int, exchange: Any) -> int:
        def spied(item: Any) -> list[Any]:
            cards = exchange(item)
            if rank == 0 and isinstance(item, tuple) and isinstance(item[0], bytes):
                for address, _, _ in cards:
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    stranger.connect(address)
                    stranger.sendall(sockets._HELLO.pack(b"x" * 32, 1))
                    strangers.append(stranger)
            exchange("strangers are there")
            return cards

        mesh = sockets.connect_mesh(rank, range(3), spied, 10.0)
        peers = len(mesh.sockets)
        mesh.close()
        return peers

    try:
        assert run_ranks(3, body) == [2, 2, 2]
        assert len(strangers) == 3
    finally:
        for stranger in strangers:
            stranger.close()


def test_control_messages_are_never_lost_when_the_peer_does_not_read() -> None:
    """Far more messages than the socket's buffer holds: they queue without blocking and arrive in full, in order."""
    count = 20_000

    def body(transport: Any, exchange: Any) -> None:
        if transport.rank == 0:
            for epoch in range(1, count + 1):
                transport.finish(epoch)
            assert transport._channel._queued[1], "the test must fill the socket"
            exchange("queued")
            assert transport._channel.flush(20)
            exchange("flushed")
        else:
            exchange("queued")
            transport.wait_finished(count)
            exchange("flushed")

    ShmCluster().run(2, body)


def test_a_waiting_rank_sleeps() -> None:
    def body(transport: Any, exchange: Any) -> float:
        busy = 0.0
        if transport.rank == 0:
            before = time.thread_time()
            with pytest.raises(DeadlineError):
                single.receive(transport, 1, Tag(CHANNEL_GRAD), WHERE)
            busy = time.thread_time() - before
        exchange("end")
        return busy

    assert ShmCluster().run(2, body, deadline_s=1.0)[0] < 0.1


# ---- processes ---------------------------------------------------------------------------------------------------------
def mid_wait(rank: int, pipe: RankPipe, victim: int) -> tuple[int, str, float, list[str]]:
    transport = ShmTransport(rank, 3, pipe.exchange, inbox_bytes=ODD_SIZE, deadline_s=120)
    transport.expose([[ODD_SIZE] * 3])
    transport.segments[0].fill_(rank)
    transport.publish((0,), 1)
    assert single.pull(transport, (rank + 1) % 3, 0, 1).wait().unique().tolist() == [(rank + 1) % 3]
    child = 0
    if rank == victim:
        child = os.fork()  # as a DataLoader worker would: it must not hide the death of its parent
        if child == 0:
            time.sleep(60)
            os._exit(0)
    pipe.report((os.getpid(), child))
    try:
        single.receive(transport, (rank + 1) % 3, Tag(CHANNEL_GRAD), WHERE)
    except PeerLostError as error:
        return error.peer, str(error), time.monotonic(), named()
    raise AssertionError("a message that nobody sent")


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_kill_9_in_mid_wait_is_named_by_every_survivor(victim: int) -> None:
    with RankProcesses(3, mid_wait, victim) as ranks:
        reports = dict(ranks.next_report() for _ in range(3))
        child = reports[victim][1]
        try:
            for rank in range(3):  # all of them are asleep in their wait before the blow
                stat = Path(f"/proc/{reports[rank][0]}/stat")
                limit = time.monotonic() + 60
                while stat.read_text().rsplit(")", 1)[1].split()[0] != "S" and time.monotonic() < limit:
                    time.sleep(0.01)
            killed = ranks.kill(victim)
            results = ranks.results(100)
        finally:
            os.kill(child, signal.SIGKILL)
    assert set(results) == {0, 1, 2} - {victim}
    for rank, (peer, text, raised, names_seen) in results.items():
        assert peer == victim and f"rank {victim} (pid {reports[victim][0]})" in text
        assert f"rank {rank}" in text and "'blocks.0.fc', step 3, slice 1/0, 99 bytes" in text
        assert raised - killed < 60.0, "the deadline is 120 s: this came from the end of the connection"
        assert names_seen == []


def leaves_early(rank: int, pipe: RankPipe) -> str:
    transport = ShmTransport(rank, 2, pipe.exchange, inbox_bytes=4096, deadline_s=30)
    if rank == 1:
        buffer = single.reserve(transport, 0, 8)
        assert buffer is not None
        single.send(transport, 0, Tag(CHANNEL_GRAD), buffer.fill_(5))
        return "ended without close"
    time.sleep(0.5)  # let rank 1 be gone for sure; what follows must not depend on it
    got = single.receive(transport, 1, Tag(CHANNEL_GRAD)).tolist()
    single.release(transport, 1, Tag(CHANNEL_GRAD))
    transport.wait_finished(1)
    return str(got)


def test_a_program_that_ends_without_close_is_no_failure() -> None:
    with RankProcesses(2, leaves_early) as ranks:
        assert ranks.results(60) == {0: str([5] * 8), 1: "ended without close"}
