"""What a layer may be and what users do to it: frozen, tied, reused, unused, hooked.

In fp64 where nothing else is said: the bound is then 1e-10, far below what any lost or doubled term would leave.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from commfuse_dp import ConfigError
from tests.parity.fsdp2.models import (
    ByteModel,
    mean_square,
    shard_layers,
    shard_root,
    wide_bytes,
)
from tests.parity.fsdp2.twin import Twin, local, settings
from tests.support.cells import slow

# ---- frozen ----------------------------------------------------------------------------------------------------------
FROZEN = {
    "weights of linears": ("up.weight", "down.weight"),
    "biases of linears": ("up.bias",),
    "whole linears": ("up.", "head"),
    "norms": ("norm",),
    "first layers and embedding": ("embedding", "layers.0.", "layers.1."),
    "half of a norm": ("norm.bias",),
    "all but one": ("embedding", "norm", "up.", "down.", "head.weight"),  # and then one is thawed below
}


def freeze(model: nn.Module, parts: tuple[str, ...], frozen: bool = True) -> None:
    for name, parameter in model.named_parameters():
        if any(part in name for part in parts):
            parameter.requires_grad_(not frozen)
    model.get_parameter("layers.1.up.weight").requires_grad_(True)  # something is always left to train


def outputs_with_gradient(model: nn.Module) -> dict[str, bool]:
    """Filled by forwards: module -> whether what it puts out wants a gradient."""
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, output, name=name: found.__setitem__(name, output.requires_grad))
    return found


def frozen(rank: int, world_size: int, transport: str) -> None:
    for what, parts in FROZEN.items():
        with Twin(wide_bytes, config=settings(transport), prepare=lambda model, parts=parts: freeze(model, parts)) as twin:
            stock, fused = twin.each(outputs_with_gradient)
            for _ in range(2):
                moved = twin.counted(lambda twin=twin: twin.step(update=False))
                for name, parameter in twin.fused.named_parameters():
                    assert (parameter.grad is None) == (not parameter.requires_grad), f"{what}: {name}"
                twin.update()
            assert stock == fused and any(stock.values()), what  # else frozen layers keep inputs, and have a backward
            assert all(stock.values()) == ("embedding" not in parts), what
            trained = [p for p in twin.fused.parameters() if p.requires_grad]
            owed = 8 * (world_size - 1) * sum(local(p).numel() for p in trained)
            padding = 64 * (world_size - 1) * len(trained)  # a bias before its weight rows begins a cache line
            assert owed <= moved.grad_bytes_received <= owed + padding, f"{what}: {moved}"
            twin.each(lambda model, parts=parts: freeze(model, parts, frozen=False))
            twin.step()
            assert all(p.requires_grad for p in twin.fused.parameters())


@pytest.mark.parametrize(("world_size", "transport"), [(2, "tcp"), slow(2, "shm"), slow(3, "tcp")])
def test_frozen_and_thawed_parameters(workers, world_size, transport):
    workers(world_size).run(frozen, transport)


# ---- tied ------------------------------------------------------------------------------------------------------------
class TiedLinears(nn.Module):
    """The same weight used by two linears with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)])
        self.layers[2].weight = self.layers[0].weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tied(rank: int, world_size: int, transport: str) -> None:
    for shard in (shard_root, shard_layers):
        with Twin(lambda: ByteModel(tied=True).double(), shard=shard, config=settings(transport)) as twin:
            for _ in range(3):
                twin.step()
            row = twin.rows["embedding.weight"]
            assert row.path == "hooks" and row.reason == "tied to head.weight"
            assert "tied to head.weight" in str(twin.report)
            assert twin.paths_of("up.") == {"fused"}
            assert twin.fused.head.weight is twin.fused.embedding.weight
    with Twin(TiedLinears, shard=shard_root, config=settings(transport)) as twin:
        for _ in range(3):
            twin.step(mean_square, torch.randn(3, 12, generator=twin.generator).double())
        assert twin.paths == {
            "layers.0.weight": "hooks",
            "layers.0.bias": "hooks",
            "layers.1.weight": "fused",
            "layers.1.bias": "fused",
            "layers.2.bias": "hooks",
        }


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_tied_weights_fall_back_and_are_named(workers, world_size, transport):
    workers(world_size).run(tied, transport)


# ---- reused and unused -----------------------------------------------------------------------------------------------
class Reuse(nn.Module):
    """Every kind of path called several times in one forward; `times` is how often."""

    def __init__(self, inner: Callable[[], nn.Module] = lambda: nn.Linear(12, 12)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([inner()])
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)
        self.times = 2
        self.side = 0.0  # weight of an extra output in the loss; 0.0: computed, and not used
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layers[0](self.norm(x)))
        extra = self.layers[0](x)
        out = self.head(x)
        return out if self.side == 0.0 else out + self.side * extra.sum()


def reused(rank: int, world_size: int, transport: str, fuse: str) -> None:
    with Twin(Reuse, config=settings(transport, fuse=fuse)) as twin:
        sent = {}
        for times, side in ((2, 0.0), (3, 0.5), (1, 0.0), (2, 0.5)):
            for model in (twin.stock, twin.fused):
                model.times, model.side = times, side
            moved = twin.counted(lambda: twin.step(mean_square, torch.randn(3, 12, generator=twin.generator).double()))
            sent[times, side] = moved.grad_bytes_sent
        if fuse == "auto":  # the partials of all calls are added up before they travel
            assert len(set(sent.values())) == 1, sent
        for sync in (False, True):
            twin.each(lambda model, sync=sync: model.set_requires_gradient_sync(sync))
            twin.backward(mean_square, torch.randn(3, 12, generator=twin.generator).double())
        twin.check_gradients()


@pytest.mark.parametrize(("transport", "fuse"), [slow("shm", "auto"), ("tcp", "auto"), ("shm", "never")])
def test_a_module_called_several_times(workers, transport, fuse):
    workers(2).run(reused, transport, fuse)


def unused(rank: int, world_size: int, transport: str, fuse: str) -> None:
    with Twin(wide_bytes, config=settings(transport, fuse=fuse)) as twin:
        for order in ([0, 1, 2], [0, 2], [0, 1, 2], [], [1], [1, 1, 0]):
            for model in (twin.stock, twin.fused):
                model.order = order
            twin.step(update=False)
            for index in range(3):
                gradient = twin.fused.layers[index].up.weight.grad
                assert (gradient is not None) == (index in order), (order, index)
            twin.update()


@pytest.mark.parametrize(
    ("world_size", "transport", "fuse"),
    [(2, "shm", "auto"), slow(3, "tcp", "auto"), slow(2, "shm", "never"), slow(2, "p2p", "auto")],
)
def test_modules_unused_in_some_steps(workers, world_size, transport, fuse):
    workers(world_size).run(unused, transport, fuse)


class Branches(nn.Module):
    """Parts of one FSDP2 group that are used in some steps only, so that their group is reduced without them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "conv": nn.Conv1d(1, 8, 8)})])
        self.use = "ab"
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        out = x
        if "a" in self.use:
            out = out + layer["a"](x)
        if "b" in self.use:
            out = out * torch.sigmoid(layer["b"](x))
        if "c" in self.use:
            out = out + layer["conv"](x.unsqueeze(1)).squeeze(2)
        return out


def branches(rank: int, world_size: int) -> None:
    with Twin(Branches, shard=shard_root, config=settings("tcp")) as twin:
        assert twin.paths_of("conv") == {"hooks"} and twin.paths_of(".a.") == {"fused"}
        for use in ("ab", "abc", "c", "b", "ac", "ab"):
            for model in (twin.stock, twin.fused):
                model.use = use
            twin.step(mean_square, torch.randn(3, 8, generator=twin.generator).double())


def branches_of_ranks(rank: int, world_size: int) -> None:
    """Each rank uses other parts; FSDP2 is told to reduce all of them."""

    def shard(model: Branches) -> None:
        shard_root(model)
        model.set_reduce_scatter_unused_params(True)

    with Twin(Branches, shard=shard, config=settings("tcp")) as twin:
        assert twin.paths_of(".a.") == {"hooks"}
        for first, second in (("ab", "a"), ("b", "abc"), ("c", "a")):
            for model in (twin.stock, twin.fused):
                model.use = (first, second)[rank]
            twin.step(mean_square, torch.randn(3, 8, generator=twin.generator).double())
    with Twin(Branches, shard=shard_root, config=settings("tcp")) as twin:
        twin.fused.set_reduce_scatter_unused_params(True)
        with pytest.raises(ConfigError, match=r"set_reduce_scatter_unused_params.* before .*apply"):
            mean_square(twin.fused, torch.randn(3, 8).double()).backward()
        dist.barrier()  # a rank that removes CommFuse would be lost to one that has not come to that layer


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch has no such setter")
def test_parts_that_other_ranks_do_not_use(workers):
    workers(2).run(branches_of_ranks)


def test_unused_parts_of_a_group(workers):
    workers(2).run(branches)


# ---- hooks -----------------------------------------------------------------------------------------------------------
def module_hooks(rank: int, world_size: int, transport: str) -> None:
    """Hooks see and change what they see and change under stock FSDP2, in the same order."""
    logs: tuple[list, list] = ([], [])
    with Twin(wide_bytes, config=settings(transport)) as twin:
        for model, log in zip((twin.stock, twin.fused), logs, strict=True):
            for name in ("layers.0.up", "layers.1.norm", "layers.2.down", "embedding", "head"):
                module = model.get_submodule(name)

                def before(module, args, name=name, log=log):
                    log.append((name, "pre", args[0].double().sum()))
                    return (args[0] if name == "embedding" else args[0] * 1.5,)

                def after(module, args, out, name=name, log=log):
                    log.append((name, "post", out.sum()))
                    return out * 0.5

                def backward(module, grad_input, grad_output, name=name, log=log):
                    log.append((name, "grad", grad_output[0].sum(), None if grad_input[0] is None else grad_input[0].sum()))
                    return None if grad_input[0] is None else (grad_input[0] * 1.25,)

                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
                module.register_full_backward_hook(backward)
        for _ in range(2):
            twin.step()
    stock, fused = logs
    assert [entry[:2] for entry in stock] == [entry[:2] for entry in fused] and len(stock) == 2 * 3 * 5
    for one, other in zip(stock, fused, strict=True):
        for a, b in zip(one[2:], other[2:], strict=True):
            assert (a is None) == (b is None) and (a is None or torch.isclose(a, b, rtol=1e-9, atol=1e-12)), (one, other)


@pytest.mark.parametrize("transport", ["shm", slow("tcp")])
def test_module_hooks(workers, transport):
    workers(2).run(module_hooks, transport)


def gradient_hooks(rank: int, world_size: int, fuse: str) -> None:
    """Once for every backward with synchronisation, after the gradient is complete."""
    seen: tuple[dict, dict] = ({}, {})

    def prepare(twin: Twin) -> None:
        for model, log in zip((twin.stock, twin.fused), seen, strict=True):
            for name, parameter in model.named_parameters():

                def hook(param, name=name, log=log):
                    log.setdefault(name, []).append(local(param.grad).sum().item())

                parameter.register_post_accumulate_grad_hook(hook)

    with Twin(wide_bytes, config=settings("tcp", fuse=fuse)) as twin:
        prepare(twin)
        twin.step()
        for sync in (False, True):
            twin.each(lambda model, sync=sync: model.set_requires_gradient_sync(sync))
            twin.backward()
        twin.update()
        for _ in range(2):  # accumulated: the hook sees the sum
            twin.backward()
        stock, fused = seen
        assert stock.keys() == fused.keys() == {name for name, _ in twin.fused.named_parameters()}
        for name, values in stock.items():
            assert len(values) == 4, (name, values)
            assert values == pytest.approx(fused[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("fuse", ["auto", "never"])
def test_gradient_hooks(workers, fuse):
    workers(2).run(gradient_hooks, fuse)


def step_in_backward(rank: int, world_size: int, transport: str) -> None:
    """The optimizer's step inside the gradient hook, the gradient freed at once: what is published must not be touched."""

    def prepare(model: nn.Module) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def hook(param, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)

    with Twin(wide_bytes, prepare=prepare, config=settings(transport)) as twin:
        for _ in range(3):
            twin.backward()
            assert all(p.grad is None for p in twin.fused.parameters())
            twin.check_parameters()


@pytest.mark.parametrize("transport", [slow("shm"), "tcp"])
def test_optimizer_step_in_the_gradient_hook(workers, transport):
    workers(2).run(step_in_backward, transport)
