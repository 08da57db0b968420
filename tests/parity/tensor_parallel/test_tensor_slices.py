"""`fully_shard` over tensor parallelism: layers take their weights, and give their gradients, by slices of data parallelism.

Rows that the data-parallel ranks do not divide evenly; the oracle is stock DTensor and FSDP2 in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from commfuse_dp.integrations.fsdp2 import engine_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import commfuse_dp
from tests.support import graphs
from tests.support.serving import config

WIDTH, OWN, POSITIONS = 9, 7, 3  # two data-parallel ranks cut 9 rows into 5 and 4, 7 into 4 and 3


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH)
        self.read: Callable[[Block], torch.Tensor | float] = lambda block: 0.0
        self.calls = 1  # of `down`, each with some of the batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.up(x)) * self.gate(x)
        return torch.cat([self.down(part) for part in hidden.chunk(self.calls)]) + self.read(self)


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(2)])
        self.call: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.call(block, x)
        return x


def grid(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))


def build(mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """mesh: of `grid`, or with ("replicate", "shard") in place of "dp"."""
    torch.manual_seed(0)
    over = mesh["dp"] if "dp" in (mesh.mesh_dim_names or ()) else mesh["replicate", "shard"]
    net = Net(OWN * mesh["tp"].size()).to(dtype)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)
    rows = RowwiseParallel(output_layouts=Shard(1))
    for block in net.blocks:
        plan = {"": gather, "up": ColwiseParallel(), "gate": ColwiseParallel(), "down": rows}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=over, **options)
    return fully_shard(net, mesh=over, **options)


def data(mesh: DeviceMesh, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """This rank's positions; other ones on every rank."""
    generator = torch.Generator().manual_seed(100 * step + mesh.get_rank())
    return torch.randn(2, POSITIONS, WIDTH, generator=generator, dtype=dtype)


def train(net: nn.Module, mesh: DeviceMesh, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        loss = net(data(mesh, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.full_tensor().detach().clone() for param in net.parameters())]  # type: ignore[attr-defined]


def gradients(net: nn.Module, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    net.zero_grad()
    net(data(mesh, 7, dtype)).square().mean().backward()
    return [param.grad.full_tensor() for param in net.parameters() if param.grad is not None]  # type: ignore[attr-defined]


def alike(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), number


class applied:
    def __init__(self, net: nn.Module, **settings: Any) -> None:
        self._net, self._settings = net, settings

    def __enter__(self) -> Any:
        report = commfuse_dp.apply(self._net, config(**self._settings))
        for row in report.rows:
            assert row.path in ("column", "row") and "data parallel: fused" in row.reason, row
        return report

    def __exit__(self, *_: object) -> None:
        commfuse_dp.remove(self._net)


def _rows_apart(rank: int, world_size: int) -> None:
    """Other lengths in each row, which are new to its layers at other times, and a layer that is called more often in one."""
    mesh = grid(world_size)
    row = mesh["dp"].get_local_rank()

    def losses(net: Net) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, foreach=False)
        found = []
        for step, (lengths, calls) in enumerate([((3, 3), (1, 1)), ((4, 3), (1, 1)), ((3, 4), (1, 2)), ((5, 3), (2, 1))]):
            for block in net.blocks:
                block.calls = calls[row]  # type: ignore[assignment]
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(2, lengths[row], WIDTH, generator=generator, dtype=torch.float64)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    wanted, net = losses(build(mesh)), build(mesh)
    with applied(net):
        alike(losses(net), wanted)


def test_rows_of_ranks_with_other_lengths_and_calls(workers: Any) -> None:
    workers(4).run(_rows_apart, timeout=60)


def _minimum(net: nn.Module, mesh: DeviceMesh) -> int:
    """Bytes that a rank has to receive from its data-parallel peers: its tensor-parallel part of every parameter twice, less
    its own rows, and what is owed to these."""
    total, tp = 0, mesh["tp"].size()
    for name, param in net.named_parameters():
        whole = param.numel() if name.endswith("down.bias") else param.numel() // tp
        own = param.to_local().numel()  # type: ignore[attr-defined]
        total += 2 * (whole - own) * 8 + (mesh["dp"].size() - 1) * own * 8
    return total


def _as_stock(rank: int, world_size: int, steps: int, settings: dict[str, Any]) -> None:
    mesh = grid(world_size)
    wanted = train(build(mesh), mesh, steps)
    net = build(mesh)
    with applied(net, **settings) as report:
        probe = engine_of(net).probe
        alike(train(net, mesh, steps - 1), train(build(mesh), mesh, steps - 1))
        assert report.minimum_bytes_per_step == _minimum(net, mesh)
        before = probe.counters.snapshot()
        first = gradients(net, mesh)
        moved = probe.counters.since(before)
        assert moved.param_bytes_received + moved.grad_bytes_received <= _minimum(net, mesh), moved
        assert probe.counters.grad_bytes_received > 0
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(net, mesh), strict=True))
    net = build(mesh)
    with applied(net, **settings):
        alike(train(net, mesh, steps), wanted)
    alike(gradients(net, mesh), gradients(net, mesh), 0.0)  # stock's again


@pytest.mark.parametrize(
    ("ranks", "steps", "settings"),
    [
        (4, 2, {}),
        pytest.param(4, 20, {"transport": "tcp", "inbox_bytes": 1 << 10, "prefetch_bytes": 1 << 10}, marks=pytest.mark.slow),
        pytest.param(4, 20, {"slices_per_rank": 2, "save_activations": "gathered"}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"transport": "p2p"}, marks=pytest.mark.slow),
        pytest.param(8, 20, {"order": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_as_stock_in_the_least_bytes(workers: Any, ranks: int, steps: int, settings: dict[str, Any]) -> None:
    workers(ranks).run(_as_stock, steps, settings, timeout=300)


# ---- other ways of calling -------------------------------------------------------------------------------------------
def _checkpointed(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    net.call = lambda block, x: checkpoint(block, x, use_reentrant=False)
    found = gradients(net, mesh)
    net.call = lambda block, x: block(x)
    return found


def _twice(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    """A block that is called twice: its gradients leave with the second backward."""
    net.call = lambda block, x: block(block(x))
    found = gradients(net, mesh)
    net.call = lambda block, x: block(x)
    return found


def _accumulated(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    net.zero_grad()
    for step in range(3):
        net.set_requires_gradient_sync(step == 2)
        net(data(mesh, step)).square().mean().backward()
    return [param.grad.full_tensor() for param in net.parameters() if param.grad is not None]


def _frozen(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    frozen = [net.blocks[0].up.weight, net.blocks[1].down.weight, net.blocks[1].up.bias]
    for param in frozen:
        param.requires_grad_(False)
    found = gradients(net, mesh)
    for param in frozen:
        param.requires_grad_(True)
    return found


def _evaluated(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    with torch.no_grad():
        return [net(data(mesh, 1)[:, :2])]


def _read(net: Any, mesh: DeviceMesh) -> list[torch.Tensor]:
    """A forward that reads a weight beside its layer: as FSDP2 shows it, a DTensor over the tensor-parallel ranks."""

    def read(block: Any) -> torch.Tensor:
        assert isinstance(block.up.weight, DTensor) and block.up.weight.shape == (OWN * mesh["tp"].size(), WIDTH)
        assert block.up.weight.placements == (Shard(0),)
        return block.up.weight.full_tensor().square().sum() + block.down.bias.to_local().sum()

    net.blocks[0].read = read
    found = gradients(net, mesh)
    net.blocks[0].read = lambda block: 0.0
    return found


WAYS = (_checkpointed, _twice, _accumulated, _frozen, _evaluated, _read)


def _ways(rank: int, world_size: int) -> None:
    mesh = grid(world_size)
    stock, net = build(mesh), build(mesh)
    with applied(net):
        for way in WAYS:
            alike(way(net, mesh), way(stock, mesh))
    reshards = build(mesh, reshard_after_forward=False)
    with applied(reshards):
        alike(gradients(reshards, mesh), gradients(stock, mesh))


@pytest.mark.slow
def test_ways_of_calling(workers: Any) -> None:
    workers(4).run(_ways, timeout=120)


def _compiled(rank: int, world_size: int) -> None:
    """In a graph weights are gathered whole; the sequence is moved slice by slice, as ever."""
    graphs.fresh()
    mesh = grid(world_size)
    stock, net = build(mesh), build(mesh)

    def sent() -> int:
        before = probe.snapshot()
        alike(gradients(net, mesh), gradients(stock, mesh))
        return int(probe.since(before).grad_bytes_sent)

    with applied(net):
        probe = attachment_of(net, TENSOR_ATTACHMENT).transport.probe.counters
        eager = sent()
        for block in net.blocks:
            block.compile(backend="aot_eager")
        for _ in range(2):
            assert 0 < sent() <= eager


@pytest.mark.slow
def test_blocks_that_are_compiled(workers: Any) -> None:
    workers(4).run(_compiled, timeout=200)


def _late(rank: int, world_size: int, inbox_bytes: int) -> None:
    """Ranks that come late to different layers, whose peers of both kinds wait for them, with room for one slice."""
    mesh = grid(world_size)
    stock, net = build(mesh), build(mesh)

    def busy(*found: Any) -> None:
        matrix = torch.ones(300, 300)
        for _ in range(40):
            matrix = matrix @ matrix * 1e-3
        if len(found) == 3:
            found[2].register_hook(busy)

    with applied(net, inbox_bytes=inbox_bytes, prefetch_bytes=inbox_bytes):
        net.blocks[rank % 2].up.register_forward_hook(busy)
        for _ in range(3):
            alike(gradients(net, mesh), gradients(stock, mesh))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_that_come_late(workers: Any, ranks: int) -> None:
    workers(ranks).run(_late, 1 << 10, timeout=200)


def _low(rank: int, world_size: int) -> None:
    """bfloat16 by policy and by autocast, against float64: at most twice as far from it as stock is."""
    mesh = grid(world_size)
    exact = gradients(build(mesh), mesh)

    def worst(found: list[torch.Tensor]) -> float:
        return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for cast, options in ((False, {"mp_policy": policy}), (True, {})):
        around = torch.autocast("cpu", dtype=torch.bfloat16) if cast else nullcontext()
        single = {"dtype": torch.float32, **options}
        with around:
            stock = worst(gradients(build(mesh, **single), mesh, torch.float32))
            net = build(mesh, **single)
            with applied(net):
                fused = worst(gradients(net, mesh, torch.float32))
        assert fused <= 2 * stock, (cast, fused, stock)


@pytest.mark.slow
def test_low_precision(workers: Any) -> None:
    workers(4).run(_low, timeout=120)
