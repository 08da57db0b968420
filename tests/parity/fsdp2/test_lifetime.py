"""A model that is dropped takes everything of CommFuse with it, without remove(): memory, descriptors, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from tests.parity.fsdp2 import pair
from tests.support.leftovers import assert_nothing_left, leftovers, shared_memory

ROUNDS = 50


def settled() -> None:
    """What a garbage collection in another thread than the main one has begun to close."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "commfuse-close":
            thread.join(60)


def one_round(rank: int, world_size: int, transport: str, how: str, options: dict[str, Any]) -> list[weakref.ref[nn.Module]]:
    if how == "claimed":
        net = pair.Net(1)
        net = pair.shard(net, ignored_params=commfuse_dp.claim(net, pair.config()).params)
    else:
        net = pair.build(1, **options)
    if how == "read":
        net.run_block = lambda block, x: block(x) * net.head.weight.mean()
    report = commfuse_dp.apply(net, pair.config(transport=transport))
    loss = pair.loss_of(net, pair.batch(rank, world_size, 0))
    loss.backward()
    assert report.transport.startswith(transport) and bool(report.reads) == (how == "read")
    if how == "cut":
        pair.loss_of(net, pair.batch(rank, world_size, 1))  # a graph whose backward never comes
    with torch.no_grad():
        net.blocks[0](torch.ones(1, pair.WIDTH))
    dist.barrier()
    return [weakref.ref(module) for module in net.modules()]


def dropped(rank: int, world_size: int, transport: str, how: str, rounds: int) -> None:
    options = {}
    if how == "replicas":
        options["mesh"] = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicas", "shards"))

    def play(count: int) -> None:
        for _ in range(count):
            alive = one_round(rank, world_size, transport, how, options)
            settled()
            assert not [ref() for ref in alive if ref() is not None], "the model was kept alive"

    play(2)  # whatever is made once in a process
    before = leftovers()
    play(rounds)
    assert_nothing_left(before)
    assert len(shared_memory()) <= len(before.shared_memory)


@pytest.mark.parametrize(
    ("transport", "how", "rounds"),
    [
        ("shm", "adopted", 8),
        ("tcp", "adopted", 8),
        pytest.param("shm", "adopted", ROUNDS, marks=pytest.mark.slow),
        pytest.param("tcp", "adopted", ROUNDS, marks=pytest.mark.slow),
        ("shm", "claimed", 3),
        ("tcp", "cut", 3),
        ("shm", "read", 3),
    ],
)
def test_a_dropped_model_leaves_nothing(workers, transport, how, rounds):
    workers(2).run(dropped, transport, how, rounds, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [8, ROUNDS])
def test_one_with_replicas_leaves_nothing(workers, rounds):
    workers(4).run(dropped, "shm", "replicas", rounds, timeout=200)
