"""Selective activation checkpointing, and other modes that look at operations: a fused layer is one product to them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.fsdp2 import pair
from tests.support.selective import POLICIES, selective, wrapped

BLOCKS = 3
WIDE = 2  # blocks whose gathered parameters the window has room for


def one_block(net: pair.Net) -> int:
    return sum(p.numel() * p.element_size() for p in net.blocks[0].parameters())


def train(rank: int, world_size: int, transport: str, policies: tuple[str, ...]) -> None:
    received = {}
    for policy in policies:
        stock, net = (pair.build(BLOCKS, wrap=wrapped(policy)) for _ in range(2))
        with pair.applied(net, transport=transport, prefetch_bytes=one_block(net)) as report:
            for step in range(3):
                run = partial(pair.assert_gradients_of_one_step, net, stock, rank, world_size, step)
                received[policy] = pair.counted(report, run).param_bytes_received
    print(received)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_gradients_of_stock(workers: Any, transport: str) -> None:
    workers(2).run(train, transport, POLICIES)


def around(rank: int, world_size: int) -> None:
    """Around blocks that are sharded: their hooks run inside. (To save everything is nothing that stock can do there.)"""
    stock, net = pair.build(BLOCKS), pair.build(BLOCKS)
    with pair.applied(net, transport="tcp", prefetch_bytes=one_block(net)):
        for policy in POLICIES[:-1]:
            stock.run_block = net.run_block = selective(policy)
            for step in range(2):
                pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)


def test_around_sharded_blocks(workers: Any) -> None:
    workers(2).run(around)


def count(rank: int, world_size: int) -> None:
    """Forward, recomputation and backward."""
    for policy in (None, "nothing", "products"):
        found = []
        stock, net = (pair.build(BLOCKS, wrap=None if policy is None else wrapped(policy)) for _ in range(2))
        with pair.applied(net):
            for model in (stock, net):
                with FlopCounterMode(display=False) as counter:
                    pair.loss_of(model, pair.batch(rank, world_size, 0)).backward()
                found.append(counter.get_flop_counts()["Global"])
        print(found)
        assert found[0] == found[1], policy


def test_products_are_counted_as_in_stock(workers: Any) -> None:
    workers(2).run(count)
