"""One time axis for the spans of all ranks.

`CLOCK_MONOTONIC` is one clock for all processes of a host (and of a Linux time namespace), so ranks that share both need no
correction. A rank elsewhere measures its offset to rank 0 by round trips: the one with the shortest way there and back bounds
the error by half its duration (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from commfuse_dp.probe import now_ns

ROUNDS = 16


def clock_domain() -> str:
    """Name of the clock that `now_ns` reads here: equal on two ranks exactly if their times can be compared as they are."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:  # no Linux: the host's name is the best there is
        return platform.node()


def clock_offsets(
    group: dist.ProcessGroup | None = None, *, clock: Callable[[], int] = now_ns, domain: str | None = None
) -> list[int]:
    """Collective. Nanoseconds to add to each rank's times to get those of rank 0's clock (group ranks; entry 0 is 0)."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    domains: list[str] = [""] * world_size
    dist.all_gather_object(domains, clock_domain() if domain is None else domain, group=group)
    offsets = [0] * world_size
    for other in range(1, world_size):
        if domains[other] == domains[0]:
            continue
        if rank in (0, other):
            offsets[other] = _round_trips(other, rank, group, clock)
    gathered: list[list[int]] = [[]] * world_size
    dist.all_gather_object(gathered, offsets, group=group)
    return gathered[0]


def _round_trips(other: int, rank: int, group: dist.ProcessGroup | None, clock: Callable[[], int]) -> int:
    """Between rank 0 and `other`; on rank 0 the offset of `other`, on `other` 0 (rank 0 tells everybody afterwards)."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    message = torch.zeros(1, dtype=torch.int64, device=device)
    best: tuple[int, int] | None = None
    for _ in range(ROUNDS):
        if rank == 0:
            asked = clock()
            dist.send(message, group=group, group_dst=other)
            dist.recv(message, group=group, group_src=other)
            answered = clock()
            theirs = int(message.item())
            best = min(best or (1 << 62, 0), (answered - asked, (asked + answered) // 2 - theirs))
        else:
            dist.recv(message, group=group, group_src=0)
            message.fill_(clock())
            dist.send(message, group=group, group_dst=0)
    return best[1] if best else 0
