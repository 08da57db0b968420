"""A step of one engine that is broken off, and what the process does beside it: collectives of the user's own, and engines
without CommFuse. None of that belongs to the step, so none of it fails or waits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from commfuse_dp.errors import CommFuseError
from tests.parity.deepspeed.pair import BLOCK, Case, batch, loss_of, settings, started, train_micro, whole
from tests.support.raising import Boom, blow_in_backward


def break_off(engine: Any, rank: int, bad: list[int]) -> bool:
    """A microbatch whose backward raises on the ranks `bad`. Returns whether this rank has gone through."""
    handle = engine.module.blocks[1].register_forward_hook(blow_in_backward) if rank in bad else None
    through = False
    with contextlib.suppress(Boom, CommFuseError):
        engine.backward(loss_of(engine, batch(rank, 7)))
        through = True
    assert not through or rank not in bad
    if handle is not None:
        handle.remove()
    return through


def collectives(rank: int, world_size: int) -> None:
    """Small and large, blocking and not, of kinds that CommFuse would serve inside a step, and of others."""
    from deepspeed import comm

    for numel in (6 * world_size, 6000 * world_size):
        whole = torch.full((numel,), float(rank + 1))
        comm.all_reduce(whole)
        assert torch.equal(whole, torch.full_like(whole, world_size * (world_size + 1) / 2))
        part = torch.empty(numel // world_size)
        comm.reduce_scatter_tensor(part, torch.ones(numel))
        assert torch.equal(part, torch.full_like(part, world_size))
        work = comm.all_gather_into_tensor(whole, torch.full_like(part, float(rank)), async_op=True)
        work.wait()
        assert torch.equal(whole.view(world_size, -1)[:, 0], torch.arange(world_size).float())
        told = torch.full((numel,), float(rank))
        comm.broadcast(told, src=1)
        assert torch.equal(told, torch.ones_like(told))
    comm.barrier()


def own_calls(rank: int, world_size: int, stage: int, bad: list[int]) -> None:
    """Of the user's, behind the step that is lost and before the next one; then training goes on."""
    from commfuse_dp.integrations.deepspeed import report_of

    case = Case(settings(stage))
    with started(rank, world_size, case, fused=True) as engine:
        train_micro(case, engine, rank, 0)
        moved = report_of(engine).probe.counters.snapshot()
        collectives(rank, world_size)
        assert report_of(engine).probe.counters.snapshot() == moved  # not over the engine's transport
        through = break_off(engine, rank, bad)
        collectives(rank, world_size)
        engine.zero_grad()
        if through:  # it counts a step that the others do not
            with pytest.raises(CommFuseError, match="went through"):
                engine(batch(rank, 0)[0])
        for step in range(1, 3):
            train_micro(case, engine, rank, step)


@pytest.mark.parametrize(
    ("stage", "bad"),
    [
        (3, [1]),
        (2, [0, 1]),
        pytest.param(3, [0, 1], marks=pytest.mark.slow),
        pytest.param(2, [1], marks=pytest.mark.slow),
        pytest.param(1, [1], marks=pytest.mark.slow),
    ],
)
def test_collectives_of_the_user(workers, stage, bad):
    workers(2).run(own_calls, stage, bad, timeout=60)


def another_engine(rank: int, world_size: int, stages: tuple[int, int]) -> None:
    """Its steps are as they are in a process without the first one."""
    served, stock = (Case(settings(stage)) for stage in stages)
    with started(rank, world_size, stock, fused=False) as engine:
        alone = [train_micro(stock, engine, rank, step) for step in range(3)], whole(engine)
    with started(rank, world_size, served, fused=True) as ours, started(rank, world_size, stock, fused=False) as engine:
        train_micro(served, ours, rank, 0)
        losses = [train_micro(stock, engine, rank, 0)]
        through = break_off(ours, rank, [1])
        losses += [train_micro(stock, engine, rank, step) for step in (1, 2)]
        after = whole(engine)
        assert losses == alone[0] and all(torch.equal(after[name], found) for name, found in alone[1].items())
        ours.zero_grad()
        if through:
            with pytest.raises(CommFuseError, match="went through"):
                ours(batch(rank, 0)[0])
        train_micro(served, ours, rank, 1)


@pytest.mark.parametrize("stages", [(3, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_an_engine_without_commfuse(workers, stages):
    workers(2).run(another_engine, stages, timeout=60)


def too_large(rank: int, world_size: int, stage: int) -> str:
    """Slices that fit no budget, when CommFuse is switched on."""
    from commfuse_dp.integrations.deepspeed import apply_to_engine, engine_of

    from commfuse_dp import CommFuseConfig

    case = Case(settings(stage))
    with started(rank, world_size, case, fused=False) as engine:
        with pytest.raises(CommFuseError) as caught:
            apply_to_engine(engine, CommFuseConfig(**{**BLOCK, "prefetch_bytes": 8}))
        assert engine_of(engine) is None
        train_micro(case, engine, rank, 0)
        return str(caught.value)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_slices_that_fit_no_budget_are_refused_at_once(workers, stage):
    for text in workers(2).run(too_large, stage, timeout=60):
        for part in ("a slice of layer", "prefetch_bytes=8", "raise prefetch_bytes and inbox_bytes"):
            assert part in text
