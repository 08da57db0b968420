"""Steps after a step that broke off with an exception on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commfuse_dp.engine import broken
from commfuse_dp.errors import BrokenStepError
from tests.parity.fsdp2.models import (
    Stack,
    mean_square,
    shard_root,
    token_loss,
    wide_bytes,
)
from tests.parity.fsdp2.twin import Twin, settings
from tests.support.cells import slow
from tests.support.raising import Boom, blow, blow_in_backward
from tests.support.versions import NEEDS_RESET


def blow_up(model: nn.Module, phase: str) -> Any:
    """Raise Boom once in the given phase, whatever the layers do."""
    if phase == "forward":
        return model.layers[1].down.register_forward_pre_hook(blow)
    if phase == "backward":
        return model.layers[1].up.register_forward_hook(blow_in_backward)
    return model.embedding.register_forward_hook(blow_in_backward)


def failing(rank: int, world_size: int, transport: str, reset: bool) -> None:
    """All ranks raise at the same place, catch it and go on; stock runs the good steps only. Fused layers recover by
    themselves; FSDP2's own groups (here: the embedding's) need its reset_iter_state."""
    exclude = ("embedding",) if reset else ()
    config = settings(transport, exclude=exclude, prefetch_bytes=8192)
    for phase in ("forward", "backward", "end of backward"):
        with Twin(wide_bytes, config=config) as twin:
            twin.step()
            for sync in (True, False):
                handle = blow_up(twin.fused, phase)
                twin.fused.set_requires_gradient_sync(sync)
                with pytest.raises(Boom):
                    token_loss(twin.fused, twin.batch()).backward()
                handle.remove()
                twin.fused.set_requires_gradient_sync(True)
                twin.fused.zero_grad()
                if reset:
                    twin.fused.reset_iter_state()
                elif not sync and phase != "forward":
                    break  # what the broken microbatch has accumulated is kept until a reset, as in stock
                twin.step()
                twin.step()


@pytest.mark.parametrize("reset", [False, pytest.param(True, marks=NEEDS_RESET)])
@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), (2, "tcp"), slow(3, "tcp")])
def test_the_step_after_an_exception(workers, world_size, transport, reset):
    workers(world_size).run(failing, transport, reset)


def lost_by_rank_0(twin: Twin, rank: int, phase: str) -> str:
    """A step that it raises in, and that its peers hear of before it begins anything else. What this rank was told."""
    handle = blow_up(twin.fused, phase) if rank == 0 else None
    with pytest.raises(Boom if rank == 0 else BrokenStepError) as caught:
        token_loss(twin.fused, twin.batch()).backward()
    dist.barrier()
    if handle is not None:
        handle.remove()
    return str(caught.value)


def failing_alone(rank: int, world_size: int, transport: str) -> None:
    """Rank 0 raises outside of CommFuse's layers, and begins nothing else before its peers have ended."""
    for phase in ("forward", "backward"):
        with Twin(wide_bytes, config=settings(transport, prefetch_bytes=8192)) as twin:
            twin.step()
            told = lost_by_rank_0(twin, rank, phase)
            if rank != 0:
                why = "rank 0: Boom: no more in its forward" if phase == "forward" else "rank 0: an exception in its backward"
                assert why in told, told
            twin.fused.zero_grad()
            twin.step()
            twin.step()


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), (2, "tcp"), slow(3, "tcp")])
def test_an_exception_of_the_user_on_one_rank_is_told_at_once(workers, world_size, transport):
    workers(world_size).run(failing_alone, transport)


def failing_without_room(rank: int, world_size: int) -> None:
    """As before, and what its peers still owe to rank 0 does not fit into its inbox, which it does not empty meanwhile."""
    with (
        mock.patch.object(broken, "ROOM_PATIENCE_S", 0.2),
        Twin(wide_bytes, config=settings("tcp", inbox_bytes=1 << 10)) as twin,
    ):
        twin.step()
        told = lost_by_rank_0(twin, rank, "backward")
        if rank != 0:
            assert broken.ROOM in told and "rank 0: an exception in its backward" in told
        twin.fused.zero_grad()
        twin.step()


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_an_exception_on_a_rank_whose_inbox_is_full(workers, world_size):
    workers(world_size).run(failing_without_room)


class Twice(Stack):
    """Its one square layer is called twice."""

    def __init__(self) -> None:
        super().__init__(9, 9)
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.between(torch.tanh(self.layers[0](x))))


def failing_between_calls(rank: int, world_size: int) -> None:
    """The first call's part of the gradient was waiting for the second's when the backward broke off."""

    def between(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(blow)
        return x

    with Twin(Twice, shard=shard_root) as twin:
        g = twin.generator
        twin.step(mean_square, torch.randn(3, 9, generator=g).double())
        twin.fused.between = between
        with pytest.raises(Boom):
            mean_square(twin.fused, torch.randn(3, 9, generator=g).double()).backward()
        twin.fused.between = lambda x: x
        twin.fused.zero_grad()
        twin.step(mean_square, torch.randn(3, 9, generator=g).double())


def test_an_exception_between_two_calls_of_a_layer(workers):
    workers(2).run(failing_between_calls)
