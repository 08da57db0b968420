"""A forward or backward that is broken off by an exception, on all ranks, which the user catches: what follows is as if that
microbatch had not been. (Stock ZeRO-2 does not get over a broken backward: it raises in the next one, on all ranks.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parity.deepspeed.pair import Case, Result, batch, check, loss_of, run, settings
from tests.support.raising import Boom, blow


def in_forward(engine: Any) -> Any:
    return engine.module.blocks[1].down.register_forward_hook(blow)


def in_backward(engine: Any) -> Any:
    return engine.module.blocks[1].up.register_full_backward_pre_hook(blow)


class InProduct:
    """The third product that a backward computes: in the middle of a layer, with a slice reserved and not sent."""

    def __init__(self, engine: Any) -> None:
        self.left = 3
        self.original = torch.mm
        self.patch = mock.patch("torch.mm", self.multiply)
        self.handle = engine.module.register_forward_hook(lambda *_: self.patch.start() and None)

    def multiply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise Boom
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        self.handle.remove()
        self.patch.stop()


PLACES: dict[str, Callable[[Any], Any]] = {"forward": in_forward, "backward": in_backward, "product": InProduct}
BROKEN = (2, 3)  # microbatches


def train(place: str | None) -> Callable[[Any, int, int], torch.Tensor]:
    """One microbatch; place None: those that are broken are left out."""

    def micro(engine: Any, rank: int, number: int) -> torch.Tensor:
        if number in BROKEN:
            if place is not None:
                handle = PLACES[place](engine)
                with pytest.raises(Boom):
                    engine.backward(loss_of(engine, batch(rank, number)))
                handle.remove()
                engine.zero_grad()
            return torch.ones(())
        loss = loss_of(engine, batch(rank, number))
        engine.backward(loss)
        engine.step()
        return loss

    return micro


def broken_off(rank: int, world_size: int, stage: int, places: list[str]) -> tuple[Result, list[Result]]:
    # One bucket: what autograd gives waits in it until the end of the backward.
    zero = {"reduce_bucket_size": 10**6, "stage3_param_persistence_threshold": 40}
    case = Case(settings(stage, zero=zero), steps=6, train=train(None))
    stock = run(rank, world_size, case, fused=False)
    results = []
    for place in places:
        case.train = train(place)
        results.append(run(rank, world_size, case, fused=True))
    return stock, results


@pytest.mark.parametrize(
    ("stage", "places"),
    [
        (3, ["forward", "backward", "product"]),
        (1, ["forward", "backward"]),
        pytest.param(2, ["forward", "backward"], marks=pytest.mark.slow),
    ],
)
def test_as_if_it_had_not_been(workers, stage, places):
    for stock, results in workers(2).run(broken_off, stage, places, timeout=120):
        for ours in results:
            check(stock, ours)
