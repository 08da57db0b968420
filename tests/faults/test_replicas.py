"""An exception under hybrid sharding: in a backward, on all ranks, on a replica, on a rank; in a validation of a replica."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import engine_of
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp import CommFuseError
from commfuse_dp.transport import kept
from tests.parity.fsdp2 import pair
from tests.parity.fsdp2.test_sharding import hybrid_mesh
from tests.parity.tensor_parallel import test_tensor_slices as slices
from tests.support import serving
from tests.support.raising import Boom, blow, blow_in_backward

BROKEN = 2  # step


def validate(net: torch.nn.Module, rank: int, world_size: int, *, wrong: bool) -> None:
    """One replica alone: a forward, and one that an exception breaks off."""
    handles = [net.get_submodule("blocks.1.up").register_forward_pre_hook(blow)] if wrong else []
    for grad in (False, True):
        try:
            with torch.set_grad_enabled(grad and not wrong):
                pair.loss_of(net, pair.batch(rank, world_size, 0, 8))
        except Boom:
            assert wrong
    for handle in handles:
        handle.remove()


def broken(rank: int, world_size: int, bad: tuple[int, ...], place: str, validating: tuple[int, ...] = ()) -> list[str]:
    """Every rank catches what is raised and goes on. What it got in the broken step and in the one after it."""
    stock, net = (pair.build(2, mesh=hybrid_mesh()) for _ in range(2))
    batches = [pair.batch(rank, world_size, step, 8) for step in range(BROKEN + 2)]
    wanted = []
    for data in batches:
        stock.zero_grad()
        pair.loss_of(stock, data).backward()
        wanted.append(pair.gradients(stock))
    commfuse_dp.apply(net, pair.config(deadline_s=60.0))
    found = []
    for step, data in enumerate(batches):
        net.zero_grad()
        if rank in validating:
            for wrong in (False, True, False):
                validate(net, rank, world_size, wrong=wrong)
        handle = None
        if step == BROKEN and rank in bad:
            handle = net.get_submodule(place).register_full_backward_pre_hook(blow)
        try:
            pair.loss_of(net, data).backward()
        except (Boom, CommFuseError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            for name, grad in pair.gradients(net).items():
                torch.testing.assert_close(grad, wanted[step][name], rtol=1e-5, atol=1e-6)
            if step >= BROKEN:
                found.append("")
        if handle is not None:
            handle.remove()
    commfuse_dp.remove(net)
    dist.barrier()
    net.zero_grad()
    pair.loss_of(net, batches[0]).backward()  # stock again
    for name, grad in pair.gradients(net).items():
        torch.testing.assert_close(grad, wanted[0][name], rtol=1e-5, atol=1e-6)
    return found


def test_on_all_ranks_the_next_step_goes_on(workers):
    for found in workers(4).run(broken, (0, 1, 2, 3), "blocks.0.up"):
        assert found == ["Boom: no more", ""]


@pytest.mark.parametrize("bad", [(0, 1, 2, 3), pytest.param((), marks=pytest.mark.slow)])
def test_a_replica_may_validate_more_often(workers, bad):
    """And meet exceptions in it: replicas count what they sum, not the forwards between."""
    for found in workers(4).run(broken, bad, "blocks.0.up", (2, 3), timeout=50):
        assert found == ["Boom: no more" if bad else "", ""]


@pytest.mark.parametrize(
    ("bad", "place"), [((0, 1), "blocks.0.up"), pytest.param((0,), "blocks.1.norm", marks=pytest.mark.slow)]
)
def test_on_some_replicas_all_ranks_raise_soon(workers, bad, place):
    """Far before the deadline. The step was broken on one replica: the others have summed with nobody, and cannot go on."""
    for rank, (first, second) in enumerate(workers(4).run(broken, bad, place, timeout=50)):
        assert first.startswith("Boom" if rank in bad else ""), (rank, first)
        assert second.startswith(("CommFuseError", "PeerLostError")), (rank, first, second)
        assert "exception in its backward" in second, (rank, second)


def taking_turns(rank: int, world_size: int) -> tuple[int, int]:
    """Models that live at the same time, and one after the other: communicators made for the first two, and for all."""

    def step(*nets: torch.nn.Module) -> None:
        losses = [pair.loss_of(net, pair.batch(rank, world_size, 0, 8)) for net in nets]
        for loss in losses:
            loss.backward()

    def check(*nets: torch.nn.Module) -> None:
        for _ in range(2):
            step(*nets)
            for net in nets:
                for name, grad in pair.gradients(net).items():
                    torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-6)
                net.zero_grad()

    kept._idle.clear()  # of tests before
    mesh = hybrid_mesh()
    stock, *nets = (pair.build(1, mesh=mesh) for _ in range(4))
    step(stock)
    wanted = pair.gradients(stock)
    made = sum(kept.made.values())
    for net in nets[:2]:
        commfuse_dp.apply(net, pair.config(deadline_s=60.0))
    two = sum(kept.made.values()) - made
    check(nets[0], nets[1])
    commfuse_dp.remove(nets[0])
    commfuse_dp.apply(nets[2], pair.config(deadline_s=60.0))
    check(nets[1], nets[2])
    if rank >= world_size // 2:  # one replica leaves its communicators as a backward that was broken off does
        engine = engine_of(nets[2])
        assert engine is not None and engine.gradients._replicas is not None
        engine.gradients._replicas.tell_broken("a hook")
    commfuse_dp.remove(nets[2])
    commfuse_dp.apply(nets[0], pair.config(deadline_s=60.0))
    check(nets[0], nets[1])
    for net in nets[:2]:
        commfuse_dp.remove(net)
    return two, sum(kept.made.values()) - made


def test_a_communicator_serves_one_model_at_a_time_and_then_the_next(workers):
    """The third model takes the first one's; what some replicas left in the middle of a step is taken by nobody."""
    assert workers(4).run(taking_turns, timeout=100) == [(2, 3)] * 4


def over_tensor_parallelism(rank: int, world_size: int, bad: tuple[int, ...]) -> tuple[str, str]:
    """2 replicas x 2 shards x 2 tensor-parallel ranks: what a rank got in a broken step, and in the one after it."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    wanted, net = slices.gradients(slices.build(mesh), mesh), slices.build(mesh)
    found = []
    with serving.applied(net, deadline_s=60.0):
        slices.alike(slices.gradients(net, mesh), wanted)
        for broken_off in (True, False):
            handle = net.blocks[1].down.register_forward_hook(blow_in_backward) if broken_off and rank in bad else None
            try:
                net.zero_grad()
                net(slices.data(mesh, 7)).square().mean().backward()
                found.append("")
            except (Boom, CommFuseError) as error:
                found.append(f"{type(error).__name__}: {error}")
            if handle is not None:
                handle.remove()
        if not found[-1]:
            slices.alike([param.grad.full_tensor() for param in net.parameters()], wanted)
    return found[0], found[1]


@pytest.mark.slow
def test_over_tensor_parallelism_on_all_ranks(workers):
    for found in workers(8).run(over_tensor_parallelism, tuple(range(8)), timeout=200):
        assert found == ("Boom: no more", "")


@pytest.mark.slow
def test_over_tensor_parallelism_on_one_rank(workers):
    """No rank goes on, and no rank waits for its deadline."""
    for rank, (first, second) in enumerate(workers(8).run(over_tensor_parallelism, (5,), timeout=200)):
        assert first.startswith("Boom") == (rank == 5), (rank, first)
        assert second.startswith(("CommFuseError", "BrokenStepError", "PeerLostError")), (rank, first, second)
        assert "exception in its backward" in first + second or rank == 5, (rank, first, second)
