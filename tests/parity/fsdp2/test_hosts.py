"""FSDP2 over transport hierarchical: four processes on two pretended hosts, against stock FSDP2."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2.apply import engine_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import commfuse_dp
from commfuse_dp.observe import StepMeter
from commfuse_dp.transport import select
from commfuse_dp.transport.hierarchical import open as hierarchical_open
from tests.parity.fsdp2 import pair
from tests.parity.fsdp2.models import ByteModel
from tests.parity.fsdp2.twin import Twin, settings
from tests.support.workers import WorkerError


@contextmanager
def hosts(*names: str):
    """This rank believes to run on the host that is named at its place."""
    known = select.host_identity
    select.host_identity = lambda: names[dist.get_rank()]
    try:
        yield
    finally:
        select.host_identity = known


def train(rank: int, world_size: int, names: str) -> tuple[str, str, float]:
    """(transport, why, bytes from other hosts per step)"""
    with hosts(*names), Twin(ByteModel, config=settings("auto", order="auto")) as twin:
        meter = StepMeter(twin.report.probe)
        for _ in range(4):
            with meter.step():
                twin.step()
        return twin.report.transport, twin.report.transport_reason, meter.summary().across_bytes_received


@pytest.mark.parametrize("names", ["abab", pytest.param("aabb", marks=pytest.mark.slow)])
def test_training_equals_stock(workers, names):
    for transport, reason, across in workers(4).run(train, names):
        assert transport == "hierarchical" and "2 on each of 2 hosts" in reason
        assert across > 0


@pytest.mark.parametrize("names", ["aaab", pytest.param("abcd", marks=pytest.mark.slow)])
def test_auto_stays_flat_where_hosts_have_other_numbers(workers, names):
    [(transport, _, across), *_] = workers(4).run(train, names)
    assert (transport, across) == ("tcp", 0)


def short_of_memory(rank: int, world_size: int) -> tuple[str, str]:
    """Host b has memory for hardly anything: all ranks decide alike, and order='hierarchical' is obeyed."""
    known, names = hierarchical_open.free_memory, []
    hierarchical_open.free_memory = lambda device, ranks: 1 << 29 if rank < 2 else 10_000
    try:
        with hosts(*"aabb"):
            for order in ("auto", "hierarchical"):
                model = pair.build()
                with pair.applied(model, transport="auto", order=order) as report:
                    names.append(report.transport)
    finally:
        hierarchical_open.free_memory = known
    return names[0], names[1]


def test_auto_does_not_take_a_large_part_of_the_memory(workers):
    assert workers(4).run(short_of_memory) == [("tcp", "hierarchical")] * 4


def with_groups_and_accumulation(rank: int, world_size: int) -> None:
    """A parameter that stays in an FSDP2 group (plain collectives between all ranks), bf16, accumulation, an evaluation."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with hosts(*"aabb"):
        stock, ours = pair.build(mp_policy=precision), pair.build(mp_policy=precision)
        with pair.applied(ours, transport="auto", order="hierarchical") as report:
            assert "hooks" in {row.path for row in report.rows}
            for step in range(3):
                for model in (stock, ours):
                    with torch.no_grad():
                        model(pair.batch(rank % 2, 2, step)[0])
                    for part in range(2):
                        model.set_requires_gradient_sync(part == 1)
                        pair.loss_of(model, pair.batch(rank % 2, 2, 2 * step + part)).backward()
                # A dgrad adds up four slices in bf16 (2^-9 each time), layer after layer
                pair.assert_same_gradients(ours, stock, relative=5e-2)
                for model in (stock, ours):
                    model.zero_grad()


def test_mixed_precision_accumulation_and_evaluation(workers):
    workers(4).run(with_groups_and_accumulation)


def replicated(rank: int, world_size: int) -> None:
    """HSDP inside the shard group of four: here the mesh is one host per replica, which leaves no second level."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with hosts(*"aabb"):
        stock, ours = pair.build(mesh=mesh), pair.build(mesh=mesh)
        with pair.applied(ours, transport="auto", order="auto") as report:
            assert report.transport == "shm", report.transport_reason
            for model in (stock, ours):
                pair.loss_of(model, pair.batch(rank % 2, 2, 0)).backward()
            pair.assert_same_gradients(ours, stock)


def test_a_shard_group_on_one_host_is_flat(workers):
    workers(4).run(replicated)


def late_death(rank: int, world_size: int) -> None:
    with hosts(*"aabb"):
        model = pair.build()
        commfuse_dp.apply(model, pair.config(transport="auto", deadline_s=20.0))
        pair.loss_of(model, pair.batch(rank % 2, 2, 0)).backward()
        if rank == 3:
            import os

            os._exit(7)
        for step in range(3):
            model.zero_grad()
            pair.loss_of(model, pair.batch(rank % 2, 2, step)).backward()


def test_a_rank_that_dies_is_named_on_both_hosts(workers):
    with pytest.raises(WorkerError) as caught:
        workers(4).run(late_death)
    for rank in (0, 1, 2):
        kind, text = caught.value.errors[rank]
        assert kind == "PeerLostError" and "rank 3" in text, (rank, kind, text)


def refused(rank: int, world_size: int) -> list[str]:
    texts = []
    for names, more in (
        ("aaaa", {"order": "hierarchical"}),
        ("abcd", {"order": "hierarchical"}),
        ("aaab", {"order": "hierarchical"}),
        ("aabb", {"order": "hierarchical", "transport": "tcp"}),
    ):
        with hosts(*names):
            model = pair.build()
            try:
                commfuse_dp.apply(model, pair.config(**more))
            except commfuse_dp.CommFuseError as error:
                texts.append(str(error))
            assert engine_of(model) is None
    return texts


def test_a_request_that_cannot_be_met_says_why(workers):
    for texts in workers(4).run(refused):
        one, alone, uneven, named = texts
        assert "all ranks are on one" in one and "a host of its own" in alone
        assert "(0, 1, 2), (3,)" in uneven and "transport='tcp'" in named
        assert all("pairwise" in text or "auto" in text for text in texts)
