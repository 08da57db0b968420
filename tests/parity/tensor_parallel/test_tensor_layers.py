"""What tensor-parallel models do beside plain training, with CommFuse as with stock; what stays stock; two dimensions."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT, Served
from commfuse_dp.integrations.tensor_parallel import serving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import commfuse_dp
from commfuse_dp.errors import CommFuseError, ConfigError, MismatchError, TransportError
from tests.parity.tensor_parallel.block import WIDTH, Llama, batch, parallelize, whole
from tests.support.serving import applied, config
from tests.support.workers import WorkerError


def mesh_of(world_size: int) -> Any:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))


def gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and all gradients in full."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1))
    loss.backward()
    found = [loss.detach()]
    for param in model.parameters():
        assert param.grad is not None
        found.append(param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad)
    model.zero_grad()
    return found


def alike(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    assert len(a) == len(b)
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), number


# ---- other ways of calling -------------------------------------------------------------------------------------------
def _reading(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads the gathered input, calls a member twice, and one not at all in evaluation."""
    y = F.silu(self.w1(x)) * self.w3(x + 0) + self.w1(x)
    return self.w2(y)


def _ways(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    tokens = batch(0)
    stock, model = parallelize(whole(), mesh), parallelize(whole(), mesh)
    expected = gradients(stock, tokens)
    with applied(model) as report:
        assert "column" in str(report) and "row" in str(report)
        alike(gradients(model, tokens), expected)
        for reentrant in (False, True):
            model.run_block = lambda block, x, reentrant=reentrant: checkpoint(block, x, use_reentrant=reentrant)
            alike(gradients(model, tokens), expected)
        model.run_block = lambda block, x: block(x)
        twin = copy.deepcopy(model)  # without CommFuse: its hooks are stock's
        alike(gradients(twin, tokens), expected)
        for length in (2, 8, 4, 12):
            with torch.no_grad():
                generated = batch(1, length=length)[:, :-1]
                assert torch.allclose(model(generated), stock(generated), rtol=1e-10, atol=1e-10)
        again = gradients(model, tokens)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients(model, tokens), strict=True))
        with pytest.raises(ConfigError, match="called twice"):
            commfuse_dp.apply(model, config())
        assert not report.gathered_inputs
        for block in (*model.layers, *stock.layers):
            block.feed_forward.forward = _reading.__get__(block.feed_forward)
        alike(gradients(model, tokens), gradients(stock, tokens))
        assert set(report.gathered_inputs) == {"layers.0.feed_forward", "layers.1.feed_forward"} and "once more" in str(report)
    assert type(model.layers[0].attention.wq) is nn.Linear and not hasattr(model, TENSOR_ATTACHMENT)
    alike(gradients(model, tokens), gradients(stock, tokens), 0.0)
    with pytest.raises(ConfigError, match="has no CommFuse"):
        commfuse_dp.remove(model)


def test_ways_of_calling(workers: Any) -> None:
    workers(2).run(_ways, timeout=120)


def _again(rank: int, world_size: int) -> None:
    """A model of which no style is left once it is served."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh_of(world_size), plan)
    with applied(model):
        with pytest.raises(ConfigError, match="called twice"):
            commfuse_dp.apply(model, config())
        with pytest.raises(ConfigError, match="already called for the submodule '0'"):
            commfuse_dp.apply(nn.Sequential(model), config())
    with pytest.raises(ConfigError, match=r"no FSDP2 module in this Linear, and no tensor-parallel layer\. Call fully_shard"):
        commfuse_dp.apply(nn.Linear(4, 4), config())


def test_served_twice(workers: Any) -> None:
    workers(2).run(_again)


def _uneven(rank: int, world_size: int, norm: type[nn.Module]) -> None:
    """Lengths that DTensor ends the process for: one position on three ranks, five on three."""
    model, single = parallelize(whole(norm=norm), mesh_of(world_size)), whole(norm=norm)
    with applied(model):
        for length in (5, 1, 7, 6):
            tokens = batch(3, length=length)
            alike(gradients(model, tokens), gradients(single, tokens))


@pytest.mark.parametrize(
    ("ranks", "norm"),
    [
        (2, nn.LayerNorm),
        pytest.param(3, nn.RMSNorm, marks=pytest.mark.slow),
        pytest.param(4, nn.LayerNorm, marks=pytest.mark.slow),
    ],
)
def test_sequences_that_do_not_divide(workers: Any, ranks: int, norm: type[nn.Module]) -> None:
    workers(ranks).run(_uneven, norm, timeout=120)


# ---- what stays stock ------------------------------------------------------------------------------------------------
class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, base.out_features, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        return y + self.lora_A(x)[..., : y.shape[-1]]


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Quiet(nn.Module):
    """x -> up, side (columns of one gather) -> down (rows)."""

    def __init__(self, change: Callable[[Quiet], None] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Module()
        for name in ("up", "side"):
            setattr(self.inner, name, nn.Linear(WIDTH, WIDTH).double())
        self.inner.down = nn.Linear(WIDTH, WIDTH).double()
        self.inner.forward = lambda x: self.inner.down(self.inner.up(x) + self.inner.side(x))
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def styled(net: Quiet, mesh: Any, output: Any = Shard(1), up: str = "inner.up", local: bool = False) -> Quiet:  # noqa: B008
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=local)
    plan = {"inner": gather, up: ColwiseParallel(), "inner.side": ColwiseParallel()}
    return parallelize_module(net, mesh, {**plan, "inner.down": RowwiseParallel(output_layouts=output)})


def _set(name: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[Quiet], None]:
    return lambda net: setattr(net.inner, name, make(getattr(net.inner, name)))


def _same_twice(net: Quiet) -> None:
    net.inner.side = net.inner.up


def _tie(net: Quiet) -> None:
    net.again = nn.Linear(WIDTH, WIDTH)
    net.again.weight = net.inner.side.weight


LEFT: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "lora": (
        _set("up", Lora),
        {"up": "inner.up.base_layer", "local": True},
        "inner.side",
        "Lora computes with other weights beside it",
    ),
    "subclass": (_set("up", lambda linear: Scaled(WIDTH, WIDTH).double()), {}, "inner.side", "Scaled does not compute what"),
    "output": (None, {"output": Shard(-1)}, "inner.down", "its output is laid out as"),
    "served": (None, {"local": True}, "", ""),
    "frozen": (_set("up", lambda linear: linear.requires_grad_(False)), {}, "", ""),
}


def _left(rank: int, world_size: int, name: str) -> None:
    change, style, left, reason = LEFT[name]
    mesh = mesh_of(world_size)
    nets = [styled(Quiet(change or (lambda net: None)), mesh, **style) for _ in range(2)]
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    with applied(nets[1]) as report:
        rows = {row.name: row for row in report.rows}
        if left:
            assert rows[f"{left}.weight"].path == "stock" and reason in rows[f"{left}.weight"].reason, str(report)
        assert any(row.path in ("column", "row") for row in report.rows)
        outs = [net(x) for net in nets]
        assert torch.allclose(*outs, rtol=1e-12, atol=1e-12)
        for out in outs:
            out.square().sum().backward()
        for a, b in zip(*(net.parameters() for net in nets), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in (a.grad, b.grad)]
                assert torch.allclose(*grads, rtol=1e-12, atol=1e-12)


def _refused(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)

    def reasons(net: nn.Module, **settings: Any) -> dict[str, str]:
        with applied(net, **settings) if settings.get("fuse") != "never" else _kept(net, settings) as report:
            return {row.name: f"{row.path}: {row.reason}" for row in report.rows}

    found = reasons(styled(Quiet(), mesh), exclude=("inner.up",))
    assert found["inner.side.weight"] == (
        "stock: inner.up, which shares its input, is not served: excluded by 'inner.up'"
    ) and found["inner.down.weight"].startswith("row")
    found = reasons(styled(Quiet(), mesh), fuse="never")
    assert set(found.values()) == {"stock: fuse='never'"}
    net = styled(Quiet(lambda net: net.inner.up.to(torch.float32)), mesh)
    found = reasons(net)
    assert "different dtypes" in found["inner.side.weight"]
    net = Quiet()
    net.again = net.inner.down
    found = reasons(styled(net, mesh))
    assert "used as inner.down and as again" in found["inner.down.weight"]
    with pytest.raises(ConfigError, match=re.escape("excluded by 'inner.up'")):
        commfuse_dp.apply(styled(Quiet(), mesh), config(fuse="always", exclude=("inner.up",)))
    with pytest.raises(ConfigError, match="matches no module"):
        commfuse_dp.apply(styled(Quiet(), mesh), config(exclude=("nothing",)))
    net = styled(Quiet(), mesh)
    report = commfuse_dp.apply(net, config(enabled=False))
    assert {row.path for row in report.rows} == {"stock"} and attachment_of(net, TENSOR_ATTACHMENT) is None


class _kept:
    """A report of what was not attached."""

    def __init__(self, net: nn.Module, settings: dict[str, Any]) -> None:
        self._report = commfuse_dp.apply(net, config(**settings))

    def __enter__(self) -> Any:
        return self._report

    def __exit__(self, *_: object) -> None:
        pass


class Named(nn.Module):
    """Gives its first part the input by name, and its second by position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Quiet().inner, Quiet().inner
        for part in (self.first, self.second):
            part.forward = (lambda part, x: part.down(part.up(x) + part.side(x))).__get__(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x=x))


def _by_name(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    nets = [Named() for _ in range(2)]
    for net in nets:
        torch.manual_seed(1)
        for param in net.parameters():
            nn.init.normal_(param)
        plan: dict[str, Any] = {
            "first": PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}, use_local_output=False
            ),
            "second": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
        for part in ("first", "second"):
            plan |= {f"{part}.up": ColwiseParallel(), f"{part}.side": ColwiseParallel()}
            plan[f"{part}.down"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(net, mesh, plan)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    with applied(nets[1]) as report:
        rows = {row.name: f"{row.path}: {row.reason}" for row in report.rows}
        for name in ("up", "side"):
            assert "converts keyword arguments: one positional input is served" in rows[f"first.{name}.weight"]
            assert rows[f"second.{name}.weight"].startswith("column")
        assert torch.allclose(nets[0](x), nets[1](x), rtol=1e-12, atol=1e-12)
        with pytest.raises(MismatchError, match=r"second.*\[2, 3\] positions.*stay with DTensor.*first"):
            nets[1].second(torch.zeros(2, 2 + rank, WIDTH, dtype=torch.float64))


def test_what_stays_stock_and_why(workers: Any) -> None:
    for name in LEFT:
        workers(2).run(_left, name, timeout=60)
    workers(2).run(_refused, timeout=60)
    workers(2).run(_by_name, timeout=60)


def _alone(rank: int, world_size: int) -> None:
    net = styled(Quiet(), mesh_of(1))
    report = commfuse_dp.apply(net, config())
    assert all("one rank: nothing is to be communicated" in row.reason for row in report.rows), str(report)


def test_a_mesh_of_one_rank(workers: Any) -> None:
    workers(1).run(_alone, timeout=60)


def _different(rank: int, world_size: int) -> None:
    commfuse_dp.apply(styled(Quiet(), mesh_of(world_size)), config(save_activations=("shard", "gathered")[rank]))


def _lengths(rank: int, world_size: int) -> None:
    net = styled(Quiet(), mesh_of(world_size))
    with applied(net):
        net(torch.zeros(2 + rank, 3, WIDTH, dtype=torch.float64))


def test_ranks_that_differ(workers: Any) -> None:
    with pytest.raises(WorkerError, match="setting save_activations") as caught:
        workers(2).run(_different, timeout=60)
    assert {kind for kind, _ in caught.value.errors.values()} == {"MismatchError"}
    with pytest.raises(WorkerError, match=r"inner: rank . and rank . do not fit together: batch entries") as caught:
        workers(2).run(_lengths, timeout=60)
    assert len(caught.value.errors) == 2


def _one_fails(rank: int, world_size: int) -> None:
    """While the third module is attached, on rank 1: no rank keeps anything."""
    net, twin = styled(Quiet(), mesh_of(world_size)), styled(Quiet(), mesh_of(world_size))
    hooks = {name: dict(module._forward_pre_hooks) for name, module in net.named_modules()}
    stock, calls = serving.serve, []

    def serve(*args: Any) -> None:
        calls.append(args)
        if rank == 1 and len(calls) == 3:
            raise RuntimeError("no more")
        stock(*args)

    serving.serve = serve
    try:
        with pytest.raises((RuntimeError, CommFuseError), match="no more"):
            commfuse_dp.apply(net, config())
    finally:
        serving.serve = stock
    assert {name: dict(module._forward_pre_hooks) for name, module in net.named_modules()} == hooks
    assert all(not isinstance(module, Served) for module in net.modules())
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    assert torch.equal(net(x), twin(x))
    with applied(net):
        assert torch.allclose(net(x), twin(x), rtol=1e-12, atol=1e-12)


def _dropped(rank: int, world_size: int) -> None:
    net = styled(Quiet(), mesh_of(world_size))
    commfuse_dp.apply(net, config())
    transport = attachment_of(net, TENSOR_ATTACHMENT).transport
    net(torch.randn(2, 3, WIDTH, dtype=torch.float64)).sum().backward()
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None
    with pytest.raises(TransportError):  # closed with its model
        transport.progress()


def test_all_or_nothing_and_nothing_left(workers: Any) -> None:
    workers(2).run(_one_fails, timeout=60)
    workers(2).run(_dropped, timeout=60)


# ---- data parallelism over tensor parallelism ------------------------------------------------------------------------
def _two_dimensions(rank: int, world_size: int, steps: int, inbox_bytes: int) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))

    def build() -> Llama:
        model = parallelize(whole(), mesh["tp"])
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def run(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
        found: list[Any] = []
        for step in range(steps):
            tokens = batch(10 * step + rank // (world_size // 2))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(0, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, *(param.full_tensor().detach().clone() for param in model.parameters())]

    stock = run(build())
    model = build()
    with applied(model, inbox_bytes=inbox_bytes) as report:
        paths = {row.name: row for row in report.rows}
        assert paths["layers.0.attention.wq.weight"].path == "column"
        assert "data parallel: fused" in paths["layers.0.attention.wq.weight"].reason
        assert paths["layers.1.feed_forward.w2.weight"].path == "row"
        assert paths["layers.1.ffn_norm.weight"].path == "hooks"
        assert report.tensor_parallel is not None and "over tensor parallelism: " in str(report)
        alike(run(model), stock, 1e-9)
    assert attachment_of(model) is None and attachment_of(model, TENSOR_ATTACHMENT) is None


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "inbox_bytes"), [(4, 1 << 20), (4, 1 << 12), (8, 1 << 20)])
def test_data_parallelism_over_tensor_parallelism(workers: Any, ranks: int, inbox_bytes: int) -> None:
    """2 x 2 and 2 x 4."""
    workers(ranks).run(_two_dimensions, 5, inbox_bytes, timeout=300)
