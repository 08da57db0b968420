"""Requests of transport mpi, against an MPI that fails on request."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from commfuse_dp.transport.two_sided import mpi_progress
from commfuse_dp.transport.two_sided.mpi_progress import (
    BESIDE_SLEEP,
    LENGTH_BYTES,
    WAIT_SLEEP,
    Control,
    Owner,
    Payload,
    Requests,
)


class MpiError(Exception):
    """mpi4py.MPI.Exception"""


class FakeRequest:
    """Answers of Test(): "open", "done" or "error"; "null" once Testsome has ended it."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeRequest) and self.answer == other.answer == "null"

    __hash__ = None  # type: ignore[assignment]

    def Test(self) -> bool:
        if self.answer == "error":
            raise MpiError("process failed")
        return self.answer == "done"


def payload(peer: int, *, sending: bool) -> Payload:
    return Payload(peer, 0, 1, memoryview(b"1234"), b"", sending=sending)


def control(peer: int, length: int) -> Control:
    made = Control(peer)
    made.buffer[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "little")
    return made


def requests_of(testsome: Any) -> tuple[Requests, list[tuple[Owner, str]]]:
    broken: list[tuple[Owner, str]] = []
    mpi = SimpleNamespace(Request=SimpleNamespace(Testsome=testsome), Exception=MpiError, REQUEST_NULL=FakeRequest("null"))
    return Requests(mpi, lambda owner, error: broken.append((owner, str(error)))), broken


def test_errors_are_sorted_out() -> None:
    def fail(requests: list[Any]) -> list[int]:
        raise MpiError("error in status")

    requests, broken = requests_of(fail)
    cases: list[tuple[str, Owner, str]] = [  # answer, owner, what must become of it
        ("open", control(0, 0), "kept"),
        ("done", control(1, 44), "completed"),
        ("done", control(2, 0), "broken"),  # ended, but nothing has come
        ("null", payload(3, sending=True), "broken"),
        ("error", payload(4, sending=False), "broken"),
        ("done", payload(5, sending=True), "completed"),
        ("open", payload(6, sending=True), "kept"),
        ("error", control(7, 0), "broken"),
    ]
    for answer, owner, _ in cases:
        requests.add(FakeRequest(answer), owner)
    assert requests.sends == 3
    completed, again = requests.test(first=True)
    assert again and {owner.peer for owner in completed} == {1, 5}
    assert {(owner.peer, text) for owner, text in broken} == {
        (2, "process failed"),  # the last error seen before it: Testsome's own does not say more
        (3, "process failed"),
        (4, "process failed"),
        (7, "process failed"),
    }
    # What is kept and the control that has to be started again stay, each with its own request.
    assert {owner.peer: request.answer for request, owner in requests.open()} == {0: "open", 1: "done", 6: "open"}
    assert requests.sends == 1


def test_completed_ones_are_forgotten_controls_stay() -> None:
    answers = iter([[3, 0, 1], []])
    requests, _ = requests_of(lambda requests: next(answers))
    owners: list[Owner] = [payload(0, sending=True), control(1, 9), payload(2, sending=False), payload(3, sending=True)]
    for owner in owners:
        requests.add(FakeRequest("open"), owner)
    completed, again = requests.test(first=True)
    assert [owner.peer for owner in completed] == [3, 0, 1] and again
    assert {owner.peer for _, owner in requests.open()} == {1, 2} and requests.sends == 0
    assert requests.test(first=False)[0] == []


@pytest.mark.parametrize("bounds", [WAIT_SLEEP, BESIDE_SLEEP])
def test_sleeps_grow_with_silence_and_are_bounded(bounds: tuple[float, float]) -> None:
    requests, _ = requests_of(lambda requests: [])
    requests.moved()
    now = time.monotonic()
    pauses = [requests.pause(now + silence, bounds) for silence in (0.0, 0.002, 0.004, 10.0)]
    assert pauses == sorted(pauses) and pauses[0] < bounds[0] * 2 + 1e-4 and pauses[-1] == bounds[1]
    assert 0.004 / 8 <= pauses[2] <= 0.006 / 8 + 1e-4


class Clock:
    """Time as the module sees it: it passes where a test says so, and a little with each look."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def perf_counter_ns(self) -> int:
        return int(self.monotonic() * 1e9)


def test_long_tests_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that takes much longer than idle ones has moved bytes: it is repeated, and a second one keeps the pauses short."""
    clock = Clock()
    monkeypatch.setattr(mpi_progress, "time", clock)
    lengths = iter([0.0] * 200 + [0.003, 0.003, 0.0])

    def testsome(requests: list[Any]) -> list[int]:
        clock.now += next(lengths)
        return []

    requests, _ = requests_of(testsome)
    requests.add(FakeRequest("open"), control(0, 0))
    again = [requests.test(first=number % 2 == 0)[1] for number in range(200)]
    assert sum(again) < 100, "most idle tests are not repeated"
    clock.now += 0.02
    before = requests.pause(clock.now, (0.0, 1.0))
    assert requests.test(first=True)[1]
    assert requests.pause(clock.now, (0.0, 1.0)) > before
    assert requests.test(first=False)[1]
    assert requests.pause(clock.now, (0.0, 1.0)) < before / 2
