"""What transport 'symmetric' does at once for several peers, over the simulated device: slices that come together, messages of
one tag to all, among messages of some pairs only. And the lanes behind it, against lanes that every peer has for itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commfuse_dp.engine.window import GROUP_BYTES, MOST_GROUPS, group
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Part, PullRequest, Sending, Tag
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.streams.staging import Lanes, StagingRing
from commfuse_dp.transport.symmetric import transport as symmetric
from commfuse_dp.transport.symmetric.ring import Outbox
from commfuse_dp.transport.symmetric.transport import SymmetricTransport
from tests.support import single
from tests.support.fake_device import FakeWorld
from tests.support.fake_symmetric import open_fake
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import pattern

RANKS, EPOCHS, ROUNDS = 3, 3, 8
SIZES = [72, 0, 200]  # bytes that each rank publishes
WHERE = Where("a layer", 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "CLOSE_S", 0.1)  # what a close enqueues is not run any more


# ---- over the simulated device -----------------------------------------------------------------------------------------
class Program:
    """One rank's steps. What happens in a round is the same on all ranks: drawn from the world's seed."""

    def __init__(self, transport: SymmetricTransport, seed: int) -> None:
        self.transport, self.device = transport, transport.device
        self.rank = transport.rank
        self.peers = [(self.rank + step) % RANKS for step in range(1, RANKS)]
        self.choose = random.Random(seed)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was read, what it must be
        first, *others = self.peers
        at, parts = align(SIZES[first]), []
        for owner in others:
            parts.append(Part(owner, 0, 0, SIZES[owner], at))
            at += align(SIZES[owner])
        self.first, self.others = first, tuple(parts)
        self.buffers = [(torch.zeros(parts[-1].at + parts[-1].nbytes, dtype=torch.uint8), None) for _ in range(2)]

    def launch(self, function: Any, **memory: Any) -> None:
        self.device.launch(function, **memory)  # type: ignore[attr-defined]

    def read(self, source: torch.Tensor, expected: torch.Tensor) -> None:
        target = torch.zeros_like(source)
        self.seen.append((target, expected))
        self.launch(lambda: target.copy_(source), reads=[source], writes=[target])

    def run(self) -> None:
        for epoch in range(1, EPOCHS + 1):
            self.transport.wait_finished(epoch - 1, WHERE)
            segment, data = self.transport.segments[0], pattern(self.rank, epoch, nbytes=SIZES[self.rank])
            self.launch(lambda s=segment, d=data: s.copy_(d), writes=[segment])
            self.transport.publish((0,), epoch, last=epoch > 1)
            for _ in range(3):
                self.pull(epoch)
            self.messages(epoch)
            self.transport.finish(epoch)

    def pull(self, epoch: int) -> None:
        out, free = self.buffers.pop(0)
        request = PullRequest(self.first, 0, 0, SIZES[self.first], out, free, (0, 0), self.others)
        self.transport.pull(epoch, [request])[0].wait(WHERE)
        self.read(out[: SIZES[self.first]], pattern(self.first, epoch, nbytes=SIZES[self.first]))
        for owner, _, _, nbytes, at in self.others:
            self.read(out[at : at + nbytes], pattern(owner, epoch, nbytes=nbytes))
        self.buffers.append((out, self.device.record(self.device.current_stream())))  # type: ignore[arg-type]

    def messages(self, epoch: int) -> None:
        rounds = [self.choose.choice(("all", "all", "some")) for _ in range(ROUNDS)]
        owed = {part: [self.choose.randrange(0, 150) for _ in range(RANKS)] for part in range(ROUNDS)}  # by destination
        for part, kind in enumerate(rounds):
            tag, sizes = Tag(CHANNEL_GRAD, 0, epoch, part), owed[part]
            if kind == "all":
                self.transport.expect(self.peers, tag, sizes[self.rank], max(sizes))
                buffers = self.transport.reserve(self.peers, [sizes[peer] for peer in self.peers], max(sizes))
                for peer, buffer in zip(self.peers, buffers, strict=True):
                    data = pattern(self.rank, peer, epoch, part, nbytes=sizes[peer])
                    self.launch(lambda b=buffer, d=data: b.copy_(d), writes=[buffer])
                pairs = zip(self.peers, buffers, strict=True)
                self.transport.send([Sending(peer, tag, buffer, (), max(sizes)) for peer, buffer in pairs])
                came = self.peers
            else:
                to, source = (self.rank + 1) % RANKS, (self.rank - 1) % RANKS
                single.expect(self.transport, source, tag, sizes[self.rank])
                buffer = single.reserve(self.transport, to, sizes[to])
                data = pattern(self.rank, to, epoch, part, nbytes=sizes[to])
                self.launch(lambda b=buffer, d=data: b.copy_(d), writes=[buffer])
                single.send(self.transport, to, tag, buffer)
                came = [source]
            with self.device.on(self.device.side_stream("reduce")):
                for peer, buffer in zip(came, self.transport.receive(came, tag, WHERE), strict=True):
                    self.read(buffer, pattern(peer, self.rank, epoch, part, nbytes=sizes[self.rank]))
                self.transport.release(came, tag, more=bool(part % 2))
        self.transport.progress()


def run_programs(seed: int) -> SymmetricTransport:
    world = FakeWorld(RANKS, seed=seed)

    def body(rank: int, exchange: ExchangeFn) -> SymmetricTransport:
        transport = open_fake(world, rank, exchange, inbox_bytes=512, deadline_s=20.0)
        transport.expose([SIZES])
        world.strict = True
        program = Program(transport, seed)
        program.run()
        exchange("enqueued")
        if rank == 0:
            world.run()
        exchange("has run")
        for number, (got, expected) in enumerate(program.seen):
            assert torch.equal(got, expected), (seed, number)
        transport.close()
        return transport

    return run_ranks(RANKS, body, timeout_s=60)[0]


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_and_leaves_together_is_right(seed: int) -> None:
    run_programs(seed)


def test_bytes_that_lie_elsewhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that sets aside less than its senders."""
    expect = SymmetricTransport.expect
    monkeypatch.setattr(SymmetricTransport, "expect", lambda self, srcs, tag, nbytes, room=0: expect(self, srcs, tag, nbytes))
    with pytest.raises(Exception):  # noqa: B017  (a stream that stands for ever, or other bytes)
        run_programs(0)


# ---- lanes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_lanes_that_are_shared_answer_as_lanes_of_their_own(seed: int) -> None:
    choose = random.Random(seed)
    names = list(range(choose.randrange(1, 7)))
    shared, apart = Lanes(names, lambda: Outbox(512)), {name: Outbox(512) for name in names}
    histories: dict[int, list[Any]] = {name: [] for name in names}
    for part in range(60):
        some = names if choose.random() < 0.7 else choose.sample(names, choose.randrange(1, len(names) + 1))
        tag, nbytes = Tag(CHANNEL_GRAD, 0, 0, part), choose.randrange(0, 200)
        got = {}
        lanes = [(shared.alone(some[0]), some[:1])] if len(some) == 1 else shared[tuple(some)]
        for lane, members in lanes:
            got.update(dict.fromkeys(members, lane.next(tag, nbytes)))
        assert set(got) == set(some)
        for name in some:
            histories[name].append((part, nbytes))
            assert got[name] == apart[name].next(tag, nbytes), (name, part)
    for one in names:
        assert shared.of[one].users == sum(shared.of[other] is shared.of[one] for other in names)
        for other in names:
            assert shared.of[one] is not shared.of[other] or histories[one] == histories[other]


def test_a_lane_that_goes_on_alone_takes_what_is_reserved_along() -> None:
    lanes = Lanes([1, 2], lambda: StagingRing(256))
    reservation, _ = lanes.of[1].reserve(64)
    alone = lanes.alone(1)
    found = alone.find(reservation.offset, 64)
    assert found is not None and found is not reservation and lanes.of[2].find(reservation.offset, 64) is reservation


# ---- groups ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
def test_groups_hold_every_slice_once_and_leave_room_in_the_window(seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.choice((0, 64, 1 << 20, 8 << 20)) for _ in range(choose.randrange(0, 70))]
    budget = choose.choice((64, 1 << 20, 1 << 26, 1 << 31))
    counts = group(sizes, budget)
    assert sum(counts) == len(sizes) and all(counts)
    at = 0
    for count in counts:
        assert count == 1 or sum(sizes[at : at + count]) <= budget // 3
        at += count


def test_small_slices_are_one_group_and_large_ones_a_few() -> None:
    assert group([64] * 63, 1 << 20) == [63]
    assert len(group([GROUP_BYTES] * 63, 1 << 40)) in (MOST_GROUPS, MOST_GROUPS + 1)
    assert group([GROUP_BYTES] * 3, GROUP_BYTES) == [1, 1, 1]
