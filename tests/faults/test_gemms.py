"""An exception inside a GEMM of a served layer, in forward or backward: the next steps are stock's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_dp.errors import BrokenStepError
from tests.parity.fsdp2.models import token_loss, wide_bytes
from tests.parity.fsdp2.twin import Twin, settings
from tests.support.cells import slow
from tests.support.raising import Boom

GEMMS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}


class Counting(TorchDispatchMode):
    """Counts GEMMs, of the autograd thread, too; number `fail` (from 0) raises Boom."""

    sees_inside_commfuse = True

    def __init__(self, fail: int = -1) -> None:
        super().__init__()
        self.count, self._fail = 0, fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in GEMMS:
            self.count += 1
            if self.count == self._fail + 1:
                raise Boom(f"GEMM {self._fail}")
        return func(*args, **(kwargs or {}))


def failing(rank: int, world_size: int, transport: str, victims: tuple[int, ...], every: int) -> int:
    """GEMM number 0, every, 2 every, ... of a step raises on the victims. Returns how many GEMMs a step has."""
    with Twin(wide_bytes, config=settings(transport, prefetch_bytes=8192)) as twin:
        twin.step()
        with Counting() as counting:
            token_loss(twin.fused, twin.batch()).backward()
        twin.fused.zero_grad()
        counts: list[Any] = [None] * world_size
        dist.all_gather_object(counts, counting.count)
        for number in range(0, min(counts), every):
            with Counting(number) if rank in victims else nullcontext():
                try:
                    token_loss(twin.fused, twin.batch()).backward()
                    through = True
                except (Boom, BrokenStepError) as error:
                    assert isinstance(error, Boom) == (rank in victims), (number, error)
                    through = False
            assert not (through and rank in victims), number
            twin.fused.zero_grad()
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, through)
            if any(everyone):  # their optimizers may have moved alone: told once
                with pytest.raises(BrokenStepError, match="went through with it"):
                    token_loss(twin.fused, twin.batch()).backward()
                twin.fused.zero_grad()
                dist.barrier()
            twin.step()
            twin.step()
        return counting.count


@pytest.mark.parametrize(
    ("world_size", "transport", "victims", "every"),
    [
        (2, "shm", (0,), 9),
        (2, "tcp", (0, 1), 11),
        slow(2, "shm", (0, 1), 1),
        slow(2, "tcp", (1,), 1),
        slow(2, "shm", (1,), 1),
        slow(3, "tcp", (1,), 2),
    ],
)
def test_an_exception_inside_a_gemm(workers, world_size, transport, victims, every):
    counts = workers(world_size).run(failing, transport, victims, every, timeout=200)
    assert min(counts) > 3 * every or (every == 1 and min(counts) > 20), counts
