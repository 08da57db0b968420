"""The hooks of DDP and FSDP1 attach on all ranks or on none, and go with their model."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from commfuse_dp.integrations import comm_hooks, register_ddp, register_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from commfuse_dp.errors import CommFuseError
from tests.parity.ddp.nets import build, config, train, worst, wrap

REGISTER = {"ddp": register_ddp, "fsdp1": register_fsdp1}


def wrapped(kind: str) -> nn.Module:
    return wrap(build()) if kind == "ddp" else FullyShardedDataParallel(build(), device_id=torch.device("cpu"))


def fails(*args: Any, **kwargs: Any) -> None:
    raise OSError("injected")


def body_broken_registration(rank: int, world_size: int, kind: str, broken: tuple[int, ...]) -> None:
    running = set(threading.enumerate())
    wanted = train(wrapped(kind))
    model = wrapped(kind)
    if rank in broken:
        vars(model)["register_comm_hook"] = fails
    with pytest.raises((OSError, CommFuseError), match="injected") as caught:
        REGISTER[kind](model, config())
    assert rank in broken or "rank 1 could not attach" in str(caught.value)
    del caught
    assert not started_since(running)
    found = train(model)
    assert worst(found[0], wanted[0]) == 0.0 and worst(found[1], wanted[1]) == 0.0
    if kind == "fsdp1":  # which forgets a hook; DDP keeps the one it has
        vars(model).pop("register_comm_hook", None)
        again = wrapped(kind)
        register_fsdp1(again, config())


def body_broken_opening(rank: int, world_size: int, kind: str, broken: tuple[int, ...]) -> None:
    model, running = wrapped(kind), set(threading.enumerate())
    opened = comm_hooks.open_transport

    def open_and_fail(*args: Any, **kwargs: Any) -> Any:
        found = opened(*args, **kwargs)
        if rank in broken:
            found[0].close()
            fails()
        return found

    comm_hooks.open_transport = open_and_fail
    try:
        with pytest.raises((OSError, CommFuseError), match="injected"):
            REGISTER[kind](model, config())
    finally:
        comm_hooks.open_transport = opened
    assert not started_since(running)
    REGISTER[kind](model, config())  # nothing is in the way of a second try
    train(model)


def started_since(running: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of CommFuse that are not among those: models of other tests in this process may have theirs."""
    return [thread for thread in threading.enumerate() if thread not in running and thread.name.startswith("commfuse")]


def held(running: set[threading.Thread]) -> tuple[int, int]:
    gc.collect()
    for thread in started_since(running):  # it is not waited for where its own job held the last reference to the state
        thread.join(60)
    return len(os.listdir("/proc/self/fd")), len(started_since(running))


def body_rounds(rank: int, world_size: int, kind: str) -> list[tuple[int, int]]:
    counts, running = [], set(threading.enumerate())
    for _ in range(4):
        model = wrapped(kind)
        REGISTER[kind](model, config())
        train(model)
        del model
        counts.append(held(running))
    return counts


@pytest.mark.parametrize("broken", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_a_registration_that_fails_leaves_a_stock_model(workers, kind, broken):
    workers(2).run(body_broken_registration, kind, broken)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_an_opening_that_fails_leaves_nothing(workers, kind):
    workers(2).run(body_broken_opening, kind, (1,))


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_a_dropped_model_takes_its_hook_along(workers, kind):
    for counts in workers(2).run(body_rounds, kind):
        assert counts[-1][0] <= counts[0][0] and {threads for _, threads in counts} == {0}, counts
