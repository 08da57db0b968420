"""FSDPModule.set_all_reduce_hook: what a user does to the sums of a whole group before they become gradients."""

from __future__ import annotations

import pytest
import torch

from commfuse_dp import ConfigError
from tests.parity.fsdp2 import pair
from tests.parity.fsdp2.test_sharding import hybrid_mesh
from tests.support.cells import slow


def tripled(sums: torch.Tensor) -> None:
    sums.mul_(3.0)


def hooked(rank: int, world_size: int, hybrid: bool) -> None:
    stock, net = (pair.build(2, **({"mesh": hybrid_mesh()} if hybrid else {})) for _ in range(2))
    for model in (stock, net):
        model.blocks[1].set_all_reduce_hook(tripled)
    with pair.applied(net) as report:
        paths = {row.name: row for row in report.rows}
        assert paths["blocks.0.up.weight"].path == "fused"
        assert paths["blocks.1.up.weight"].path == "stock" and "all-reduce hook" in paths["blocks.1.up.weight"].reason
        for step in range(3):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)


@pytest.mark.parametrize("hybrid", [False, slow(True)])
def test_a_group_with_a_hook_stays_with_fsdp2(workers, hybrid):
    workers(4 if hybrid else 2).run(hooked, hybrid)


def hooked_late(rank: int, world_size: int) -> None:
    stock, net = pair.build(1), pair.build(1)
    with pair.applied(net):
        net.blocks[0].set_all_reduce_hook(tripled)
        with pytest.raises(ConfigError, match=r"set_all_reduce_hook.* before .*apply"):
            pair.loss_of(net, pair.batch(rank, world_size, 0)).backward()
        net.blocks[0].set_all_reduce_hook(None)
        pair.assert_gradients_of_one_step(net, stock, rank, world_size)


def test_a_hook_that_comes_after_apply_is_refused(workers):
    workers(2).run(hooked_late)
