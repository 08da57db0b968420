"""The window alone, over a transport that brings bytes at the last moment: never wrong, whatever the order of use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_dp.engine.memory.arena import Arena
from commfuse_dp.engine.window import Key, Located, Window
from commfuse_dp.errors import Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import PullRequest, Transfer

SIZES = [64, 64, 192, 128, 320, 64]  # bytes of the slice of each unit
NOWHERE = Where()


def value(key: Key, epoch: int) -> int:
    return (key[0] * 7 + key[2] * 3 + epoch * 31) % 251 + 1


class LateTransfer(Transfer):
    """Bytes come when they are waited for: until then the buffer must be nobody else's."""

    def __init__(self, key: Key, epoch: int, out: torch.Tensor) -> None:
        self.key, self.epoch, self.out = key, epoch, out
        self.out.fill_(0)
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if not self.waited:
            assert not self.out.any(), "somebody wrote into the buffer of a transfer under way"
            self.out.fill_(value(self.key, self.epoch))
            self.waited = True
        return self.out


class FakeTransport:
    """Only what the window uses."""

    def __init__(self) -> None:
        self.pulls: list[tuple[Key, int]] = []
        self.under_way: weakref.WeakSet[LateTransfer] = weakref.WeakSet()

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> list[Transfer]:
        return [self._pull(epoch, request) for request in requests]

    def _pull(self, epoch: int, request: PullRequest) -> Transfer:
        owner, key, start, nbytes, out, _, _, _ = request
        assert out is not None and out.numel() == nbytes == SIZES[key] and start == key * 1000
        self.pulls.append(((key, owner, 0), epoch))
        transfer = LateTransfer((key, owner, 0), epoch, out)
        self.under_way.add(transfer)
        return transfer


class Rig:
    def __init__(self, budget: int) -> None:
        self.transport = FakeTransport()
        self.probe = Probe()
        self.pool = Arena(budget)
        self.window = Window(
            self.transport, self.pool, budget, self.probe, lambda key: Located(key[0] * 1000, SIZES[key[0]], SIZES[key[0]])
        )
        self.epoch = 0
        self.record: list[Key] = []

    def step(self, uses: list[tuple[int, bool]], *, announce: bool = True, whole: bool = False) -> list[Key]:
        """One step that uses the units in this order; (unit, pin). Every second use of a pinned unit unpins it. whole: a unit's
        slices are taken together where they fit."""
        self.epoch += 1
        self.transport.pulls.clear()
        self.window.start(self.epoch, self.record)
        for unit, pin in uses:
            key = (unit, 1, 0)
            if announce:
                self.window.announce([key])
            held = self.window.take_all([key]) if whole else None
            data = (held[0].transfer if held is not None else self.window.take(key)).wait()
            assert held is None or held[0].buffer is data
            del held
            assert data.numel() == SIZES[unit] and (data == value(key, self.epoch)).all()
            self.window.done(key, pin=pin)
            if not pin:
                self.window.unpin(unit)
        self.record = list(self.window.stop(NOWHERE))
        assert self.record == [(unit, 1, 0) for unit, _ in uses]
        assert self.window.used == self.probe.counters.window_bytes == 0
        return [key for key, _ in self.transport.pulls]


uses = st.lists(st.tuples(st.integers(0, len(SIZES) - 1), st.booleans()), max_size=14)


@settings(max_examples=200)
@given(st.lists(uses, min_size=1, max_size=4), st.integers(320, 1200), st.booleans(), st.booleans())
def test_any_order_after_any_recording_brings_the_right_bytes_once(steps, budget, announce, whole):
    rig = Rig(budget)
    for step in steps:
        rig.step(step, announce=announce, whole=whole)
    misses = rig.probe.counters.order_misses
    pulls = rig.step(steps[-1], announce=announce, whole=whole)
    assert rig.probe.counters.order_misses == misses  # as recorded
    assert len(pulls) <= len(steps[-1])  # at most one transfer for a use
    assert not rig.transport.under_way, "what is over is still held, and its memory with it"


def test_a_skipped_slice_is_waited_for_before_its_buffer_is_free(monkeypatch):
    rig, transfers = Rig(1200), []
    pull = FakeTransport._pull

    def noted(self: FakeTransport, *arguments: Any, **more: Any) -> Transfer:
        transfers.append(pull(self, *arguments, **more))
        return transfers[-1]

    def give(self: Arena, buffer: torch.Tensor, mark: object = None) -> None:
        assert [transfer.waited for transfer in transfers if transfer.out is buffer][-1:] == [True]

    monkeypatch.setattr(FakeTransport, "_pull", noted)
    monkeypatch.setattr(Arena, "give", give)
    rig.step(order(0, 1, 2, 3))
    rig.step(order(0, 3))
    assert rig.probe.counters.order_misses == 1


def order(*units: int) -> list[tuple[int, bool]]:
    return [(unit, False) for unit in units]


def test_memory_stays_within_the_budget():
    for budget in (320, 400, 640):
        rig = Rig(budget)
        for _ in range(3):
            rig.step(order(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0))
        assert rig.pool.held == rig.probe.counters.window_bytes_peak <= budget


def test_pulls_run_ahead_in_the_recorded_order():
    rig = Rig(64 + 64 + 192)
    assert rig.step(order(0, 1, 2, 3)) == [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0)]
    rig.epoch += 1
    rig.transport.pulls.clear()
    rig.window.start(rig.epoch, rig.record)
    assert [key[0] for key, _ in rig.transport.pulls] == [0, 1, 2]  # before anything was asked for: what fits
    rig.window.take((0, 1, 0))
    assert [key[0] for key, _ in rig.transport.pulls] == [0, 1, 2]
    rig.window.done((0, 1, 0))
    rig.window.take((1, 1, 0))
    rig.window.done((1, 1, 0))
    assert [key[0] for key, _ in rig.transport.pulls] == [0, 1, 2, 3]  # room came back
    rig.window.stop(NOWHERE)


def test_what_the_turn_needs_again_is_fetched_once():
    rig = Rig(10_000)
    turn = order(0, 1, 2, 3, 3, 2, 1, 0)
    rig.step(turn)
    assert len(rig.step(turn)) == 4
    rig = Rig(SIZES[3] + SIZES[2])
    rig.step(turn)
    assert [key[0] for key in rig.step(turn)] == [0, 1, 2, 3, 1, 0]  # the layers at the turn were kept, the first ones not


def test_a_pinned_slice_is_kept_although_the_window_is_full():
    rig = Rig(320)
    steps = [(0, True), (4, False), (1, False), (4, False), (0, False)]
    rig.step(steps)
    for _ in range(2):
        assert [key[0] for key in rig.step(steps)].count(0) == 1


def test_another_order_counts_as_a_miss_and_the_new_one_is_recorded():
    rig = Rig(600)
    rig.step(order(0, 1, 2, 3))
    rig.step(order(0, 1, 2, 3))
    assert rig.probe.counters.order_misses == 0
    rig.step(order(3, 2, 1, 0))
    misses = rig.probe.counters.order_misses
    assert misses > 0
    rig.step(order(3, 2, 1, 0))
    assert rig.probe.counters.order_misses == misses


def test_buffers_are_used_again():
    rig = Rig(1000)
    for _ in range(3):
        rig.step(order(0, 1, 2, 1, 0))
    assert rig.pool.allocations == 1


def test_what_was_fetched_for_uses_that_did_not_come_is_given_up():
    rig = Rig(sum(SIZES))
    rig.step(order(0, 1, 2, 3, 4, 5))
    rig.epoch += 1
    rig.window.start(rig.epoch, rig.record)
    assert rig.window.used == sum(SIZES)
    rig.window.take((4, 1, 0))
    assert rig.window.used == SIZES[4] + SIZES[5]
    rig.window.done((4, 1, 0))
    assert rig.window.used == SIZES[5]
    rig.window.stop(NOWHERE)


def test_an_exception_before_the_pull_leaves_nothing():
    """Two slices are planned for one pull, and there is no memory for the second."""
    rig = Rig(1200)
    take, taken = rig.pool.take_later, []

    def once(nbytes: int) -> Any:
        taken.append(nbytes)
        if len(taken) == 2:
            raise MemoryError
        return take(nbytes)

    rig.pool.take_later = once  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        rig.window.start(1, [(0, 1, 0), (1, 1, 0)])
    assert not rig.transport.pulls and rig.window.used == SIZES[0]
    rig.window.stop(NOWHERE)
    assert rig.window.used == 0
    rig.epoch = 1
    rig.step([(0, False), (1, False)])
