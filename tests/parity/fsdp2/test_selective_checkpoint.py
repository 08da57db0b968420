"""Selective activation checkpointing, and other modes that look at operations: a fused layer is one product to them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.fsdp2 import pair
from tests.support.selective import POLICIES, selective, wrapped

BLOCKS = 3


def one_block(net: pair.Net) -> int:
    return sum(p.numel() * p.element_size() for p in net.blocks[0].parameters())


def train(rank: int, world_size: int, transport: str) -> None:
    received = {}
    for policy in (None, *POLICIES):
        stock, net = (pair.build(BLOCKS, wrap=wrapped(policy) if policy else None) for _ in range(2))
        with pair.applied(net, transport=transport, prefetch_bytes=one_block(net)) as report:
            for step in range(3):
                run = partial(pair.assert_gradients_of_one_step, net, stock, rank, world_size, step)
                received[policy] = pair.counted(report, run).param_bytes_received
    # A block's second linear is behind all that is saved; if the output of the first is saved, only the norm is gathered again.
    saving = ("products", "every second product", "products and sums", "everything")
    assert len({received[policy] for policy in saving}) == 1 and received["products"] < received["nothing"], received


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_gradients_of_stock(workers: Any, transport: str) -> None:
    workers(2).run(train, transport)


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
    """Forward, recomputation and backward; also where all of it runs in autocast."""
    for policy in (None, "nothing", "products"):
        for autocast in (False, True):
            found = []
            stock, net = (pair.build(BLOCKS, wrap=wrapped(policy) if policy else None) for _ in range(2))
            with pair.applied(net), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for model in (stock, net):
                    with FlopCounterMode(display=False) as counter:
                        pair.loss_of(model, pair.batch(rank, world_size, 0)).backward()
                    found.append(counter.get_flop_counts()["Global"])
            assert found[0] == found[1], (policy, autocast)


def test_products_are_counted_as_in_stock(workers: Any) -> None:
    workers(2).run(count)
