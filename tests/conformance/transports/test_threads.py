"""Transports with a thread of their own, and an interpreter that switches between threads as often as it can.

Orders and counts must not hang on the interpreter's lock. On a free-threaded Python the same tests run without it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag, Transport
from commfuse_dp.transport.tcp.transport import TcpTransport
from commfuse_dp.transport.waiting import wait_until
from tests.support import single
from tests.support.threads import ExchangeFn, run_ranks

WHERE = Where("blocks.1.fc", 3, "1/0", 64)
STEPS, MESSAGES, NBYTES = 12, 20, 200


@pytest.fixture
def hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def steps(transport: Transport) -> tuple[int, int, int, int]:
    """Pulls before and after the publication, messages both ways: every byte checked, every byte counted."""
    rank, n = transport.rank, transport.world_size
    transport.expose([[NBYTES] * n] * 4)
    others = [peer for peer in range(n) if peer != rank]
    for epoch in range(1, STEPS + 1):
        transport.wait_finished(epoch - 1, WHERE)
        outs = {(peer, key): torch.empty(NBYTES, dtype=torch.uint8) for peer in others for key in range(4)}
        pull = partial(single.pull, transport)
        early = {(peer, key): pull(peer, key, epoch, out=outs[peer, key]) for peer in others for key in (0, 1)}
        for key in range(4):
            transport.segments[key].fill_((7 * epoch + key + 50 * rank) % 251)
            transport.publish((key,), epoch)
        late = {(peer, key): pull(peer, key, epoch, out=outs[peer, key]) for peer in others for key in (2, 3)}
        for number in range(MESSAGES):
            for peer in others:
                wait_for: list[Any] = []

                def reserve(peer: int = peer, found: list[Any] = wait_for) -> bool:
                    found[:] = [single.reserve(transport, peer, NBYTES)]
                    return found[0] is not None

                wait_until(transport, reserve, peer=peer, where=WHERE, doing="credit")
                wait_for[0].fill_((epoch + number + rank) % 251)
                single.send(transport, peer, Tag(CHANNEL_GRAD, number, epoch), wait_for[0])
            for peer in others:
                tag = Tag(CHANNEL_GRAD, number, epoch)
                single.arrived(transport, peer, tag)
                assert single.receive(transport, peer, tag, WHERE).eq((epoch + number + peer) % 251).all()
                single.release(transport, peer, tag)
        for (peer, key), pulled in {**early, **late}.items():
            assert pulled.wait(WHERE).eq((7 * epoch + key + 50 * peer) % 251).all()
        transport.finish(epoch)
    transport.wait_finished(STEPS, WHERE)
    c = transport.probe.counters
    counted = c.param_bytes_received, c.param_bytes_sent, c.grad_bytes_received, c.grad_bytes_sent
    transport.close()
    return counted


def sockets() -> int:
    """Of this process. Memory keeps a descriptor for as long as a tensor aliases it: not counted."""
    gc.collect()
    kinds = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("socket:" in kind or "eventpoll" in kind for kind in kinds)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_lost_between_threads(hasty: None, world_size: int) -> None:
    threads, before = set(threading.enumerate()), sockets()

    def body(rank: int, exchange: ExchangeFn) -> tuple[int, int, int, int]:
        return steps(TcpTransport(rank, world_size, exchange, inbox_bytes=2048, deadline_s=60.0, address="127.0.0.1"))

    pulled, sent = STEPS * 4 * NBYTES * (world_size - 1), STEPS * MESSAGES * NBYTES * (world_size - 1)
    assert run_ranks(world_size, body, timeout_s=120) == [(pulled, pulled, sent, sent)] * world_size
    assert set(threading.enumerate()) <= threads, "threads that outlive close"
    assert sockets() <= before, "sockets that outlive close"


def test_a_thread_is_woken_for_all_that_is_queued(hasty: None) -> None:
    """A message that is queued while the I/O thread goes to sleep would wait for the next one, which here never comes."""

    def body(rank: int, exchange: ExchangeFn) -> int:
        transport = TcpTransport(rank, 2, exchange, inbox_bytes=2048, deadline_s=60.0, address="127.0.0.1")
        for number in range(400):
            tag, other = Tag(CHANNEL_GRAD, number), 1 - rank
            if number % 2 == rank:
                buffer = single.reserve(transport, other, 8)
                assert buffer is not None
                single.send(transport, other, tag, buffer)
            else:
                single.receive(transport, other, tag, WHERE)
                single.release(transport, other, tag)
        transport.close()
        return number

    assert run_ranks(2, body, timeout_s=120) == [399, 399]
