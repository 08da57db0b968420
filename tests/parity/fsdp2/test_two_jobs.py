"""Two jobs of two ranks on one host at once, with different settings: neither notices the other."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch.distributed as dist

import commfuse_dp
from commfuse_dp.ports import free_port
from tests.parity.fsdp2 import pair
from tests.support.cells import slow
from tests.support.processes import RankPipe, RankProcesses

STEPS = 4


def _job(rank: int, pipe: RankPipe, ports: tuple[int, int], settings: tuple[dict[str, Any], dict[str, Any]]) -> tuple[str, int]:
    """Ranks 0 and 1 are the first job, 2 and 3 the second: other weights, other data, other settings."""
    job, own = divmod(rank, 2)
    store = dist.TCPStore("127.0.0.1", ports[job], 2, is_master=own == 0)
    dist.init_process_group("gloo", store=store, rank=own, world_size=2, timeout=datetime.timedelta(seconds=60))
    stock, net = pair.build(seed=job), pair.build(seed=job)
    report = commfuse_dp.apply(net, pair.config(**settings[job]))
    for step in range(STEPS):
        pipe.exchange(step)  # all four begin together
        pair.assert_gradients_of_one_step(net, stock, own, 2, step + 10 * job)
    received = report.probe.counters.param_bytes_received
    transport = report.transport
    if job == 1:  # one ends, the other goes on
        commfuse_dp.remove(net)
        dist.destroy_process_group()
    pipe.exchange("ended")
    if job == 0:
        pair.assert_gradients_of_one_step(net, stock, own, 2, STEPS)
        commfuse_dp.remove(net)
        dist.destroy_process_group()
    return transport, received


@pytest.mark.parametrize(
    "settings",
    [
        ({"transport": "shm"}, {"transport": "shm", "order": "ring", "slices_per_rank": 2}),
        slow(({"transport": "tcp", "prefetch_bytes": 1 << 18}, {"transport": "tcp", "inbox_bytes": 1 << 18})),
    ],
    ids=["shm", "tcp"],
)
def test_two_jobs_at_once(settings):
    with RankProcesses(4, _job, (free_port(), free_port()), settings) as ranks:
        results = ranks.results(90)
    for rank, (transport, received) in results.items():
        assert transport.startswith(settings[0]["transport"]) and received > 0, (rank, transport, received)
    assert len(results) == 4
