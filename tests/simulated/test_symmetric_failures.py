"""Transport 'symmetric' in streams: how it fails, and what it refuses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.device.base import Word
from commfuse_dp.errors import MismatchError, PeerLostError, TransportError
from commfuse_dp.transport import closing
from commfuse_dp.transport.base import CHANNEL_GRAD, Tag, Transport
from commfuse_dp.transport.symmetric import watch as symmetric_watch
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from commfuse_dp.transport.waiting import wait_until
from tests.simulated.test_symmetric import WHERE, quick, run
from tests.support import single
from tests.support.fake_device import FakeDevice, FakeWorld
from tests.support.fake_symmetric import die
from tests.support.threads import ExchangeFn

__all__ = ["quick"]  # the fixture


def in_another_order(transport: Transport, exchange: ExchangeFn, world: FakeWorld) -> str:
    """Rank 0 sends two messages in another order than rank 1 takes them in. Returns the error that this rank then has."""
    tags = [Tag(CHANNEL_GRAD, key, 1) for key in range(2)]
    other = 1 - transport.rank
    for tag in tags if transport.rank else reversed(tags):
        single.send(transport, other, tag, single.reserve(transport, other, 64))
    for tag in tags:
        single.expect(transport, other, tag, 64)
        single.receive(transport, other, tag, WHERE)
    exchange("enqueued")
    if transport.rank == 0:
        world.run(patience_s=10)  # the watchdog frees the streams
    exchange("has run")
    with pytest.raises((MismatchError, PeerLostError)) as caught:  # one of the two finds it, and its notice takes its time
        wait_until(transport, lambda: False, peer=other, where=WHERE, doing="to be found out")
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_in_another_order_are_an_error_and_never_wrong_data() -> None:
    world = FakeWorld(2, seed=2)
    texts = run(world, lambda transport, exchange: in_another_order(transport, exchange, world))
    assert any(text.startswith("MismatchError") for text in texts)
    for text in texts:
        for part in ("another message than expected", "'blocks.3.fc'", "step 12", "4711 bytes", "same order"):
            assert part in text


def test_a_dead_peer_frees_the_streams_and_is_named_by_every_later_call() -> None:
    world = FakeWorld(2, seed=2)

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        if transport.rank == 1:
            exchange("enqueued")
            die(transport)
            exchange("end")
            return
        transport.wait_finished(1, WHERE)
        out = torch.zeros(8, dtype=torch.uint8)
        single.pull(transport, 1, 0, 1, out=out).wait(WHERE)
        single.expect(transport, 1, Tag(CHANNEL_GRAD), 8)
        single.receive(transport, 1, Tag(CHANNEL_GRAD), WHERE)
        exchange("enqueued")
        start = time.monotonic()
        world.run(patience_s=60)
        assert time.monotonic() - start < 90, "at once, not after the deadline"
        for call in (
            transport.progress,
            lambda: single.reserve(transport, 1, 8),
            lambda: single.arrived(transport, 1, Tag(CHANNEL_GRAD)),
        ):
            with pytest.raises(PeerLostError, match=r"rank 1 .*pid.*blocks\.3\.fc.*step 12") as caught:
                call()
            assert caught.value.peer == 1 and caught.value.where == WHERE
        exchange("end")

    run(world, body, sizes=[[8, 8]], deadline_s=120.0)


def test_a_busy_device_is_not_a_late_peer() -> None:
    """The stream stands behind this rank's own work for longer than the deadline; the peer's word is there."""
    world = FakeWorld(2, deferred=False)

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        transport.segments[0].fill_(transport.rank)
        transport.publish((0,), 1)
        exchange("published")
        if transport.rank == 0:
            device, busy = transport.device, torch.zeros(1, dtype=torch.int32)
            device.wait_value(device.side_stream("gather"), busy, 0, 1)
            pull = single.pull(transport, 1, 0, 1, out=torch.zeros(8, dtype=torch.uint8))
            time.sleep(1.0)  # five deadlines
            device.poke([Word(busy, 0, 1)])
            assert pull.wait(WHERE).tolist() == [1] * 8
        exchange("end")

    run(world, body, sizes=[[8, 8]], deadline_s=0.2)


def test_capture_is_refused() -> None:
    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        transport.device.captures = True  # type: ignore[attr-defined]
        other = 1 - transport.rank
        calls: list[Callable[[], object]] = [
            lambda: transport.publish((0,), 1),
            lambda: single.pull(transport, other, 0, 1, out=torch.zeros(8, dtype=torch.uint8)),
            lambda: single.reserve(transport, other, 8),
            lambda: single.receive(transport, other, Tag(CHANNEL_GRAD)),
            lambda: transport.finish(1),
        ]
        for call in calls:
            with pytest.raises(TransportError, match="cannot be captured into a CUDA graph"):
                call()
        transport.device.captures = False  # type: ignore[attr-defined]
        exchange("end")

    run(FakeWorld(2, deferred=False), body, sizes=[[8, 8]])


def test_misuse_of_messages() -> None:
    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        other, tag = 1 - transport.rank, Tag(CHANNEL_GRAD)
        with pytest.raises(ValueError, match=r"not announced by expect"):
            single.receive(transport, other, tag)
        single.expect(transport, other, tag, 8)
        with pytest.raises(TransportError, match="two messages Tag"):
            single.expect(transport, other, tag, 8)
        with pytest.raises(ValueError, match="not yet received"):
            single.release(transport, other, tag)
        with pytest.raises(ValueError, match="rings for the channels"):
            single.expect(transport, other, Tag(99), 8)
        for _ in range(4):
            single.reserve(transport, other, 256)
        with pytest.raises(TransportError, match=r"1024 bytes are too few.*inbox_bytes"):
            single.reserve(transport, other, 256)
        exchange("end")

    run(FakeWorld(2, deferred=False), body)


def test_nothing_is_left_behind() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    memories: list[Any] = []

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        memories.append(transport._core.memory)
        exchange("open")
        transport.close()
        transport.close()

    run(FakeWorld(3, deferred=False), body, sizes=[[8, 8, 8]])
    assert [memory.closed for memory in memories] == [1] * 3
    names = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert not [name for name in names if name.startswith(("commfuse-watchdog", "commfuse-second"))]
    assert not closing.never_freed


def test_a_driver_that_does_not_answer_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """See [Note: A driver that does not answer] in streams/watch.py: the watchdog stands with the host."""
    world, answers, stood = FakeWorld(2, seed=2), threading.Event(), threading.Event()
    peek = FakeDevice.peek

    def standing(self: FakeDevice, pad: torch.Tensor) -> list[int]:
        stood.set()
        assert answers.wait(30.0)
        return peek(self, pad)

    def told() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL]
        return [text for text in texts if text.startswith("rank 0, transport symmetric:")]

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        if transport.rank == 0:
            single.expect(transport, 1, Tag(CHANNEL_GRAD, 0, 1), 64)
            single.receive(transport, 1, Tag(CHANNEL_GRAD, 0, 1), WHERE)
            assert stood.wait(30.0)
            while not told():
                assert not answers.wait(0.01)
            answers.set()
        exchange("told")
        if transport.rank == 1:
            single.send(transport, 0, Tag(CHANNEL_GRAD, 0, 1), single.reserve(transport, 0, 64))
        exchange("sent")
        if transport.rank == 0:
            world.run(patience_s=10)
        exchange("end")

    monkeypatch.setattr(FakeDevice, "peek", standing)
    monkeypatch.setattr(symmetric_watch, "SUSPECT_S", 0.05)
    run(world, body, deadline_s=1.0)
    for part in ("has not answered for 1 s", "CUDA_MODULE_LOADING=EAGER"):
        assert part in told()[0]
