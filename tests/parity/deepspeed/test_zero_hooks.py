"""Hooks of the user's on gradients of parameters: called as with stock DeepSpeed, or said not to be."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from tests.parity.deepspeed.pair import Case, Net, Result, both, check, settings, started, train_micro
from tests.support.cells import slow


def masked(grad: torch.Tensor) -> torch.Tensor:
    return grad * (torch.arange(grad.shape[1]) % 2)


def halved(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def register(net: Net) -> None:
    """Two that change gradients, and one that only looks, on one rank."""
    net.blocks[1].up.weight.register_hook(masked)
    net.blocks[2].down.weight.register_post_accumulate_grad_hook(halved)
    if dist.get_rank() == 0:
        net.head.weight.register_hook(lambda grad: None)


def hooked(rank: int, world_size: int, stage: int) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(stage), prepare=register))


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_hooks_are_called(workers, stage):
    for stock, ours in workers(2).run(hooked, stage, timeout=60):
        check(stock, ours)
        for name in ("blocks.1.up.weight", "blocks.2.down.weight", "head.weight"):
            assert ours.paths[name] == "hooks" and "hook" in ours.reasons[name], (name, ours.reasons[name])
        assert ours.paths["blocks.0.up.weight"] == "fused"


def registered_late(rank: int, world_size: int) -> list[str]:
    heard: list[str] = []
    listener, log = logging.Handler(logging.WARNING), logging.getLogger("commfuse_dp")
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    case = Case(settings(3))
    log.addHandler(listener)
    try:
        with started(rank, world_size, case, fused=True) as engine:
            for step in range(3):
                if step == 1 and rank == 0:
                    engine.module.blocks[1].up.weight.register_hook(masked)
                train_micro(case, engine, rank, step)
    finally:
        log.removeHandler(listener)
    return [text for text in heard if "hooks on gradients" in text]


def test_late_ones_are_named(workers):
    first, second = workers(2).run(registered_late, timeout=60)
    assert len(first) == 1 and "blocks.1.up" in first[0] and "exclude" in first[0]
    assert second == []
