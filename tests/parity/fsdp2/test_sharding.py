"""How parameters are cut, kept and fetched: resharding, uneven shards, slices, the window, and what is left to FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import engine_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import commfuse_dp
from commfuse_dp import ConfigError
from tests.parity.fsdp2.models import ByteModel, Stack, mean_square, shard_root
from tests.parity.fsdp2.twin import Twin, build, gradients, local, settings
from tests.support.cells import slow


# ---- reshard_after_forward -------------------------------------------------------------------------------------------
def resharding(rank: int, world_size: int, transport: str, reshard: bool | int) -> None:
    with Twin(config=settings(transport), reshard_after_forward=reshard) as twin:
        for _ in range(3):
            twin.step()
        rows = twin.rows
        if type(reshard) is int:
            assert {row.path for row in twin.report.rows} == {"hooks"}
            assert "reshard_after_forward is an int" in rows["layers.0.up.weight"].reason
        else:
            assert rows["layers.0.up.weight"].path == "fused"


@pytest.mark.parametrize(("transport", "reshard"), [("shm", False), ("tcp", True), slow("shm", True), slow("tcp", False)])
def test_reshard_after_forward(workers, transport, reshard):
    workers(3).run(resharding, transport, reshard)


def test_reshard_to_a_smaller_mesh_goes_through_the_hooks(workers):
    workers(4).run(resharding, "tcp", 2)


def gathers(rank: int, world_size: int) -> None:
    """What is kept after forward is fetched once; what is resharded, twice (the window is too small to keep anything)."""
    received = {}
    for reshard in (True, False):
        config = settings("tcp", prefetch_bytes=-(-64 // world_size) * 64 * 4, inbox_bytes=1 << 20, slices_per_rank=1)
        with Twin(lambda: Stack(*[64] * 5, bias=False), config=config, reshard_after_forward=reshard) as twin:
            for _ in range(3):
                moved = twin.counted(lambda: twin.step(mean_square, torch.randn(2, 64, generator=twin.generator)))
            received[reshard] = moved.param_bytes_received
            weights = 4 * sum(p.numel() - local(p).numel() for p in twin.fused.parameters())
            first = weights // 4  # x of the first layer wants no gradient: its weight is needed in forward only
            slack = config.prefetch_bytes  # the slice that is still there at the turn
            expected = 2 * weights - first if reshard else weights
            assert expected - slack <= moved.param_bytes_received <= expected, (reshard, moved, weights)
    assert received[False] < received[True]


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_number_of_gathers_read_off_the_bytes(workers, world_size):
    workers(world_size).run(gathers)


def setters(rank: int, world_size: int) -> None:
    with Twin() as twin:
        for reshard in (False, True):
            twin.each(lambda model, reshard=reshard: model.set_reshard_after_forward(reshard))
            twin.step()
        twin.each(lambda model: (model.unshard(), model.reshard()))
        twin.step()
        twin.each(lambda model: model.set_reshard_after_backward(False))
        twin.backward()
        twin.each(lambda model: [module.reshard() for module in (model, *model.layers)])  # stock shows whole parameters else
        twin.check_gradients()
        twin.update()


def test_setters_between_steps(workers):
    workers(2).run(setters)


# ---- uneven and empty shards -----------------------------------------------------------------------------------------
class Uneven(nn.Module):
    """37 rows, 1 row and 2 rows: ranks with short and with empty shards, also of norms. Ill-conditioned, hence fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 37), nn.Linear(37, 1), nn.Linear(1, 2, bias=False), nn.Linear(2, 6)])
        self.norms = nn.ModuleList([nn.LayerNorm(37), nn.Identity(), nn.RMSNorm(2)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, [*self.norms, torch.tanh], strict=True):
            x = norm(torch.tanh(layer(x)))
        return x


def uneven(
    rank: int, world_size: int, transport: str, all_slices: tuple[int | None, ...] = (None, 2, 3), **options: Any
) -> None:
    for slices in all_slices:
        with Twin(Uneven, config=settings(transport, slices_per_rank=slices), **options) as twin:
            for _ in range(3):
                twin.step(mean_square, torch.randn(4, 5, generator=twin.generator).double())
            assert set(twin.paths.values()) == {"fused", "gathered"}
            weight = twin.fused.layers[1].weight  # of one row
            assert local(weight).shape[0] == (weight.device_mesh.get_coordinate()[-1] == 0)


@pytest.mark.parametrize(("world_size", "transport"), [(3, "shm"), slow(3, "tcp"), slow(4, "tcp")])
def test_uneven_and_empty_shards(workers, world_size, transport):
    workers(world_size).run(uneven, transport)


def sliced(rank: int, world_size: int, transport: str) -> None:
    for slices in (1, 2, 3, 4, 64):  # 64: more than there are rows
        with Twin(config=settings(transport, slices_per_rank=slices)) as twin:
            for _ in range(2):
                twin.step()
            cut = {unit.name: len(unit.params.slices[0]) for unit in engine_of(twin.fused).units}
            assert cut["layers.0.up"] == min(slices, -(-37 // world_size)), cut


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_slices_per_rank(workers, world_size, transport):
    workers(world_size).run(sliced, transport)


# ---- hybrid sharding -------------------------------------------------------------------------------------------------
def hybrid_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(rank: int, world_size: int) -> None:
    """Replicas see different data: each alone would be wrong. Without the all-reduce they keep what they have reduced."""
    with Twin(lambda: ByteModel().double(), mesh=hybrid_mesh(), reshard_after_forward=False) as twin:
        twin.step()
        for reduces in ((True,), (False, True), (False, False, True)):
            for reduce in reduces:
                twin.each(lambda model, reduce=reduce: model.set_requires_all_reduce(reduce))
                twin.backward()
                if not reduce:
                    assert all(p.grad is None for p in twin.fused.parameters())
                    assert all(p.grad is None for p in twin.stock.parameters())
            twin.check_gradients()
            everyone = [None] * world_size
            dist.all_gather_object(everyone, gradients(twin.fused))
            for name, gradient in everyone[rank].items():
                assert torch.equal(gradient, everyone[(rank + 2) % 4][name]), f"{name} differs between replicas"
            twin.update()
        for sync in (False, False, True):  # neither reduce-scatter nor all-reduce
            twin.each(lambda model, sync=sync: model.set_requires_gradient_sync(sync))
            moved = twin.counted(twin.backward)
            assert (moved.grad_bytes_received > 0) == sync
        twin.check_gradients()
        twin.update()


@pytest.mark.slow
def test_hybrid_sharding_accumulates_before_the_all_reduce(workers):
    workers(4).run(hybrid)


def hybrid_uneven(rank: int, world_size: int, *all_slices: int | None) -> None:
    uneven(rank, world_size, "tcp", all_slices, mesh=hybrid_mesh())


@pytest.mark.parametrize("slices", [slow(None), 2, slow(3)])
def test_hybrid_sharding_with_empty_shards(workers, slices):
    workers(4).run(hybrid_uneven, slices)


def two_meshes(rank: int, world_size: int) -> None:
    """One engine serves one group of ranks: what is sharded over others stays with FSDP2, and is named."""
    mesh = hybrid_mesh()

    def shard(model: nn.Module) -> None:
        fully_shard(model.layers[1], mesh=mesh["shard"])
        fully_shard(model)

    with Twin(shard=shard) as twin:
        for _ in range(2):
            twin.step()
        rows = twin.rows
        assert rows["layers.0.up.weight"].path == "fused"
        assert rows["layers.1.up.weight"].path == "stock" and "ranks" in rows["layers.1.up.weight"].reason


def test_a_layer_on_another_mesh_stays_stock(workers):
    workers(4).run(two_meshes)


def columns(rank: int, world_size: int) -> None:
    with Twin(
        lambda: Stack(8, 12, 12, 8),
        config=settings("tcp"),
        shard_placement_fn=lambda param: Shard(1) if tuple(param.shape) == (12, 12) else None,
    ) as twin:
        for _ in range(3):
            twin.step(mean_square, torch.randn(4, 8, generator=twin.generator))
        rows = twin.rows
        assert rows["layers.0.weight"].path == "fused"
        assert rows["layers.1.weight"].path == rows["layers.1.bias"].path == "hooks"
        assert "dim 1" in rows["layers.1.weight"].reason


def test_shards_of_columns_go_through_the_hooks(workers):
    workers(2).run(columns)


# ---- one rank --------------------------------------------------------------------------------------------------------
def alone(rank: int, world_size: int) -> None:
    for options in ({"fuse": "never"}, {"slices_per_rank": 3}, {"prefetch_bytes": 64, "inbox_bytes": 64}):
        with Twin(config=settings("auto", **options)) as twin:
            for sync in (True, False, True):
                twin.each(lambda model, sync=sync: model.set_requires_gradient_sync(sync))
                twin.step(update=False)
            twin.update()
            c = twin.counters
            assert c.param_bytes_received == c.param_bytes_sent == c.grad_bytes_received == c.grad_bytes_sent == 0, c


def test_one_rank_alone(workers):
    workers(1).run(alone)


# ---- the window ------------------------------------------------------------------------------------------------------
def window(rank: int, world_size: int, prefetch: int, slices: int | None, reshard: bool) -> None:
    config = settings("tcp", prefetch_bytes=prefetch, inbox_bytes=8192, slices_per_rank=slices)
    with Twin(config=config, reshard_after_forward=reshard) as twin:
        for _ in range(3):
            twin.step()
        moved = twin.counted(twin.step)
        units = engine_of(twin.fused).units
        largest = max(unit.params.largest_slice for unit in units)
        assert largest <= prefetch
        if reshard:
            assert 0 < twin.counters.window_bytes_peak <= prefetch + largest, (twin.counters, largest)
        assert twin.counters.order_misses == 0
        # Biases are padded to cache lines: at most one line for each part of each slice and pass.
        padding = 3 * 64 * sum(len(unit.slots) * (world_size - 1) for unit in units)
        assert moved.param_bytes_received + moved.grad_bytes_received <= twin.report.minimum_bytes_per_step + padding, moved


def windows(rank: int, world_size: int) -> None:
    for prefetch, slices in ((2048, 1), (2048, 3), (700, None), (1 << 20, None)):
        window(rank, world_size, prefetch, slices, True)
    window(rank, world_size, 700, None, False)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_window_holds_prefetch_bytes_and_one_slice(workers, world_size):
    workers(world_size).run(windows)


def tiny_inbox(rank: int, world_size: int, transport: str) -> None:
    """Each layer's gradient shard is several times as large as the inbox."""
    with Twin(config=settings(transport, inbox_bytes=1024, deadline_s=4.0)) as twin:
        for _ in range(3):
            twin.step()


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_an_inbox_of_few_slices(workers, world_size, transport):
    workers(world_size).run(tiny_inbox, transport)


# ---- what is fused ---------------------------------------------------------------------------------------------------
def never(rank: int, world_size: int, transport: str) -> None:
    with Twin(config=settings(transport, fuse="never")) as twin:
        for _ in range(3):
            twin.step()
        assert set(twin.paths.values()) == {"hooks"}
        assert {row.reason for row in twin.report.rows} == {"fuse='never'"}
        moved = twin.counted(twin.step)
        owed = 4 * sum(local(p).numel() for p in twin.fused.parameters()) * (world_size - 1)
        assert 0.9 * owed <= moved.grad_bytes_received <= 1.3 * owed  # FSDP2 pads uneven shards


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_fuse_never_uses_only_the_hooks(workers, world_size, transport):
    workers(world_size).run(never, transport)


def always(rank: int, world_size: int) -> None:
    with Twin(config=settings(fuse="always")) as twin:
        twin.step()
        assert [name for name, path in twin.paths.items() if path == "fused"] == [
            name for name in twin.paths if any(part in name for part in ("up.", "down.", "head."))
        ]
    model = build(lambda: ByteModel(tied=True), shard_root)
    with pytest.raises(ConfigError, match=r"head|embedding") as caught:
        commfuse_dp.apply(model, settings(fuse="always"))
    assert "tied" in str(caught.value)
    model = build()
    with pytest.raises(ConfigError, match=r"layers\.1\.down"):
        commfuse_dp.apply(model, settings(fuse="always", exclude=("layers.1.down",)))
    commfuse_dp.apply(model, settings())  # a refusal leaves the model as it was
    commfuse_dp.remove(model)


def test_fuse_always_names_what_cannot_be_fused(workers):
    workers(2).run(always)


def excluded(rank: int, world_size: int, transport: str) -> None:
    with Twin(config=settings(transport, exclude=("layers.*.up", "embedding"))) as twin:
        for _ in range(3):
            twin.step()
        rows = twin.rows
        hooked = {name for name, row in rows.items() if row.path == "hooks"}
        assert hooked == {"embedding.weight"} | {f"layers.{i}.up.{p}" for i in range(3) for p in ("weight", "bias")}
        assert rows["layers.0.up.bias"].reason == "excluded by 'layers.*.up'"
        assert rows["layers.0.down.weight"].path == "fused"


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_exclude_patterns(workers, world_size, transport):
    workers(world_size).run(excluded, transport)


def disabled(rank: int, world_size: int) -> None:
    model = build()
    report = commfuse_dp.apply(model, settings(enabled=False))
    assert {row.path for row in report.rows} == {"stock"}
    assert all("forward" not in vars(module) for module in model.modules())


def test_enabled_false_leaves_the_model_alone(workers):
    workers(2).run(disabled)
