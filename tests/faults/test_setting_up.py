"""A rank that is killed while the ranks attach: at every stage, the survivors name it, and soon.

One group of processes serves several stages: the survivors of a death make a smaller group and go on to the next stage.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import PeerLostError
from commfuse_dp.transport import exchange as exchanging
from commfuse_dp.transport import select
from commfuse_dp.transport.select import open_transport
from tests.support.processes import RankPipe, RankProcesses

DEADLINE_S = 300.0  # whatever ends sooner has not waited for it
SOON_S = 100.0


def attach(kind: str, die_at: int | None) -> int:
    """Open a transport and expose, as `apply` and the first step do. die_at: the exchange before which this rank is killed.

    Returns the number of exchanges."""
    count = 0
    made = exchanging.exchange_of

    def counted(group: Any) -> Any:
        exchange = made(group)

        def call(item: Any) -> list[Any]:
            nonlocal count
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return exchange(item)

        return call

    select.exchange_of = counted
    try:
        transport, _ = open_transport(
            kind, group=None, inbox_bytes=4096, deadline_s=DEADLINE_S, probe=None, device=torch.device("cpu")
        )
        transport.expose([[64] * dist.get_world_size()])
        transport.close()
    finally:
        select.exchange_of = made
    return count


def join(port: int, name: str, rank: int, ranks: list[int]) -> None:
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))
    dist.barrier()  # the others are through with it, too


def victims(rank: int, pipe: RankPipe, port: int, kind: str, stages: list[int], world_size: int) -> str:
    """Dies, or survives all stages but its own."""
    ranks = list(range(world_size))
    if not stages:
        join(port, "count", rank, ranks)
        return str(attach(kind, None))
    for stage in stages:
        victim = ranks[(0, -1, len(ranks) // 2)[stage % 3]]  # the first rank is the one that the others turn to
        join(port, f"stage {stage}", rank, ranks)
        place = ranks.index(victim)
        start = time.monotonic()
        try:
            attach(kind, stage if rank == victim else None)
            return f"stage {stage}: nothing was raised"
        except PeerLostError as error:
            if error.peer != place or f"lost rank {place}" not in str(error):
                return f"stage {stage}: rank {place} of {len(ranks)} died, rank {ranks.index(rank)} says: {error}"
        except Exception as error:
            return f"stage {stage}: {type(error).__name__}: {error}"
        if time.monotonic() - start > SOON_S:
            return f"stage {stage}: only after {time.monotonic() - start:.0f} s"
        dist.destroy_process_group()
        ranks.remove(victim)
    return "named every time"


@pytest.fixture
def port() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


DEATHS = 4  # of one group of processes


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_rank_that_dies_at_any_stage_is_named(kind: str, step: int, port: int) -> None:
    with RankProcesses(2, victims, port, kind, [], 2) as ranks:
        (count,) = {int(text) for text in ranks.results().values()}
    assert count >= 4
    chosen = range(0, count, step)
    for first in range(0, len(chosen), DEATHS):
        stages = list(chosen[first : first + DEATHS])
        world_size = len(stages) + 2
        with RankProcesses(world_size, victims, port, kind, stages, world_size) as ranks:
            results = ranks.results(timeout_s=120)
        assert len(results) == 2, "too many died"
        assert set(results.values()) == {"named every time"}, results
