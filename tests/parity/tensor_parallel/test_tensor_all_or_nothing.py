"""apply() on tensor-parallel layers that fails, at any stage, on one rank or on all: the model is stock on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from commfuse_dp.integrations import tensor_parallel
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp import CommFuseError
from tests.parity.fsdp2.test_all_or_nothing import state_of
from tests.parity.tensor_parallel.block import parallelize, whole
from tests.parity.tensor_parallel.test_tensor_parallel import close, train
from tests.support.cells import slow
from tests.support.leftovers import assert_nothing_left, leftovers
from tests.support.raising import Injected, functions_entered, inside, raising_in
from tests.support.serving import config

FOLDER = "integrations"


def every_stage(rank: int, world_size: int, everywhere: bool, stride: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    wanted, model = train(parallelize(whole(), mesh), 2), parallelize(whole(), mesh)
    names = []
    for _ in range(2):  # the first also enters what is found out once in a process
        names = [functions_entered(FOLDER, lambda: commfuse_dp.apply(model, config()))]
        commfuse_dp.remove(model)
    dist.broadcast_object_list(names)
    # What the agreement itself does cannot be agreed on; what remembers a change may have made it.
    local = [name for name in names[0] if not name.startswith(("attach/ranks.py", "attach/fingerprint.py"))]
    local = [name for name in local if not name.endswith(" on_undo")]
    before, held, failed = state_of(model), leftovers(), 0
    for number, name in enumerate(local[::stride]):
        culprit = number % world_size
        try:
            if everywhere or rank == culprit:
                where = inside("together", but_not=() if everywhere else ("connect",))
                raising_in(FOLDER, name, lambda: commfuse_dp.apply(model, config()), wanted=where)
            else:
                commfuse_dp.apply(model, config())
        except Injected:
            failed += 1
        except CommFuseError as error:
            assert not everywhere and rank != culprit and f"rank {culprit}" in str(error) and name in str(error), error
            failed += 1
        else:  # a place outside of what ranks do together
            commfuse_dp.remove(model)
        assert not tensor_parallel.applied(model) and state_of(model) == before, name
    assert_nothing_left(held)
    close(train(model, 2), wanted, 1e-10)
    return failed


@pytest.mark.parametrize(("everywhere", "stride"), [(True, 5), (False, 5), slow(True, 1), slow(False, 1)])
def test_apply_that_fails_at_any_stage(workers: Any, everywhere: bool, stride: int) -> None:
    first, second = workers(2).run(every_stage, everywhere, stride, timeout=200)
    assert first == second > 50 / stride
