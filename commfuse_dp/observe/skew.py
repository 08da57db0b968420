"""How much of a step's exposed communication is the wait for a rank that is behind: no schedule can remove it within a step.

At the end of a backward a rank needs the gradients of all others. Say rank r had computed at S_r and had its gradients at E_r:

    rank 0   ...compute S_0|~~~~~~~~~ waits ~~~~~~~~|E_0         skew of rank 0 = min(E_0, max S) - S_0
    rank 1   ...compute ..................S_1|~~~~~~|E_1         skew of rank 1 = 0, the rest of both is the tail

A rank's last partials leave a little before its S, so this is an upper bound, by at most the compute of its own slice. It is of
ranks that wait on their hosts (CPUs), stock FSDP2's included; what streams of a GPU wait for is not divided so.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch.distributed as dist

from commfuse_dp.observe.clock import clock_offsets
from commfuse_dp.observe.meter import StepMeter

End = tuple[int, int]  # (S, E) of one rank and step, in ns of one clock


def skew_ns(ends: Sequence[End]) -> list[int]:
    """Of one step, by rank. ends: of all ranks that take part in it."""
    last = max((start for start, _ in ends), default=0)
    return [max(0, min(end, last) - start) for start, end in ends]


def skew_ms(meter: StepMeter, group: dist.ProcessGroup | None = None, *, skip: int = 0) -> list[float] | None:
    """Collective over `group`: by rank, the median of its skew over the readings that all ranks have; part of `exposed_ms`.

    None where it is not known: on GPUs, or if some rank has no reading. skip: readings left out at the beginning (warm-up)."""
    mine = [reading.end for reading in list(meter.readings)[skip:]]
    if not dist.is_initialized():
        return [0.0] if mine and None not in mine else None
    everyone: list[list[End | None]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    offsets = clock_offsets(group)
    steps = list(zip(*everyone, strict=False))
    if not steps or any(end is None for step in steps for end in step):
        return None
    found = [
        skew_ns([(end[0] + offset, end[1] + offset) for end, offset in zip(step, offsets, strict=True) if end is not None])
        for step in steps
    ]
    return [median(of_rank) / 1e6 for of_rank in zip(*found, strict=True)]
