"""The harness itself: results per rank, failures with their cause, no stale pool, no orphan."""

from __future__ import annotations

import os
import signal
import time

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


def test_close_ends_the_processes():
    pool = WorkerPool(1)
    ((_, _, pid),) = pool.run(total, 1.0)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
