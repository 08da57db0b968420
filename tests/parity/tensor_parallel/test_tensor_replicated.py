"""Tensor parallelism without sequence parallelism: as stock, as unsharded; how often a gradient is summed; ways of calling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from commfuse_dp.ops.sequence.rows import MOST_ROUNDS
from tests.parity.tensor_parallel.block import WIDTH, Llama, batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients, mesh_of
from tests.parity.tensor_parallel.test_tensor_parallel import close, full, loss_of, train
from tests.support import graphs
from tests.support.selective import selective
from tests.support.serving import applied
from tests.support.workers import WorkerError


def replicated(mesh: Any, **how: Any) -> Llama:
    return parallelize(whole(**how), mesh, sequence=False)


def _as_stock(rank: int, world_size: int, steps: int, settings: dict[str, Any]) -> None:
    mesh = mesh_of(world_size)
    stock, model = train(replicated(mesh), steps), replicated(mesh)
    with applied(model, **settings) as report:
        paths = {row.name: row.path for row in report.rows}
        assert paths["layers.1.attention.wk.weight"] == paths["output.weight"] == "column"
        assert paths["layers.0.attention.wo.weight"] == paths["layers.1.feed_forward.w2.bias"] == "row"
        assert paths["tok_embeddings.weight"] == paths["norm.weight"] == "stock"
        fused = train(model, steps)
    close(fused, stock, 1e-9)
    close(fused, train(whole(), steps), 1e-9)


@pytest.mark.parametrize(
    ("n", "steps", "settings"),
    [
        (2, 3, {}),
        pytest.param(2, 20, {"slices_per_rank": 3}, marks=pytest.mark.slow),
        pytest.param(3, 20, {"order": "ring", "slices_per_rank": 2}, marks=pytest.mark.slow),
        pytest.param(4, 20, {"transport": "tcp"}, marks=pytest.mark.slow),
    ],
)
def test_as_stock_and_as_unsharded(workers: Any, n: int, steps: int, settings: dict[str, Any]) -> None:
    workers(n).run(_as_stock, steps, settings, timeout=200)


def _errors(rank: int, world_size: int, dtype: torch.dtype, autocast: bool) -> None:
    """Gradients of three microbatches: no farther from float64 than twice stock's are."""
    mesh = mesh_of(world_size)

    def found(model: nn.Module, low: bool) -> dict[str, torch.Tensor]:
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                loss_of(model, batch(step)).backward()
        return {name: full(param.grad).double() for name, param in model.named_parameters()}  # type: ignore[arg-type, union-attr]

    exact = found(whole(bias=False), False)

    def worst(grads: dict[str, torch.Tensor]) -> float:
        return max(float((grads[name] - wanted).abs().max() / wanted.abs().max()) for name, wanted in exact.items())

    stock, model = worst(found(replicated(mesh, dtype=dtype, bias=False), autocast)), replicated(mesh, dtype=dtype, bias=False)
    with applied(model):
        fused = worst(found(model, autocast))
    assert fused <= 2 * stock, (fused, stock)
    assert dtype != torch.float32 or autocast or fused <= 1e-6


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_low_precision(workers: Any, dtype: torch.dtype, autocast: bool) -> None:
    workers(2).run(_errors, dtype, autocast, timeout=60)


# ---- how much moves --------------------------------------------------------------------------------------------------
def _sent(model: nn.Module, tokens: torch.Tensor) -> int:
    """Bytes that tensor parallelism's transport sends in a step."""
    probe = attachment_of(model, TENSOR_ATTACHMENT).transport.probe.counters
    before = probe.snapshot()
    gradients(model, tokens)
    since = probe.since(before)
    return since.param_bytes_sent + since.grad_bytes_sent


def _bytes(rank: int, world_size: int) -> None:
    """x is summed once for wq, wk and wv, and once for w1 and w3: four sums a block; the head's gradient is one more."""
    model, tokens = replicated(mesh_of(world_size)), batch(0, length=48)
    numel = tokens[:, :-1].numel() * WIDTH
    once = 2 * (world_size - 1) * (numel // world_size) * 8
    with applied(model):
        _sent(model, tokens)  # ranks compare what is new to them
        assert {_sent(model, tokens) for _ in range(3)} == {once * (4 * len(model.layers) + 1)}
        for way in (_separate, _twice, _repeated, _shared):
            for block in model.layers:
                block.feed_forward.forward = way.__get__(block.feed_forward)
            sums = 4 if way is _shared else 5
            for _ in range(2):
                _sent(model, tokens)
            assert _sent(model, tokens) == once * (sums * len(model.layers) + 1), way


def _shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _separate(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Two inputs that are alike."""
    return self.w2(F.silu(self.w1(x)) * self.w3(x.clone()))


def _twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The first of them once more, with the same input."""
    return self.w2(F.silu(self.w1(x)) * self.w3(x) + self.w1(x))


def _repeated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Before all of them were called."""
    return self.w2(F.silu(self.w1(x)) * self.w1(x) + self.w3(x))


def test_a_gradient_is_summed_once_for_layers_that_share_an_input(workers: Any) -> None:
    workers(2).run(_bytes)


def _different(rank: int, world_size: int) -> None:
    model = replicated(mesh_of(world_size))
    with applied(model):
        model.layers[0].feed_forward(torch.zeros(2 + rank, 3, WIDTH, dtype=torch.float64))


def test_ranks_that_differ(workers: Any) -> None:
    with pytest.raises(WorkerError, match=r"feed_forward.*rank . and rank . do not fit together: rows=\d here, rows=\d there"):
        workers(2).run(_different, timeout=60)


class Crossed(nn.Module):
    """Layers of one module and one width that are called with two inputs, one of them changed in between, or not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH).double()
        self.way = 0

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        if self.way == 0:
            hidden = self.q(x) * self.k(context) + self.v(context)
        elif self.way == 1:
            hidden = self.k(context) + self.q(context)
        elif self.way == 2:
            hidden = self.k(context)
            context.mul_(2)
            hidden = hidden * self.v(context) + self.q(x)
        else:
            with torch.no_grad():
                hidden = self.k(context)
            hidden = hidden * self.v(context) + self.q(x)
        return self.o(hidden)


def crossed(mesh: Any, *, prepared: bool) -> Crossed:
    """prepared: the layers get DTensors, and the first of their inputs is one DTensor for all."""
    net = Crossed()
    plan: dict[str, Any] = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
    parallelize_module(net, mesh, plan)
    if prepared:
        whole = (Replicate(), Replicate())
        parallelize_module(net, mesh, PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole))
    return net


def _inputs(rank: int, world_size: int, prepared: bool) -> None:
    mesh = mesh_of(world_size)
    stock, net = crossed(mesh, prepared=prepared), crossed(mesh, prepared=prepared)
    generator = torch.Generator().manual_seed(1)
    with applied(net):
        for way in (0, 0, 1, 1, 0, 2, 2, 0, 3, 3, 1, 2, 3, 0):
            found = []
            x, context = (torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
            for one in (stock, net):
                one.way = way
                if way == 2:  # in place, so without gradients
                    with torch.no_grad():
                        found.append([one(x.clone(), context.clone())])
                    continue
                inputs = [t.clone().requires_grad_() for t in (x, context)]
                y = one(*inputs)
                y.square().sum().backward()
                params = (p.grad.full_tensor() if p.grad is not None else torch.zeros(0) for p in one.parameters())
                of_inputs = (t.grad if t.grad is not None else torch.zeros(0) for t in inputs)
                found.append([y.detach(), *of_inputs, *(t.clone() for t in params)])
                one.zero_grad()
            alike(*found)


@pytest.mark.parametrize("prepared", [False, True])
def test_who_gets_which_input_may_change(workers: Any, prepared: bool) -> None:
    workers(2).run(_inputs, prepared)


# ---- ways of calling -------------------------------------------------------------------------------------------------
def _partly(rank: int, world_size: int) -> None:
    """Backwards of a part of the graph, one after the other, and twice: nothing is left over for the next."""
    mesh, tokens = mesh_of(world_size), batch(0)
    stock, model = replicated(mesh), replicated(mesh)
    found = []
    with applied(model):
        for one in (stock, model):
            attention = one.layers[0].attention
            x = torch.linspace(-1, 1, 5 * WIDTH, dtype=torch.float64).view(1, 5, WIDTH).requires_grad_()
            q, k, v = attention.wq(x), attention.wk(x), attention.wv(x)
            parts = [attention.wq.weight, attention.wk.weight, x]
            grads = [torch.autograd.grad(k.square().sum(), parts[1], retain_graph=True)[0]]
            grads += torch.autograd.grad((q.sin() + k + v.detach()).square().sum(), parts, retain_graph=True)
            grads += torch.autograd.grad((q * k * v).sum(), parts, retain_graph=True)
            grads += torch.autograd.grad((q * k * v).sum(), [x, attention.wv.weight])
            found.append([full(grad) for grad in grads])
        alike(*found)
        alike(gradients(model, tokens), gradients(stock, tokens))


def test_backwards_of_a_part(workers: Any) -> None:
    workers(2).run(_partly)


def _ways(rank: int, world_size: int) -> None:
    mesh, tokens = mesh_of(world_size), batch(0)
    stock, model = replicated(mesh), replicated(mesh)
    expected = gradients(stock, tokens)
    with applied(model):
        for run in (*(_checkpointed(flag) for flag in (False, True)), *map(selective, ("products", "sums", "nothing"))):
            model.run_block = run
            for _ in range(2):
                alike(gradients(model, tokens), expected)
        model.run_block = lambda block, x: block(x)
        alike(gradients(copy.deepcopy(model), tokens), expected)  # without CommFuse
        for length in (1, 3, 12):  # fewer rows than ranks, of one sequence
            with torch.no_grad():
                generated = batch(1, size=1, length=length)[:, :-1]
                assert torch.allclose(model(generated), stock(generated), rtol=1e-10, atol=1e-10)
        with torch.inference_mode():
            assert torch.allclose(model(tokens), stock(tokens), rtol=1e-10, atol=1e-10)
        again = gradients(model, tokens)
        assert all(torch.equal(a, b) for a, b in zip(again, gradients(model, tokens), strict=True))
        seen: list[torch.Tensor] = []
        handle = model.layers[0].attention.wk.register_full_backward_hook(lambda module, grads, outs: seen.append(grads[0]))
        alike(gradients(model, tokens), expected)  # a layer that is looked into is DTensor's
        handle.remove()
        assert len(seen) == 1
        alike(gradients(model, tokens), expected)
    assert type(model.layers[0].attention.wq) is nn.Linear
    alike(gradients(model, tokens), expected, 0.0)


def _checkpointed(reentrant: bool) -> Callable[..., Any]:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant)


@pytest.mark.slow
def test_ways_of_calling(workers: Any) -> None:
    workers(2).run(_ways, timeout=120)


def _compiled(rank: int, n: int, backend: str, checkpoints: bool) -> None:
    graphs.fresh()
    mesh, tokens = mesh_of(n), batch(0)
    stock, model = replicated(mesh), replicated(mesh)
    with applied(model):
        for block in model.layers:
            block.compile(backend=backend)
        run = _checkpointed(False) if checkpoints else lambda block, x: block(x)
        for one in (stock, model):
            one.run_block = lambda block, x: run(block, x + 0)  # see test_tensor_compile.py
        close(train(model, 3), train(stock, 3), 1e-9)
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1, counters
        with torch.no_grad():
            assert torch.allclose(model(tokens[:, :7]), stock(tokens[:, :7]), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled(workers: Any, checkpoints: bool) -> None:
    workers(2).run(_compiled, "aot_eager", checkpoints, timeout=200)


def _two_dimensions(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))

    def build() -> Llama:
        model = replicated(mesh["tp"])
        model.layers[1].feed_forward.forward = _repeated.__get__(model.layers[1].feed_forward)
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def run(model: Llama) -> list[Any]:
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False), []
        for step in range(4):
            loss = loss_of(model, batch(10 * step + rank // (world_size // 2)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, *(param.full_tensor().detach().clone() for param in model.parameters())]

    stock, model = run(build()), build()
    with applied(model, **settings) as report:
        rows = {row.name: row for row in report.rows}
        for name, path in (("layers.0.attention.wq.weight", "column"), ("layers.1.feed_forward.w2.weight", "row")):
            assert rows[name].path == path and "data parallel: fused" in rows[name].reason, str(report)
        alike(run(model), stock, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"inbox_bytes": 1 << 12, "slices_per_rank": MOST_ROUNDS}])
def test_data_parallelism_over_it(workers: Any, settings: dict[str, Any]) -> None:
    workers(4).run(_two_dimensions, settings, timeout=300)
