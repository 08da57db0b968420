"""Lightning's Trainer and Fabric with the callback, against the same program without it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.errors import CommFuseError, ConfigError
from tests.support.cells import slow

WIDTH, HIDDEN = 12, 21
CONFIG = CommFuseConfig(inbox_bytes=1 << 20, prefetch_bytes=1 << 20, deadline_s=60.0)


@contextmanager
def launched(rank: int, world_size: int):
    """The variables by which Lightning learns that its processes have been started; the pool has a process group already."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def net(strategy: str = "") -> nn.Sequential:
    torch.manual_seed(3)
    if strategy.startswith("tensor"):
        return nn.Sequential(nn.Linear(WIDTH, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, 5))
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 5))


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    fully_shard([model[0], model[1]], mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Tensor and sequence parallelism, and FSDP2 above it where the mesh has more than one rank for that."""
    rows = Shard(0)
    plan = {
        "0": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1)),
        "2": RowwiseParallel(output_layouts=rows),
    }
    parallelize_module(model, mesh["tensor_parallel"], plan)
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def loader(given: list[torch.Tensor]) -> Any:
    return torch.utils.data.DataLoader(given, batch_size=None)  # type: ignore[arg-type]


def weights(model: nn.Module) -> list[torch.Tensor]:
    out = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in out]


# ---- Trainer ---------------------------------------------------------------------------------------------------------
def fit(rank: int, strategy: str, callbacks: list[Any]) -> tuple[list[float], list[torch.Tensor]]:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([net(strategy)])  # a container that nobody calls, between this and the model
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if strategy != "ddp":
                (shard if strategy == "fsdp2" else parallel)(self.parts[0], self.device_mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.parts[0](batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.losses.append(self.parts[0](batch).square().mean().item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    module, tensor = Module(), 2 if strategy.startswith("tensor") else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy() if strategy == "ddp" else ModelParallelStrategy(dist.get_world_size() // tensor, tensor),
        plugins=[LightningEnvironment()],
        callbacks=callbacks,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5 if strategy == "ddp" else None,  # Lightning has no clipping of its own for ModelParallelStrategy
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader(batches(rank, 6)), loader(batches(10 + rank, 2)))
    for callback in callbacks if strategy != "ddp" else []:  # a second fit keeps what is there; DDP is wrapped anew for it
        callback.on_fit_start(trainer, module)
    return module.losses, weights(module)


def body_trainer(rank: int, world_size: int, strategy: str) -> list[str]:
    from commfuse_dp.integrations.lightning import CommFuseCallback

    with launched(rank, world_size):
        stock = fit(rank, strategy, [])
        callback = CommFuseCallback(CONFIG)
        ours = fit(rank, strategy, [callback])
    assert_equal(ours, stock)
    assert len(callback.reports) == 1
    return [row.path for row in callback.reports[0].rows]


# ---- Fabric ----------------------------------------------------------------------------------------------------------
def train(rank: int, strategy: Any, callbacks: list[Any], *, by: str = "setup") -> tuple[list[float], list[torch.Tensor]]:
    """by: the method of Fabric that sets up the model; the optimizer comes after it, since fully_shard replaces parameters."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[LightningEnvironment()],
        callbacks=callbacks,
    )
    fabric.launch()
    served = getattr(fabric, by)(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(served.parameters(), lr=0.05))
    losses = []
    for number, batch in enumerate(batches(rank, 6)):
        with fabric.no_backward_sync(served, enabled=number % 2 == 0):
            loss = served(batch).square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(served)


def body_fabric(rank: int, world_size: int, way: str) -> list[str]:
    from commfuse_dp.integrations.lightning import CommFuseCallback, parallelized
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    def strategy(function: Callable[..., nn.Module]) -> Any:
        return DDPStrategy() if way == "ddp" else ModelParallelStrategy(function, world_size, 1)

    paths: list[str] = []
    with launched(rank, world_size):
        stock = train(rank, strategy(shard), [])
        if way == "fsdp2 by function":
            ours = train(rank, strategy(parallelized(shard, CONFIG)), [], by="setup_module")
        else:
            callback = CommFuseCallback(CONFIG)
            ours = train(rank, strategy(shard), [callback])
            paths = [row.path for row in callback.reports[0].rows]
    assert_equal(ours, stock)
    return paths


def assert_equal(ours: tuple[list[float], list[torch.Tensor]], stock: tuple[list[float], list[torch.Tensor]]) -> None:
    # fp32: products of row slices are tiled otherwise than the whole, and twelve steps of AdamW carry that on.
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(ours[1], stock[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def body_nothing_to_serve(rank: int, world_size: int) -> str:
    from commfuse_dp.integrations.lightning import CommFuseCallback, parallelized

    with pytest.raises(ConfigError, match="must be a CommFuseConfig, got dict"):
        CommFuseCallback({"fuse": "auto"})
    with pytest.raises(ConfigError) as caught:
        parallelized(lambda model, mesh: model)(net(), None)
    return str(caught.value)


def body_second_part_fails(rank: int, world_size: int) -> None:
    fsdp2 = importlib.import_module("commfuse_dp.integrations.fsdp2.apply")  # the package has a function of this name
    from commfuse_dp.integrations.lightning import CommFuseCallback

    mesh = {"data_parallel": init_device_mesh("cpu", (world_size,))}

    def parts() -> nn.Module:
        whole = nn.Module()
        whole.parts = nn.ModuleList(shard(net(), mesh) for _ in range(2))
        return whole

    def losses(whole: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        found = []
        for given in batches(rank, 3):
            loss = sum(part(given).square().mean() for part in whole.parts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def install(attachment: Any, model: nn.Module, *args: Any) -> Any:
        done = installed(attachment, model, *args)
        if rank == 1 and model is whole.parts[1]:
            raise OSError("on purpose")
        return done

    whole, installed, callback = parts(), fsdp2._install, CommFuseCallback(CONFIG)
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=whole), is_global_zero=rank == 0)
    with mock.patch.object(fsdp2, "_install", install):
        with pytest.raises(OSError if rank == 1 else CommFuseError, match="on purpose"):
            callback.on_fit_start(trainer, whole)
        assert fsdp2.engine_of(whole.parts[0]) is None and fsdp2.engine_of(whole.parts[1]) is None and not callback.reports
    assert losses(whole) == losses(parts())  # both are stock
    callback.on_fit_start(trainer, whole)
    assert len(callback.reports) == 2
    for part in whole.parts:
        commfuse_dp.remove(part)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_trainer_equals_stock(workers, strategy):
    for paths in workers(2).run(body_trainer, strategy, timeout=240):
        assert paths == (["fused"] * 2 + ["gathered"] * 2 + ["fused"] * 2 if strategy == "fsdp2" else ["hooks"] * 6)


@pytest.mark.parametrize(("strategy", "world_size"), [("tensor", 2), slow("tensor and fsdp2", 4)])
def test_tensor_parallelism_equals_stock(workers, strategy, world_size):
    for paths in workers(world_size).run(body_trainer, strategy, timeout=240):
        assert paths == ["column", "column", "row", "row"]


@pytest.mark.parametrize("way", ["fsdp2", "fsdp2 by function", "ddp"])
def test_fabric_equals_stock(workers, way):
    for paths in workers(2).run(body_fabric, way, timeout=240):
        assert way == "fsdp2 by function" or set(paths) == ({"hooks"} if way == "ddp" else {"fused", "gathered"})


def test_a_part_that_fails_leaves_no_other_served(workers):
    workers(2).run(body_second_part_fails, timeout=120)


def test_what_cannot_be_served_is_an_error(workers):
    for message in workers(2).run(body_nothing_to_serve, timeout=120):
        assert "nothing to serve in this Sequential" in message and "ModelParallelStrategy" in message
