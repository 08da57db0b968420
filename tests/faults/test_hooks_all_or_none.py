"""The hooks of DDP and FSDP1 attach on all ranks or on none, and go with their model."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations import comm_hooks, register_ddp, register_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from commfuse_dp.errors import CommFuseError
from tests.parity.ddp.nets import build, config, train, worst, wrap
from tests.support.raising import Boom, blow_in_backward
from tests.support.stages import TOGETHER, agreed_on, fails, stages_of

REGISTER = {"ddp": register_ddp, "fsdp1": register_fsdp1}


def wrapped(kind: str, **fsdp1: Any) -> nn.Module:
    return wrap(build()) if kind == "ddp" else FullyShardedDataParallel(build(), device_id=torch.device("cpu"), **fsdp1)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError("injected")


def body_broken_registration(rank: int, world_size: int, kind: str, broken: tuple[int, ...]) -> None:
    running = set(threading.enumerate())
    wanted = train(wrapped(kind))
    model = wrapped(kind)
    if rank in broken:
        vars(model)["register_comm_hook"] = refuse
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
    opened = comm_hooks.open_for

    def open_and_fail(*args: Any, **kwargs: Any) -> Any:
        found = opened(*args, **kwargs)
        if rank in broken:
            found[0].close()
            refuse()
        return found

    comm_hooks.open_for = open_and_fail
    try:
        with pytest.raises((OSError, CommFuseError), match="injected"):
            REGISTER[kind](model, config())
    finally:
        comm_hooks.open_for = opened
    assert not started_since(running)
    REGISTER[kind](model, config())  # nothing is in the way of a second try
    train(model)


def body_every_stage(rank: int, world_size: int, kind: str) -> int:
    """At each function of ours, on each rank in turn, raises what the other rank hears of."""
    running, wanted = set(threading.enumerate()), train(wrapped(kind))
    failed = 0
    for number, name in enumerate(agreed_on(stages_of(lambda: REGISTER[kind](wrapped(kind), config()), lambda: None))):
        model = wrapped(kind)
        if not fails(name, number % world_size, lambda model=model: REGISTER[kind](model, config()), wanted=TOGETHER):
            continue
        failed += 1
        assert not held(running)[1], name
        found = train(model)
        assert worst(found[0], wanted[0]) == 0.0 and worst(found[1], wanted[1]) == 0.0, name
    return failed


def body_broken_backward(rank: int, world_size: int, kind: str) -> str:
    """The first layer's backward, which is the last, raises on rank 0 alone; its model lives on."""
    model = wrapped(kind, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    REGISTER[kind](model, config(deadline_s=60.0))
    beside = dist.new_group()  # to meet on: what DDP's group is used for is left in the middle
    train(model, steps=1)
    if rank == 0:
        model.module.blocks[0].register_forward_hook(blow_in_backward)
    start, text = time.monotonic(), ""
    try:
        train(model, steps=1)
    except (Boom, RuntimeError) as error:
        text = str(error)
    took = time.monotonic() - start
    dist.barrier(beside)  # the culprit keeps its model until the other has heard
    return text if took < 30.0 else "came by the deadline"


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
def test_a_failure_at_any_stage_leaves_a_stock_model_on_all_ranks(workers, kind):
    first, second = workers(2).run(body_every_stage, kind, timeout=120)
    assert first == second > 5


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_the_peer_of_a_broken_backward_is_told_why(workers, kind):
    """By the culprit itself, long before the deadline."""
    culprit, peer = workers(2).run(body_broken_backward, kind)
    assert culprit == "no more" and "rank 0" in peer and "an exception in its backward" in peer


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_an_opening_that_fails_leaves_nothing(workers, kind):
    workers(2).run(body_broken_opening, kind, (1,))


@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_a_dropped_model_takes_its_hook_along(workers, kind):
    for counts in workers(2).run(body_rounds, kind):
        assert counts[-1][0] <= counts[0][0] and {threads for _, threads in counts} == {0}, counts
