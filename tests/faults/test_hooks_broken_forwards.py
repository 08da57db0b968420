"""An exception on one rank that keeps DDP's or FSDP1's hook from being called: peers hear of it, and steps are never mixed."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations import register_ddp, register_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.parity.ddp.nets import batch, build, config, train, worst, wrap
from tests.support.raising import Boom, blow

REGISTER = {"ddp": register_ddp, "fsdp1": register_fsdp1}
SOON_S, DEADLINE_S = 30.0, 60.0


def wrapped(kind: str, *, ours: bool = True) -> nn.Module:
    """One unit of FSDP1: its own all-gather is over when the forward breaks off, and no rank waits for another in it."""
    model = wrap(build()) if kind == "ddp" else FullyShardedDataParallel(build(), device_id=torch.device("cpu"))
    if ours:
        REGISTER[kind](model, config(deadline_s=DEADLINE_S))
    train(model, steps=2)
    return model


def head(model: Any) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("head"))


@contextlib.contextmanager
def broken(model: nn.Module, place: str, wanted: bool = True) -> Any:
    """The next forward raises, or the backward at the very start of it, before anything of it is reduced."""
    if not wanted:
        yield
        return
    if place == "forward":
        handle = head(model).register_forward_hook(blow)
    else:
        # Behind the loss's own gradient, before that of the first parameter.
        handle = model.register_forward_hook(lambda module, args, out: out.register_hook(blow) and None)
    with pytest.raises(Boom):
        yield
    handle.remove()


def one_backward(model: nn.Module, step: int = 7) -> torch.Tensor:
    x, wanted = batch(step, torch.float32)
    loss = nn.functional.cross_entropy(model(x), wanted)
    loss.backward()
    return loss


def told_at_once(rank: int, world_size: int, kind: str, place: str) -> None:
    model, beside = wrapped(kind), dist.new_group()
    start = time.monotonic()
    if rank == 0:
        with broken(model, place):
            one_backward(model)
    else:
        with pytest.raises(RuntimeError, match="rank 0: .*in its " + place):
            one_backward(model)
        assert time.monotonic() - start < SOON_S
    dist.barrier(beside)  # the culprit neither goes on nor leaves before


def never_mixed(rank: int, world_size: int, kind: str, place: str) -> None:
    """The culprit goes on at once, and is in its next backward when its peer comes to the one before."""
    model, beside = wrapped(kind), dist.new_group()
    if rank == 0:
        with broken(model, place):
            one_backward(model)
    with pytest.raises(RuntimeError, match=r"rank 0|ranks \[0\]"):
        one_backward(model)
    dist.barrier(beside)


def left_out(model: nn.Module, culprits: tuple[int, ...], place: str) -> tuple[list[float], list[float]]:
    """All ranks leave a step out, as they have agreed: those that could run it, too."""
    here = dist.get_rank() in culprits
    x, _ = batch(3, torch.float32)
    with broken(model, place, here):
        out = model(x)
        if here:
            out.sum().backward()
    del x
    failed = torch.tensor([float(here)])
    dist.all_reduce(failed, group=dist.group.WORLD)
    assert failed.item() == len(culprits)
    model.zero_grad()
    return train(model, steps=3, start=4)


def goes_on(rank: int, world_size: int, kind: str, place: str, culprits: tuple[int, ...]) -> None:
    wanted = left_out(wrapped(kind, ours=False), culprits, place)
    found = left_out(wrapped(kind), culprits, place)
    assert max(worst(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-6


def of_no_concern(rank: int, world_size: int) -> None:
    """What one rank runs by itself, without a backward that is reduced."""
    model, x = wrapped("ddp"), batch(3, torch.float32)[0]
    if rank == 0:
        with torch.no_grad(), broken(model, "forward"):
            model(x)
        with model.no_sync(), broken(model, "forward"):
            model(x)
        model(x)
    losses, _ = train(model, steps=2)
    assert len(losses) == 2


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1"])
def test_a_peer_that_waits_is_told_at_once(workers: Any, kind: str, place: str) -> None:
    workers(2).run(told_at_once, kind, place, timeout=100)


@pytest.mark.parametrize(("kind", "place"), [("ddp", "forward"), ("ddp", "backward"), ("fsdp1", "forward")])
def test_gradients_of_different_steps_are_never_averaged(workers: Any, kind: str, place: str) -> None:
    workers(2).run(never_mixed, kind, place, timeout=100)


@pytest.mark.parametrize("culprits", [(0,), (0, 1)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize(("kind", "place"), [("ddp", "forward"), ("ddp", "backward"), ("fsdp1", "forward")])
def test_a_step_that_all_ranks_leave_out(workers: Any, kind: str, place: str, culprits: tuple[int, ...]) -> None:
    workers(2).run(goes_on, kind, place, culprits)


def test_forwards_without_a_backward_concern_nobody(workers: Any) -> None:
    workers(2).run(of_no_concern)
