"""apply() on tensor-parallel layers that fails, at any stage, on one rank or on all: the model is stock on all ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from commfuse_dp.integrations import tensor_parallel
from commfuse_dp.integrations.tensor_parallel import serving
from commfuse_dp.integrations.unmodified import first_call
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp.errors import CommFuseError
from tests.parity.fsdp2.test_all_or_nothing import state_of
from tests.parity.tensor_parallel.block import batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_parallel import close, train
from tests.support.cells import slow
from tests.support.leftovers import assert_nothing_left, leftovers
from tests.support.serving import config
from tests.support.stages import TOGETHER, agreed_on, anywhere, fails, stages_of


def every_stage(rank: int, world_size: int, everywhere: bool, stride: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    wanted, model = train(parallelize(whole(), mesh), 2), parallelize(whole(), mesh)
    attach, detach = (lambda: commfuse_dp.apply(model, config())), (lambda: commfuse_dp.remove(model))
    names = agreed_on(stages_of(attach, detach))
    before, held, failed = state_of(model), leftovers(), 0
    for number, name in enumerate(names[::stride]):
        if fails(name, None if everywhere else number % world_size, attach, wanted=anywhere if everywhere else TOGETHER):
            failed += 1
        else:  # a place outside of what ranks do together
            detach()
        assert not tensor_parallel.applied(model) and state_of(model) == before, name
    assert_nothing_left(held)
    close(train(model, 2), wanted, 1e-10)
    return failed


def noted(rank: int, world_size: int, culprit: int | None, explicit: bool) -> str:
    """Styles that are noted as they are applied, and served by the first forward."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    wanted, model = train(parallelize(whole(), mesh), 2), parallelize(whole(), mesh)
    before, held, said = state_of(model), leftovers(), []

    def attach(*args: Any) -> Any:
        attached = original(*args)
        if culprit is None or rank == culprit:
            raise OSError("on purpose")
        return attached

    original = serving._attach
    with mock.patch.dict(os.environ, {"COMMFUSE_DEADLINE_S": "20"}), mock.patch.object(first_call, "warn", said.append):
        first_call.watch(model, explicit=explicit)
        with mock.patch.object(serving, "_attach", attach):
            if explicit:
                with pytest.raises(OSError if culprit in (None, rank) else CommFuseError, match="on purpose"):
                    model(batch(0)[:, :-1])
            else:
                model(batch(0)[:, :-1])
    assert not tensor_parallel.applied(model) and state_of(model) == before
    assert_nothing_left(held)
    close(train(model, 2), wanted, 1e-10)
    return "".join(said)


@pytest.mark.parametrize(("culprit", "explicit"), [(1, False), (1, True), slow(None, False)])
def test_noted_styles_that_one_rank_cannot_serve(workers: Any, culprit: int | None, explicit: bool) -> None:
    first, second = workers(2).run(noted, culprit, explicit, timeout=60)
    if explicit:
        assert not first + second
    else:
        assert "stays with DTensor: OSError: on purpose" in second and "on purpose" in first


@pytest.mark.parametrize(("everywhere", "stride"), [(True, 5), (False, 5), slow(True, 1), slow(False, 1)])
def test_apply_that_fails_at_any_stage(workers: Any, everywhere: bool, stride: int) -> None:
    first, second = workers(2).run(every_stage, everywhere, stride, timeout=200)
    assert first == second > 50 / stride
