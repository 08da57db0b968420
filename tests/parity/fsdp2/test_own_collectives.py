"""FSDPModule.set_custom_all_gather and set_custom_reduce_scatter: collectives of the user's own stay in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2.hooks import StockCollective, all_gather, reduce_scatter
from torch import nn

from commfuse_dp import ConfigError
from tests.parity.fsdp2 import pair


class Counted(StockCollective):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.calls += 1
        return super().__call__(*args, **kwargs)


KINDS = {"set_custom_all_gather": all_gather, "set_custom_reduce_scatter": reduce_scatter}


def give(block: nn.Module, setter: str) -> Any:
    own = Counted(KINDS[setter])
    getattr(block, setter)(own)
    return own


def before_apply(rank: int, world_size: int, setter: str) -> None:
    stock, net = pair.build(2), pair.build(2)
    expected, own = give(stock.blocks[1], setter), give(net.blocks[1], setter)
    with pair.applied(net) as report:
        paths = {row.name: row for row in report.rows}
        assert paths["blocks.0.up.weight"].path == "fused"
        assert paths["blocks.1.up.weight"].path == "stock" and setter in paths["blocks.1.up.weight"].reason
        for step in range(2):
            pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
        assert own.calls == expected.calls > 0
    pair.assert_gradients_of_one_step(net, stock, rank, world_size, 2)
    assert own.calls == expected.calls  # `remove` has left it there


def after_apply(rank: int, world_size: int, setter: str) -> None:
    net = pair.build(1)
    with pair.applied(net):
        give(net.blocks[0], setter)
        with pytest.raises(ConfigError, match=rf"{setter}.* before .*apply"):
            pair.loss_of(net, pair.batch(rank, world_size, 0)).backward()
        dist.barrier()  # a rank that removes CommFuse would be lost to one that has not come to that layer


@pytest.mark.parametrize("setter", KINDS)
def test_a_group_with_a_collective_of_its_own_stays_with_fsdp2(workers, setter):
    workers(2).run(before_apply, setter)


@pytest.mark.parametrize("setter", KINDS)
def test_a_collective_that_comes_after_apply_is_refused(workers, setter):
    workers(2).run(after_apply, setter)
