"""The harness itself: results per rank, failures with their cause, no stale pool, no orphan."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.workers import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


def total(rank: int, world_size: int, factor: float) -> tuple[int, float, int]:
    tensor = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(tensor)
    return rank, tensor.item(), os.getpid()


def fail_on(rank: int, world_size: int, bad: int, how: str) -> None:
    if rank == bad:
        print("last words of the bad rank", flush=True)
        if how == "raise":
            raise ValueError("no such value")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def test_results_come_in_rank_order_from_the_same_processes(pool):
    first, second = pool.run(total, 2.0), pool.run(total, 3.0)
    assert [(rank, value) for rank, value, _ in first] == [(0, 6.0), (1, 6.0)]
    assert [value for _, value, _ in second] == [9.0, 9.0]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: no such value"),
        ("die", "exit code -9"),
        pytest.param("hang", "in fail_on", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_is_named_with_its_output_and_the_pool_is_rebuilt(pool, how, cause):
    pids = {pid for *_, pid in pool.run(total, 1.0)}
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on, 1, how, timeout=4.0 if how == "hang" else 30.0)
    assert "rank 1" in str(caught.value)
    assert cause in str(caught.value)
    assert "last words of the bad rank" in str(caught.value)
    assert caught.value.errors == ({1: ("ValueError", "no such value")} if how == "raise" else {})
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pids.isdisjoint(pid for *_, pid in pool.run(total, 1.0))


def deep(frames: int, then: Callable[[], object]) -> None:
    deep(frames - 1, then) if frames else then()


def fault_beside(rank: int, world_size: int, threads: int) -> None:
    """Dies with more text than an error keeps of other output: many threads, each deep in calls."""
    print("x" * 5000, flush=True)
    started, for_ever = threading.Barrier(threads + 1), threading.Event()
    for _ in range(threads):
        threading.Thread(target=deep, args=(60, lambda: (started.wait(), for_ever.wait())), daemon=True).start()
    started.wait()
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("threads", [2, 8])
def test_a_rank_that_dies_of_a_fault_is_shown_with_all_its_threads(threads):
    pool = WorkerPool(1)
    with pytest.raises(WorkerError, match="exit code -11") as caught:
        pool.run(fault_beside, threads)
    lines = str(caught.value).splitlines()
    first = next(index for index, line in enumerate(lines) if line.endswith("Fatal Python error: Segmentation fault"))
    stacks = lines[first:]
    assert any(line.startswith("Thread 0x") for line in stacks[:4]), stacks[:4]  # the first thread's first line
    assert any(line.startswith("Current thread 0x") for line in stacks)
    assert any("in fault_beside" in line for line in stacks)
    if threads == 2:
        assert sum(line.startswith("Thread 0x") for line in stacks) >= threads
        assert sum(" in deep" in line for line in stacks) >= threads * 60
    else:
        assert len(stacks) == 201
        assert any(line.startswith("... (") for line in stacks)


def test_close_ends_the_processes():
    pool = WorkerPool(1)
    ((_, _, pid),) = pool.run(total, 1.0)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
