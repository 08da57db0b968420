"""Process groups of torch's own tests: ranks as threads of one process, with collectives between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from tests.support.threads import ExchangeFn, run_ranks

T = TypeVar("T")


def as_threads(world_size: int, body: Callable[[int], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run body(rank) in a thread for each rank of a process group of torch's backend 'threaded'. In a process that has no group
    of another kind: not in that of the tests."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 looks for it when groups are destroyed
        multi_threaded_pg.ThreadLocalWorld.comms = []
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def run(rank: int, exchange: ExchangeFn) -> T:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
        try:
            return body(rank)
        except BaseException as error:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # its other ranks wait no more
            raise
        finally:
            dist.destroy_process_group()

    try:
        return run_ranks(world_size, run, timeout_s=timeout_s)
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
