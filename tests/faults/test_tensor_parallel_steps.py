"""An exception on one rank of tensor parallelism, or on all: who raises what, and that the next step is stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from commfuse_dp import BrokenStepError
from tests.parity.tensor_parallel.block import batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients
from tests.support.raising import Boom, blow, blow_in_backward
from tests.support.serving import applied

DEADLINE_S = 60.0  # what ends sooner ended because ranks were told
VICTIM = 1


def _blow_up(model: Any, phase: str) -> Callable[[], None]:
    """Have the next forward or backward raise Boom. Returns what takes it back."""
    if phase == "forward":
        return model.layers[0].feed_forward.register_forward_pre_hook(blow).remove
    if phase == "end of forward":
        return model.output.register_forward_hook(blow).remove
    if phase == "backward":
        return model.layers[0].feed_forward.register_forward_hook(blow_in_backward).remove
    assert phase == "end of backward"  # behind all that communicates
    return model.tok_embeddings.weight.register_hook(blow).remove


def _attempt(model: nn.Module, tokens: torch.Tensor) -> BaseException | None:
    model.zero_grad()
    try:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1)).backward()
    except Exception as error:
        return error
    finally:
        model.zero_grad()
    return None


def _one_rank(rank: int, world_size: int, transport: str, phases: tuple[str, ...], sequence: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    wanted = [gradients(parallelize(whole(layers=1), mesh, sequence=sequence), batch(step)) for step in range(2)]
    model = parallelize(whole(layers=1), mesh, sequence=sequence)
    with applied(model, transport=transport, deadline_s=DEADLINE_S):
        for phase in phases:
            alike(gradients(model, batch(0)), wanted[0])
            undo = _blow_up(model, phase) if rank == VICTIM else lambda: None
            error = _attempt(model, batch(0))
            undo()
            if rank == VICTIM:
                assert isinstance(error, Boom), (phase, error)
            elif phase != "end of backward":
                assert isinstance(error, BrokenStepError), (phase, error)
                assert ("no more" if "forward" in phase else "rank 1: an exception in its backward") in str(error), error
            else:
                assert error is None  # it has gone through with the step
            if phase == "end of backward":
                error = _attempt(model, batch(0))
                assert isinstance(error, BrokenStepError) and "went through" in str(error), (phase, error)
            alike(gradients(model, batch(1)), wanted[1])
            alike(gradients(model, batch(0)), wanted[0])
        for phase in phases:  # on all ranks alike: each has its own exception, and nothing else
            undo = _blow_up(model, phase)
            assert isinstance(_attempt(model, batch(0)), Boom)
            undo()
            alike(gradients(model, batch(1)), wanted[1])


PHASES = ("forward", "backward", "end of backward", "end of forward")


@pytest.mark.parametrize(
    ("ranks", "transport", "sequence"),
    [
        (2, "shm", True),
        pytest.param(2, "tcp", True, marks=pytest.mark.slow),
        pytest.param(3, "tcp", True, marks=pytest.mark.slow),
        pytest.param(2, "shm", False, marks=pytest.mark.slow),
        pytest.param(3, "tcp", False, marks=pytest.mark.slow),
    ],
)
def test_an_exception_on_one_rank(workers: Any, ranks: int, transport: str, sequence: bool) -> None:
    workers(ranks).run(_one_rank, transport, PHASES, sequence, timeout=120)
