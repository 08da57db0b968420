"""Transport 'symmetric' in streams: whole steps in many legal orders, and what a missing wait looks like.

A program is enqueued on all ranks before anything runs; then the streams run in an order drawn from a seed (fake_device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from commfuse_dp.device.base import Batch, Event
from commfuse_dp.errors import Where
from commfuse_dp.transport import closing
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_GRAD, PullRequest, Tag
from commfuse_dp.transport.streams.staging import StagingRing
from commfuse_dp.transport.symmetric import transport as symmetric
from commfuse_dp.transport.symmetric import watch as symmetric_watch
from commfuse_dp.transport.symmetric.core import Core
from commfuse_dp.transport.symmetric.messages import Messages
from commfuse_dp.transport.symmetric.ring import Outbox
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from commfuse_dp.transport.symmetric.windows import Pull, Windows
from tests.support import single
from tests.support.cells import slow
from tests.support.fake_device import FakeBatch, FakeEvent, FakeWorld, Race, Stuck
from tests.support.fake_symmetric import open_fake
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import pattern

WHERE = Where("blocks.3.fc", 12, "2/1", 4711)
Body = Callable[[SymmetricTransport, ExchangeFn], Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "CLOSE_S", 0.3)
    monkeypatch.setattr(symmetric_watch, "SUSPECT_S", 0.05)
    closing.never_freed.clear()  # of a test that broke the transport


def run(world: FakeWorld, body: Body, *, inbox_bytes: int = 1024, deadline_s: float = 20.0, sizes: Any = None) -> list[Any]:
    def main(rank: int, exchange: ExchangeFn) -> Any:
        transport = open_fake(world, rank, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s)
        try:
            if sizes is not None:
                transport.expose(sizes)
            return body(transport, exchange)
        finally:
            world.deferred = world.strict = False  # what close() enqueues runs by itself
            transport.close()

    return run_ranks(world.world_size, main, timeout_s=30)


# ---- whole steps -------------------------------------------------------------------------------------------------------
SIZES = [[200, 264, 136], [64, 64, 64]]
EPOCHS = 3


class Step:
    """Steps of one rank: publish, pull through two buffers, send gradients, sum them on a side stream."""

    def __init__(self, transport: SymmetricTransport) -> None:
        self.transport, self.device = transport, transport.device
        self.rank, self.n = transport.rank, transport.world_size
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was read, what it must be
        count = self.n - 1  # too few for an epoch: they are used again while the epoch lasts
        self.buffers: list[tuple[torch.Tensor, Event | None]] = [
            (torch.zeros(264, dtype=torch.uint8), None) for _ in range(count)
        ]

    def launch(self, function: Callable[[], object], **memory: Any) -> None:
        self.device.launch(function, **memory)  # type: ignore[attr-defined]

    def read(self, source: torch.Tensor, expected: torch.Tensor) -> None:
        target = torch.zeros_like(source)
        self.seen.append((target, expected))
        self.launch(lambda: target.copy_(source), reads=[source], writes=[target])

    def run(self) -> None:
        for epoch in range(1, EPOCHS + 1):
            self.transport.wait_finished(epoch - 1, WHERE)
            for key in range(2):
                segment, data = self.transport.segments[key], pattern(self.rank, key, epoch, nbytes=SIZES[key][self.rank])
                self.launch(lambda s=segment, d=data: s.copy_(d), writes=[segment])
                self.transport.publish((key,), epoch)
            self.transport.progress()
            if epoch > 1:  # from now on a wait for all keys of an owner serves
                self.transport.publish((), epoch, last=True)
            self.windows(epoch)
            self.gradients(epoch)
            self.transport.finish(epoch)

    def windows(self, epoch: int) -> None:
        owners = [(self.rank + step) % self.n for step in range(self.n)]
        together = self.n - 1 if epoch == EPOCHS else 0  # so many with one call
        requests = []
        for owner in owners[:together]:
            whole, free = self.buffers.pop(0)
            requests.append((whole, PullRequest(owner, 0, 0, SIZES[0][owner], whole[: SIZES[0][owner]], free)))
        pulls = self.transport.pull(epoch, [request for _, request in requests])
        for number, owner in enumerate(owners):
            size = SIZES[0][owner]
            if number < together:
                whole, pull = requests[number][0], pulls[number]
                buffer = requests[number][1].out
            else:
                whole, free = self.buffers.pop(0)
                buffer = whole[:size]
                pull = single.pull(self.transport, owner, 0, epoch, nbytes=size, out=buffer, after=free)
            if number % 2 or pull.arrival is None:
                assert pull.done() and pull.wait(WHERE) is buffer
            else:
                self.device.wait_value(self.device.current_stream(), *pull.arrival)  # as a kernel does
            self.read(buffer, pattern(owner, 0, epoch, nbytes=size))
            self.buffers.append((whole, self.device.record(self.device.current_stream())))
        owner = (self.rank + 1) % self.n
        size, (whole, free) = SIZES[1][owner], self.buffers.pop(0)
        pull = single.pull(self.transport, owner, 1, epoch, nbytes=size, out=whole[:size], after=free)
        self.read(pull.wait(WHERE), pattern(owner, 1, epoch, nbytes=size))
        self.buffers.append((whole, self.device.record(self.device.current_stream())))

    def gradients(self, epoch: int) -> None:
        peers = [peer for peer in range(self.n) if peer != self.rank]
        sizes = {peer: [200 + 8 * self.rank, 0, 300 - 8 * peer] for peer in peers}
        for peer in peers:
            for part, nbytes in enumerate([200 + 8 * peer, 0, 300 - 8 * self.rank]):
                single.expect(self.transport, peer, Tag(CHANNEL_GRAD, 1, epoch, part), nbytes)
        for part in range(3):
            for peer in peers:
                data = pattern(self.rank, peer, epoch, part, nbytes=sizes[peer][part])
                buffer = single.reserve(self.transport, peer, data.numel())
                self.launch(lambda b=buffer, d=data: b.copy_(d), writes=[buffer])
                single.send(self.transport, peer, Tag(CHANNEL_GRAD, 1, epoch, part), buffer)
        with self.device.on(self.device.side_stream("reduce")):
            for part in (1, 0, 2):  # not the order of sending: the first is released early
                for peer in peers:
                    tag = Tag(CHANNEL_GRAD, 1, epoch, part)
                    nbytes = [200 + 8 * peer, 0, 300 - 8 * self.rank][part]
                    self.read(
                        single.receive(self.transport, peer, tag, WHERE), pattern(peer, self.rank, epoch, part, nbytes=nbytes)
                    )
                    single.release(self.transport, peer, tag, more=part == 1)


def run_steps(world: FakeWorld) -> int:
    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> int:
        world.strict = True  # from here on no rank may wait for the device
        step = Step(transport)
        step.run()
        exchange("enqueued")
        if transport.rank == 0:
            world.run()
        exchange("has run")
        for number, (got, expected) in enumerate(step.seen):
            assert torch.equal(got, expected), (world.seed, number)
        return len(step.seen)

    return sum(run(world, body, inbox_bytes=1024, sizes=[row[: world.world_size] for row in SIZES]))


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 12))])
@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_in_random_orders(world_size: int, seed: int) -> None:
    assert run_steps(FakeWorld(world_size, seed=seed)) == EPOCHS * world_size * (world_size + 1 + 3 * (world_size - 1))


def test_ranks_on_one_gpu_have_no_arrival_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SymmetricTransport.__init__, "__kwdefaults__", {"probe": None, "kernels_may_wait": False})
    monkeypatch.setattr(Windows, "_signal", lambda self, number: pytest.fail("a word was written"))
    run_steps(FakeWorld(2, seed=4))


@pytest.mark.parametrize("stream", ["main", "gather", "scatter", "reduce"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_that_is_late(rank: int, stream: str) -> None:
    run_steps(FakeWorld(3, seed=5, slow=frozenset([(rank, stream)])))


def test_orders_differ_and_repeat() -> None:
    def trace(seed: int) -> list[str]:
        world = FakeWorld(2, seed=seed)

        def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
            for rank in range(2):  # one after the other, so that streams are made in one order
                if rank == transport.rank:
                    Step(transport).run()
                exchange("next")
            if transport.rank == 0:
                world.streams.sort(key=repr)
                world.run()
                world.trace.append("end")
            exchange("has run")

        run(world, body, sizes=[row[:2] for row in SIZES])
        return world.trace[: world.trace.index("end")]

    assert trace(3) == trace(3) != trace(4)


# ---- what a missing wait looks like ------------------------------------------------------------------------------------
def _publication(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "_publication", lambda self, owner, key, epoch: None)


def _complete_too_early(patch: pytest.MonkeyPatch) -> None:
    wait_finished = Windows.wait_finished

    def hasty(self: Windows, epoch: int, *rest: Any, **more: Any) -> None:
        wait_finished(self, epoch, *rest, **more)
        self.publish((), epoch + 1, last=True)

    patch.setattr(Windows, "wait_finished", hasty)


def _readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "wait_finished", lambda self, epoch, *rest, **more: setattr(self, "_free_to_write", epoch))


def _buffer(patch: pytest.MonkeyPatch) -> None:
    pull = Windows.pull

    def hasty(self: Windows, epoch: int, requests: Sequence[PullRequest]) -> list[Pull]:
        never = FakeEvent(self._core.device.world)  # type: ignore[attr-defined]
        never.passed = True
        return pull(self, epoch, [request._replace(after=never) for request in requests])

    patch.setattr(Windows, "pull", hasty)


def _transfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pull, "wait", lambda self, where: self._out)


def _word_too_early(patch: pytest.MonkeyPatch) -> None:
    pull = Windows.pull

    def hasty(self: Windows, epoch: int, requests: Sequence[PullRequest]) -> list[Pull]:
        pulls = pull(self, epoch, requests)
        for made in pulls:
            assert made.arrival is not None
            made.arrival = made.arrival._replace(value=made.arrival.value - 1)  # that of the slice's last pull
        return pulls

    patch.setattr(Windows, "pull", hasty)


def _words_held_back(patch: pytest.MonkeyPatch) -> None:
    """An arrival word that is written before its copy: words of a batch that overtake what comes before them."""
    patch.setattr(FakeBatch, "submit", lambda self: None)
    patch.setattr(FakeBatch, "wait", Batch.wait)
    patch.setattr(FakeBatch, "write", Batch.write)
    copy = Batch.copy
    late: list[Callable[[], None]] = []

    def hold(self: FakeBatch, *span: Any) -> None:
        late.append(lambda: copy(self, *span))
        if len(late) > 1:
            late.pop(0)()

    patch.setattr(FakeBatch, "copy", hold)


def _staging(patch: pytest.MonkeyPatch) -> None:
    reserve = StagingRing.reserve
    patch.setattr(StagingRing, "reserve", lambda self, *wanted: (reserve(self, *wanted)[0], None))


def _credit(patch: pytest.MonkeyPatch) -> None:
    class Generous(Outbox):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            self.credited = 1 << 40

    patch.setattr("commfuse_dp.transport.symmetric.messages.Outbox", Generous)


def _arrival(patch: pytest.MonkeyPatch) -> None:
    wait_for = Core.wait_for
    patch.setattr(
        Core, "wait_for", lambda self, stream, c, *more, **rest: wait_for(self, stream, () if c[0][4] else c, *more, **rest)
    )


def _credit_too_early(patch: pytest.MonkeyPatch) -> None:
    release = Messages.release

    def hasty(self: Messages, src: int, tag: Tag, *, more: bool = False) -> None:
        with self._core.device.on(self._scatter):
            release(self, src, tag, more=more)

    patch.setattr(Messages, "release", hasty)


@pytest.mark.parametrize(
    "without",
    [
        _publication,
        _complete_too_early,
        _readers,
        _buffer,
        _transfer,
        _word_too_early,
        _words_held_back,
        _staging,
        _credit,
        _arrival,
        _credit_too_early,
    ],
)
def test_without_a_wait_there_is_a_race(without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    with pytest.raises(Race, match="nothing orders"):
        run_steps(FakeWorld(2, seed=1))


def test_a_word_that_nobody_writes_is_named() -> None:
    world = FakeWorld(2, seed=1)

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        if transport.rank == 0:
            single.pull(transport, 1, 0, 1, out=torch.zeros(8, dtype=torch.uint8)).wait(WHERE)
            with pytest.raises(Stuck, match="rank 0 gather stands at wait for word 1 >= 1"):
                world.run()
        exchange("end")
        if transport.rank == 1:
            transport.publish((0,), 1)
            world.run()
        exchange("end")

    run(world, body, sizes=[[8, 8]])


def test_pull_before_publish_and_credit_in_streams() -> None:
    """The two of the suite that ask the host: here it is the streams that stand, exactly until their word is written."""
    world = FakeWorld(2, seed=3)

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        device = transport.device
        if transport.rank == 0:
            out = torch.zeros(64, dtype=torch.uint8)
            pulled = single.pull(transport, 1, 0, 1, out=out)
            for number in range(12):
                single.send(transport, 1, Tag(CHANNEL_GRAD, number), single.reserve(transport, 1, 64))
            sent = device.record(device.side_stream("scatter"))
            with pytest.raises(Stuck):
                world.run()
            assert not pulled.landed.done() and not sent.done()
            exchange("stands")
            exchange("goes on")
            world.run()
            assert pulled.landed.done() and sent.done() and out.tolist() == [7] * 64
        else:
            exchange("stands")
            segment = transport.segments[0]
            device.launch(lambda: segment.fill_(7), writes=[segment])  # type: ignore[attr-defined]
            transport.publish((0,), 1)
            for number in range(12):
                single.expect(transport, 0, Tag(CHANNEL_GRAD, number), 64)
                single.receive(transport, 0, Tag(CHANNEL_GRAD, number))
                single.release(transport, 0, Tag(CHANNEL_GRAD, number))
            exchange("goes on")
        exchange("end")

    run(world, body, sizes=[[64, 64]], inbox_bytes=256)


def test_channels_have_rings_of_their_own() -> None:
    """A message of one channel that is never read holds up no other channel."""

    def body(transport: SymmetricTransport, exchange: ExchangeFn) -> None:
        other = 1 - transport.rank
        for number in range(6):
            for channel in (CHANNEL_GRAD, CHANNEL_COLLECTIVE):
                if channel == CHANNEL_GRAD and number:
                    continue
                tag = Tag(channel, number)
                single.expect(transport, other, tag, 200)
                buffer = single.reserve(transport, other, 200)
                buffer.copy_(pattern(transport.rank, number, channel, nbytes=200))
                single.send(transport, other, tag, buffer)
                if channel == CHANNEL_COLLECTIVE:
                    assert torch.equal(single.receive(transport, other, tag), pattern(other, number, channel, nbytes=200))
                    single.release(transport, other, tag)
        got = single.receive(transport, other, Tag(CHANNEL_GRAD, 0))
        assert torch.equal(got, pattern(other, 0, CHANNEL_GRAD, nbytes=200))
        exchange("end")

    run(FakeWorld(2, deferred=False), body, inbox_bytes=256)
