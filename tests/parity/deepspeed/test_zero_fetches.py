"""What ZeRO-3 fetches itself (biases, norms, other parameters), in steps that one rank alone loses, at another place of the
order of fetches than its peers: what follows is as if these steps had not been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from commfuse_dp.errors import CommFuseError
from tests.parity.deepspeed.pair import Case, Result, batch, check, loss_of, run, settings
from tests.support.raising import Boom, blow

ZERO = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 30}  # fetched ahead: some, not all


class Method:
    """Its call raises Boom, until `remove`."""

    def __init__(self, owner: Any, name: str) -> None:
        patch = mock.patch.object(owner, name, blow)
        patch.start()
        self.remove = patch.stop


PLACES: dict[str, Callable[[Any], Any]] = {
    # Ranks compare the orders that they have recorded: the others wait there.
    "start": lambda engine: Method(engine.optimizer.parameter_offload.get_param_coordinator(), "reset_step"),
    "forward": lambda engine: engine.module.blocks[1].norm.register_forward_hook(blow),
    "backward": lambda engine: engine.module.blocks[1].norm.register_full_backward_pre_hook(blow),
    # All gradients are there, and the others go through.
    "end": lambda engine: Method(engine.optimizer, "backward_epilogue"),
}
LOST = (0, 3)  # steps that rank 1 loses before they are done: while ZeRO-3 records its order, and while it follows that


def lose(engine: Any, rank: int, number: int, place: str) -> None:
    handle = PLACES[place](engine) if rank == 1 else None
    with contextlib.suppress(Boom, CommFuseError):
        engine.backward(loss_of(engine, batch(rank, 100 + number)))
        assert rank == 0
        with pytest.raises(CommFuseError, match="went through"):
            engine(batch(rank, number)[0])
    if handle is not None:
        handle.remove()
    engine.zero_grad()


def train(place: str) -> Callable[[Any, int, int], torch.Tensor]:
    def micro(engine: Any, rank: int, number: int) -> torch.Tensor:
        if place and number in LOST:
            lose(engine, rank, number, place)
        loss = loss_of(engine, batch(rank, number))
        engine.backward(loss)
        engine.step()
        return loss

    return micro


def lost_alone(rank: int, world_size: int) -> tuple[Result, list[Result]]:
    case = Case(settings(3, zero=ZERO), steps=5, train=train(""))
    stock = run(rank, world_size, case, fused=False)
    results = []
    for place in PLACES:
        case.train = train(place)
        results.append(run(rank, world_size, case, fused=True))
    return stock, results


@pytest.mark.slow
def test_as_if_it_had_not_been(workers):
    for stock, results in workers(2).run(lost_alone, timeout=240):
        for ours in results:
            check(stock, ours)
