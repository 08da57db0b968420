"""A rank that dies, leaves, hangs or is slow, with real processes: who is named, how soon, and what stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from commfuse_dp.integrations.fsdp2 import engine_of

import commfuse_dp
from commfuse_dp import BrokenStepError, CommFuseError, DeadlineError, PeerLostError
from tests.parity.fsdp2 import pair
from tests.support.cells import slow
from tests.support.leftovers import assert_nothing_left, leftovers, shared_memory
from tests.support.workers import WorkerError, WorkerPool

VICTIM = 1
DEADLINE_S = 60.0  # of a wait: what is found sooner was found because the peer is gone, not because time was up


@pytest.fixture(scope="module")
def trio():
    """Its own pool: these tests destroy it."""
    pool = WorkerPool(3)
    yield pool
    pool.close()


class Survived(Exception):
    """Brings a survivor's findings home from a call that fails as a whole."""


def _at(net: pair.Net, phase: str, action: Callable[[], None]) -> None:
    """Have `action` done in the middle of the next forward or backward."""
    middle = net.blocks[1]
    done = threading.Event()

    def once(*_: object) -> None:
        if not done.is_set():
            done.set()
            action()

    if phase == "forward":
        middle.register_forward_pre_hook(once)
    elif phase == "backward":
        middle.register_full_backward_hook(once)


def die_in(rank: int, world_size: int, transport: str, phase: str, how: str) -> None:
    net = pair.build()
    commfuse_dp.apply(net, pair.config(transport=transport, deadline_s=DEADLINE_S))
    for step in range(2):
        pair.loss_of(net, pair.batch(rank, world_size, step)).backward()

    def end() -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the victim's own mistake")

    if rank == VICTIM:
        _at(net, phase, end)
        try:
            if phase == "between":
                end()
            pair.loss_of(net, pair.batch(rank, world_size, 2)).backward()
        except ValueError:
            commfuse_dp.remove(net)
            raise
    start = time.monotonic()
    with pytest.raises(PeerLostError) as error:
        for step in range(2, 6):  # a survivor may get to the end of the step that the victim died in
            try:
                pair.loss_of(net, pair.batch(rank, world_size, step)).backward()
            except BrokenStepError as broken:  # the victim first breaks its step off, then leaves: seen between the two
                assert how == "raise" and broken.peer == VICTIM
                net.zero_grad()
    elapsed = time.monotonic() - start
    again = time.monotonic()
    with pytest.raises(CommFuseError):  # and it stays so: no later step hangs
        for _ in range(3):
            pair.loss_of(net, pair.batch(rank, world_size, 5)).backward()
    found = {"peer": error.value.peer, "text": str(error.value), "s": elapsed, "again_s": time.monotonic() - again}
    del error  # its traceback refers to the engine
    commfuse_dp.remove(net)
    net.zero_grad()
    # Autograd still has nodes that were ready when a backward raised, and through them the engine.
    left = shared_memory()
    raise Survived(json.dumps({**found, "left": left}))


def die_early(rank: int, world_size: int, transport: str, when: str) -> None:
    """Before `apply`, or in the very first step."""
    net = pair.build()
    start = time.monotonic()
    with pytest.raises(PeerLostError) as error:
        if rank == VICTIM and when == "attaching":
            os.kill(os.getpid(), signal.SIGKILL)
        commfuse_dp.apply(net, pair.config(transport=transport, deadline_s=DEADLINE_S))
        if rank == VICTIM:
            _at(net, when, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for step in range(3):
            pair.loss_of(net, pair.batch(rank, world_size, step)).backward()
    raise Survived(json.dumps({"peer": error.value.peer, "text": str(error.value), "s": time.monotonic() - start}))


@pytest.mark.parametrize(("transport", "when"), [("shm", "attaching"), ("tcp", "forward")])
def test_a_rank_lost_while_attaching_or_in_the_first_step_is_named(trio, transport, when):
    with pytest.raises(WorkerError) as failed:
        trio.run(die_early, transport, when, timeout=60)
    errors = failed.value.errors
    assert set(errors) == {0, 2}, str(failed.value)
    for rank, (kind, text) in errors.items():
        assert kind == "Survived", (rank, kind, text)
        found = json.loads(text)
        assert found["peer"] == VICTIM and f"lost rank {VICTIM}" in found["text"], found
        assert found["s"] < DEADLINE_S, found


CASES = [
    pytest.param("shm", "forward", "kill", marks=pytest.mark.slow),
    ("tcp", "backward", "kill"),
    ("shm", "between", "kill"),
    ("tcp", "forward", "raise"),
    pytest.param("shm", "backward", "raise", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("transport", "phase", "how"), CASES)
def test_every_survivor_names_the_lost_rank_soon(trio, transport, phase, how):
    with pytest.raises(WorkerError) as failed:
        trio.run(die_in, transport, phase, how, timeout=150)
    errors = failed.value.errors
    if how == "raise":
        assert errors.pop(VICTIM) == ("ValueError", "the victim's own mistake")
    assert set(errors) == {0, 2}, str(failed.value)
    for rank, (kind, text) in errors.items():
        assert kind == "Survived", (rank, kind, text)
        found = json.loads(text)
        assert found["peer"] == VICTIM, found
        assert f"rank {VICTIM}" in found["text"] and f"rank {rank}" in found["text"]
        assert found["s"] < DEADLINE_S and found["again_s"] < DEADLINE_S, found
        assert not found["left"], "a survivor keeps shared memory mapped, its own or the dead rank's"


STUCK_S = 3.0


# ---- stuck -------------------------------------------------------------------------------------------------------------
def stuck(rank: int, world_size: int, transport: str, phase: str) -> dict[str, object]:
    net = pair.build()
    before = leftovers()
    commfuse_dp.apply(net, pair.config(transport=transport, deadline_s=STUCK_S))
    for step in range(2):
        pair.loss_of(net, pair.batch(rank, world_size, step)).backward()
    if rank == VICTIM:
        _at(net, phase, torch.distributed.barrier)  # until rank 0 has given up
        with pytest.raises(CommFuseError):
            for step in range(2, 5):
                pair.loss_of(net, pair.batch(rank, world_size, step)).backward()
        found: dict[str, object] = {}
    else:
        with pytest.raises(DeadlineError) as error:
            for step in range(2, 5):
                pair.loss_of(net, pair.batch(rank, world_size, step)).backward()
        found = {"peer": error.value.peer, "text": str(error.value), "where": tuple(error.value.where or ())}
        del error
        torch.distributed.barrier()
    commfuse_dp.remove(net)
    net.zero_grad()
    assert_nothing_left(before)
    return found


@pytest.mark.parametrize(("transport", "phase"), [("tcp", "forward"), slow("shm", "backward")])
def test_a_stuck_rank_is_named_with_layer_step_slice_and_bytes(workers, transport, phase):
    workers(2).run(_warm, transport)
    other = workers(2).run(stuck, transport, phase, timeout=40)[0]
    assert other["peer"] == VICTIM
    text = str(other["text"])
    assert f"rank 0 waited {STUCK_S:g} s for rank 1" in text
    match = re.search(r"layer '([^']+)', step (\d+), slice ([^,]+(?: \(rows [^)]*\))?), (\d+) bytes", text)
    assert match, text
    layer, step, _, nbytes = match.groups()
    assert layer.startswith(("blocks.", "head", "embedding", "(")) and int(step) in (3, 4) and "deadline_s" in text
    if not layer.startswith("("):
        assert int(nbytes) > 0


def _warm(rank: int, world_size: int, transport: str) -> None:
    with pair.applied(pair.build(), transport=transport):
        pass


# ---- slow --------------------------------------------------------------------------------------------------------------
DELAY_S = 1.0


def slow(rank: int, world_size: int, transport: str, when: str) -> tuple[float, float]:
    """One rank takes its time before it publishes: exposed nanoseconds of this rank in a quick and in a slow step."""
    stock, net = pair.build(), pair.build()
    with pair.applied(net, transport=transport) as report:
        engine = engine_of(net)
        assert engine is not None
        for step in range(2):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
        exposed = []
        for step, delay in ((2, 0.0), (3, DELAY_S)):
            stock.zero_grad()
            net.zero_grad()
            data = pair.batch(rank, world_size, step)
            pair.loss_of(stock, data).backward()
            torch.distributed.barrier()
            before = report.probe.counters.snapshot()
            if rank == VICTIM and when == "forward":
                time.sleep(delay)
            loss = pair.loss_of(net, data)
            if rank == VICTIM and when == "backward":
                time.sleep(delay)
            loss.backward()
            exposed.append(report.probe.counters.since(before).exposed_ns / 1e9)
            pair.assert_same_gradients(net, stock)
        torch.distributed.barrier()
    return exposed[0], exposed[1]


@pytest.mark.parametrize(("transport", "when"), [pytest.param("tcp", "forward", marks=pytest.mark.slow), ("shm", "backward")])
def test_a_slow_rank_changes_no_result_and_shows_as_exposed_time_of_the_others(workers, transport, when):
    results = workers(2).run(slow, transport, when, timeout=60)
    _, late = results[0]
    assert late >= 0.5 * DELAY_S  # how much exactly: test_exposed_device.py, over a clock of its own
