"""Process groups that torch's own tests have: ranks as threads of one process, and ranks that do not exist."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg

import commfuse_dp
from commfuse_dp import ConfigError
from tests.parity.fsdp2 import pair
from tests.support.threaded_groups import as_threads
from tests.support.versions import NEEDS_THREADS


def train_as_threads(rank: int, world_size: int, ranks: int, transport: str) -> None:
    whole = pair.Net(2)  # of one process: threads share the random numbers

    def body(rank: int) -> dict[str, int]:
        stock, net = (pair.shard(copy.deepcopy(whole)) for _ in range(2))
        with pair.applied(net, transport=transport) as report:
            for step in range(3):
                pair.assert_gradients_of_one_step(net, stock, rank, ranks, step)
            with torch.no_grad():
                net.head(torch.ones(1, pair.WIDTH))
        return report.numel_by_path()

    for found in as_threads(ranks, body):
        assert set(found) == {"fused", "gathered", "hooks"}


@NEEDS_THREADS
@pytest.mark.parametrize(("ranks", "transport"), [(3, "shm"), (2, "tcp")])
def test_ranks_that_are_threads_train_as_with_stock(workers, ranks, transport):
    workers(1).run(train_as_threads, ranks, transport)


def refused_as_threads(rank: int, world_size: int, ranks: int, transport: str, wanted: str) -> None:
    def body(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")) if ranks > 2 else None
        net = pair.build(1, **({"mesh": mesh} if mesh is not None else {}))
        with pytest.raises(ConfigError) as error:
            commfuse_dp.apply(net, pair.config(transport=transport))
        return str(error.value)

    for text in as_threads(ranks, body):
        assert wanted in text and "'threaded'" in text, text


@pytest.mark.parametrize(("ranks", "transport", "wanted"), [(2, "p2p", "sends and receives"), (4, "auto", "replicas")])
def test_what_threads_cannot_do_is_refused(workers, ranks, transport, wanted):
    workers(1).run(refused_as_threads, ranks, transport, wanted)


def nobody_there(rank: int, world_size: int) -> None:
    """Was found by nobody before the deadline, and then put down to a slow peer."""
    assert fake_pg.FakeStore is not None  # the import makes the backend known
    group = dist.new_group([0, 1], backend="fake")
    net = pair.build(1, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shards",)))
    with pytest.raises(ConfigError, match=r"'fake'.*enabled=False"):
        commfuse_dp.apply(net, pair.config())
    dist.destroy_process_group(group)


def test_ranks_that_do_not_exist_are_not_waited_for(workers):
    workers(2).run(nobody_there)
