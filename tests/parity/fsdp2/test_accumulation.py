"""Gradients over several microbatches, and who divides by what."""

from __future__ import annotations

import pytest
import torch
from commfuse_dp.integrations.fsdp2.apply import engine_of
from torch.distributed.device_mesh import init_device_mesh

from tests.parity.fsdp2.models import ByteModel, token_loss
from tests.parity.fsdp2.twin import Twin, settings
from tests.support.cells import slow


def unsynced(rank: int, world_size: int, transport: str, fuse: str) -> None:
    with Twin(config=settings(transport, fuse=fuse)) as twin:
        twin.step()
        for _ in range(2):
            for last in (False, False, True):
                twin.each(lambda model, last=last: model.set_requires_gradient_sync(last))
                moved = twin.counted(twin.backward)
                twin.check_gradients()  # before the last: none, as with stock
                assert (moved.grad_bytes_received > 0) == (moved.grad_bytes_sent > 0) == last
                assert moved.param_bytes_received > 0
            twin.update()


@pytest.mark.parametrize(
    ("world_size", "transport", "fuse"),
    [slow(2, "shm", "never"), (3, "tcp", "auto"), slow(2, "shm", "auto"), slow(3, "tcp", "never")],
)
def test_microbatches_without_sync_move_no_gradients(workers, world_size, transport, fuse):
    workers(world_size).run(unsynced, transport, fuse)


def partly_synced(rank: int, world_size: int) -> None:
    """The switch belongs to each FSDP module: here only one layer holds back."""
    with Twin() as twin:
        whole = twin.counted(twin.step)
        twin.each(lambda model: model.layers[1].set_requires_gradient_sync(False))
        moved = twin.counted(twin.backward)
        twin.check_gradients()
        assert 0 < moved.grad_bytes_received < whole.grad_bytes_received
        twin.each(lambda model: model.layers[1].set_requires_gradient_sync(True))
        twin.step()


def test_one_layer_without_sync(workers):
    workers(2).run(partly_synced)


FROZEN = {"some": ("layers.0.up.weight", "layers.1.down"), "the first": ("embedding", "layers.0")}


def frozen_between(rank: int, world_size: int, which: str, transport: str) -> None:
    """What was accumulated before a parameter was frozen is reduced with the next synchronised backward, as stock does it."""

    def freeze(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            if name.startswith(FROZEN[which]):
                param.requires_grad_(False)

    with Twin(config=settings(transport)) as twin:
        twin.step()
        twin.each(lambda model: model.set_requires_gradient_sync(False))
        twin.backward()
        twin.each(freeze)
        twin.each(lambda model: model.set_requires_gradient_sync(True))
        twin.backward()
        twin.check_gradients()
        engine = engine_of(twin.fused)
        assert not engine.has_accumulated
        window = engine.parameters._window
        assert (window is None) == (transport == "shm") and (window is None or window._pinned == 0)
        twin.update()
        twin.step()


@pytest.mark.parametrize(("which", "transport"), [("some", "shm"), ("the first", "tcp"), slow("the first", "shm")])
def test_a_parameter_is_frozen_between_microbatches(workers, which, transport):
    workers(2).run(frozen_between, which, transport)


def synced(rank: int, world_size: int) -> None:
    with Twin() as twin:
        one = twin.counted(lambda: twin.step())
        three = twin.counted(lambda: [(twin.backward(), twin.check_gradients()) for _ in range(3)])
        assert three.grad_bytes_received == 3 * one.grad_bytes_received
        twin.update()


def test_accumulation_with_sync_in_every_microbatch(workers):
    workers(2).run(synced)


def last_backward(rank: int, world_size: int) -> None:
    with Twin() as twin:
        for _ in range(2):
            for last in (False, True):
                twin.each(lambda model, last=last: model.set_is_last_backward(last))
                twin.backward()
            twin.check_gradients()
            twin.update()


def test_set_is_last_backward(workers):
    workers(2).run(last_backward)


def divided(rank: int, world_size: int, factor: float, fuse: str) -> None:
    def divide(model: torch.nn.Module) -> None:
        for module in (model, *model.layers):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no PREMUL_SUM, which stock would use

    with Twin(prepare=divide, config=settings(fuse=fuse)) as twin:
        twin.step()
        plain, scaled = {}, {}
        batch = twin.batch()
        for out in (scaled, plain):
            token_loss(twin.fused, batch).backward()
            out.update({name: p.grad.to_local().clone() for name, p in twin.fused.named_parameters()})
            twin.fused.zero_grad()
            for module in (twin.fused, *twin.fused.layers):
                module.set_gradient_divide_factor(float(world_size))
        for name, gradient in plain.items():  # not only equal to stock: really divided by the factor
            torch.testing.assert_close(scaled[name] * factor, gradient * world_size, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("factor", "fuse"), [(1.0, "never"), (3.0, "auto"), slow(1.0, "auto"), slow(3.0, "never")])
def test_gradient_divide_factor(workers, factor, fuse):
    workers(2).run(divided, factor, fuse)


def hybrid(rank: int, world_size: int, transport: str, fuse: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with Twin(config=settings(transport, fuse=fuse), mesh=mesh) as twin:
        assert twin.report.world_size == 2
        for _ in range(3):
            twin.step()
        for reduce in (False, False, True):  # reduce-scatter at every microbatch, all-reduce at the last only
            twin.each(lambda model, reduce=reduce: model.set_requires_all_reduce(reduce))
            moved = twin.counted(twin.backward)
            assert moved.grad_bytes_received > 0
        twin.check_gradients()
        twin.update()
        for sync in (False, True):
            twin.each(lambda model, sync=sync: model.set_requires_gradient_sync(sync))
            twin.backward()
        twin.check_gradients()


@pytest.mark.parametrize(("transport", "fuse"), [slow("shm", "auto"), ("tcp", "auto"), slow("shm", "never")])
def test_hybrid_sharding(workers, transport, fuse):
    workers(4).run(hybrid, transport, fuse)


def hybrid_wide(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with Twin(lambda: ByteModel().double(), mesh=mesh) as twin:
        for _ in range(3):
            twin.step()


@pytest.mark.slow
def test_hybrid_sharding_in_fp64(workers):
    workers(4).run(hybrid_wide)
