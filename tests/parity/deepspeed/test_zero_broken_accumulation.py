"""A backward that is broken off between the microbatches of an accumulation: no rank goes on with what it has left, and after
`engine.zero_grad()` training is as if the microbatches of that window had not been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.errors import CommFuseError
from tests.parity.deepspeed.pair import Case, Result, batch, check, loss_of, run, settings
from tests.support.raising import Boom, blow

STEPS, LOST = 4, (1, 2)  # optimizer steps; of which of them the window is begun twice


PLACES: dict[str, Callable[[Any], Any]] = {
    "middle": lambda engine: engine.module.blocks[1].up.register_full_backward_pre_hook(blow),
    "end": lambda engine: engine.module.embedding.register_full_backward_pre_hook(blow),
}


def broken_window(engine: Any, rank: int, number: int, place: str, ranks: list[int], whole: int) -> None:
    """`whole` microbatches, and one that is broken off on `ranks`; all of it is cleared then."""
    for micro in range(whole):
        engine.backward(loss_of(engine, batch(rank, 100 + number + micro)))
        engine.step()
    handle = PLACES[place](engine) if rank in ranks else None
    through = False
    with contextlib.suppress(Boom, CommFuseError):
        engine.backward(loss_of(engine, batch(rank, 200 + number)))
        through = True
    assert not through or rank not in ranks
    if handle is not None:
        handle.remove()
    if whole:
        for _ in range(2):
            with pytest.raises(CommFuseError, match=r"zero_grad|went through"):
                engine(batch(rank, number)[0])
        if whole == 3 and rank in ranks:
            with pytest.raises(CommFuseError, match=r"zero_grad"):
                engine.step()  # at the boundary
        engine.zero_grad()
    elif through:  # the other rank does not count this forward
        with pytest.raises(CommFuseError, match="went through"):
            engine(batch(rank, number)[0])


def train(place: str, ranks: list[int], whole: int) -> Callable[[Any, int, int], torch.Tensor]:
    def micro(engine: Any, rank: int, number: int) -> torch.Tensor:
        accumulation = engine.gradient_accumulation_steps()
        if place and number % accumulation == 0 and number // accumulation in LOST:
            broken_window(engine, rank, number, place, ranks, whole)
        loss = loss_of(engine, batch(rank, number))
        engine.backward(loss)
        engine.step()
        return loss

    return micro


def accumulated(
    rank: int, world_size: int, stage: int, cells: list[tuple[str, list[int], int]], dtype: str
) -> tuple[Result, list[Result]]:
    case = Case(settings(stage, accumulation=4, dtype=dtype), steps=STEPS, train=train("", [], 0))
    stock = run(rank, world_size, case, fused=False)
    results = []
    for cell in cells:
        case.train = train(*cell)
        results.append(run(rank, world_size, case, fused=True))
    return stock, results


ALL, ONE = [0, 1], [1]


@pytest.mark.parametrize(
    ("stage", "cells", "dtype"),
    [
        (3, [("middle", ALL, 2)], "fp32"),
        (1, [("middle", ONE, 1)], "fp32"),
        (2, [("middle", ALL, 3)], "fp32"),
        *(
            pytest.param(
                stage,
                [(place, ranks, whole) for place in PLACES for ranks in (ALL, ONE) for whole in (0, 1, 3)],
                dtype,
                marks=pytest.mark.slow,
            )
            for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
        ),
    ],
)
def test_no_rank_goes_on_before_gradients_are_cleared(workers, stage, cells, dtype):
    for stock, results in workers(2).run(accumulated, stage, cells, dtype, timeout=300):
        for ours in results:
            check(stock, ours, dtype=dtype)


def uncounted(rank: int, world_size: int, stage: int) -> tuple[Result, Result]:
    """The caller alone says when a window ends: `engine.step()` right behind the backward that was broken off."""

    def window(engine: Any, rank: int, number: int) -> torch.Tensor:
        for micro in range(2):
            loss = loss_of(engine, batch(rank, 2 * number + micro))
            engine.backward(loss)
        engine.step()
        return loss

    def after_a_broken_one(engine: Any, rank: int, number: int) -> torch.Tensor:
        engine.backward(loss_of(engine, batch(rank, 100 + number)))
        handle = PLACES["middle"](engine)
        with contextlib.suppress(Boom, CommFuseError):
            engine.backward(loss_of(engine, batch(rank, 200 + number)))
        handle.remove()
        with pytest.raises(CommFuseError, match="zero_grad"):
            engine.step()
        engine.zero_grad()
        samples = engine.global_samples
        loss = window(engine, rank, number)
        assert engine.global_samples - samples == 2 * engine.train_batch_size()
        return loss

    case = Case(settings(stage, managed_gradient_accumulation=False), steps=2, train=window)
    stock = run(rank, world_size, case, fused=False)
    case.train = after_a_broken_one
    return stock, run(rank, world_size, case, fused=True)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_step_of_a_window_that_nobody_counts(workers, stage):
    for stock, ours in workers(2).run(uncounted, stage, timeout=90):
        check(stock, ours)
