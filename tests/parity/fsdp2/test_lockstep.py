"""FSDP2 with the lockstep transport over real communicators: gloo, CPU tensors, one process per rank.

What NCCL would run is the same code; its streams are simulated here. On a CPU each exchange blocks the host until its peers
have come to it, which is stricter than a GPU: any two ranks that take their steps in different orders stand for ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import engine_of

import commfuse_dp
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import CommFuseError
from commfuse_dp.transport.base import GRAD_LANE, PARAM_LANE
from commfuse_dp.transport.grouped.transport import NcclTransport, open_nccl
from tests.parity.fsdp2.models import ByteModel, Stack, mean_square
from tests.parity.fsdp2.twin import Twin, build, settings
from tests.support.cells import slow
from tests.support.fake_device import FakeWorld

attachment = importlib.import_module("commfuse_dp.integrations.attach.attachment")


@contextmanager
def lockstep() -> Iterator[None]:
    """`apply` opens the transport that it opens on GPUs, on a simulated device of this process."""
    before = attachment.open_for

    def open_for(config: CommFuseConfig, *, group: Any, least_ring: int, **_: Any) -> Any:
        device = FakeWorld(dist.get_world_size(group), deferred=False).devices[dist.get_rank(group)]
        inbox_bytes = max(config.inbox_bytes, least_ring)
        return open_nccl(group, device=device, inbox_bytes=inbox_bytes, deadline_s=config.deadline_s), "for a test"

    attachment.open_for = open_for
    try:
        yield
    finally:
        attachment.open_for = before


def count_exchanges(transport: NcclTransport) -> list[tuple[int, int, int]]:
    """(lane, bytes out, bytes in) of every exchange from now on."""
    calls: list[tuple[int, int, int]] = []
    grouped = transport._core.grouped
    exchange = grouped.exchange

    def noted(lane: int, sends: Any, receives: Any, **more: Any) -> Any:
        calls.append((lane, sum(data.nbytes for _, data in sends), sum(data.nbytes for _, data in receives)))
        return exchange(lane, sends, receives, **more)

    grouped.exchange = noted  # type: ignore[method-assign]
    return calls


def steps(rank: int, world_size: int, order: str, reshard: bool, kernels: str) -> None:
    """Uneven shards (37 rows), several slices, a window of a few of them, evaluation and a skipped block in between."""
    config = settings("p2p", order=order, slices_per_rank=2, prefetch_bytes=1 << 13, inbox_bytes=1 << 14, kernels=kernels)
    with lockstep(), Twin(config=config, reshard_after_forward=reshard) as twin:
        assert isinstance(engine_of(twin.fused).transport, NcclTransport)
        assert "fused" in twin.paths_of("up.weight")
        for number in range(4):
            if number == 2:
                twin.set_order([0, 2])
                ids = twin.batch()[0]
                with torch.no_grad():
                    twin.stock(ids), twin.fused(ids)
            twin.step()


@pytest.mark.parametrize(
    ("world_size", "order", "reshard", "kernels"),
    [
        (2, "pairwise", True, "auto"),
        slow(3, "ring", True, "blas"),
        pytest.param(3, "pairwise", False, "auto", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_stock(workers, world_size, order, reshard, kernels):
    workers(world_size).run(steps, order, reshard, kernels, timeout=90)


def counted(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    config = settings("p2p", slices_per_rank=1, prefetch_bytes=1 << 20, inbox_bytes=1 << 20)
    with lockstep(), Twin(lambda: Stack(*[64] * 5, bias=False), config=config) as twin:
        transport = engine_of(twin.fused).transport
        for number in range(3):
            if number == 2:
                calls = count_exchanges(transport)
            twin.step(mean_square, torch.randn(2, 64, generator=twin.generator))
    return calls


def test_a_step_is_the_fewest_exchanges(workers):
    """Everything fits into the window: one exchange per layer and peer for the parameters, and one for the gradients."""
    for calls in workers(2).run(counted, timeout=60):
        half = 64 * 64 * 4 // 2
        assert sorted(calls) == [(PARAM_LANE, half, half)] * 4 + [(GRAD_LANE, half, half)] * 4


def differ(rank: int, world_size: int) -> str:
    """Rank 1 runs two blocks of equal sizes in another order: every exchange fits, with the slices of another layer."""
    with lockstep():
        model = build(lambda: ByteModel(24, 48))
        commfuse_dp.apply(model, settings("p2p", deadline_s=2.0, inbox_bytes=1 << 16))
        ids = torch.zeros(2, 3, dtype=torch.int64)
        model.order = [2, 1, 0] if rank == 1 else [0, 1, 2]
        passed = 0
        with pytest.raises(CommFuseError) as caught:
            for _ in range(6):
                model(ids).sum().backward()
                passed += 1
        assert passed <= 4  # told at the start of the second step, compared by a thread
        dist.barrier()
        commfuse_dp.remove(model)
    return str(caught.value)


def test_ranks_that_run_different_programs_end_in_an_error(workers):
    texts = workers(2).run(differ, timeout=60)
    assert any("different programs" in text for text in texts), texts
