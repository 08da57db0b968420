"""Copies of what is served compute with their own weights, or raise as copies of stock FSDP2 do; never with the original's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

import commfuse_dp
from tests.parity.fsdp2 import pair
from tests.support import graphs


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_same_dictionary(module: nn.Module) -> nn.Module:
    """As torch.nn.parallel.replicate makes replicas."""
    twin = type(module).__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: None if param is None else param.detach() for name, param in module._parameters.items()}
    return twin


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "a copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "AveragedModel": AveragedModel,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "the same dictionary": of_same_dictionary,
}


def whole(param: Any) -> torch.Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def make_plain(module: nn.Module, fill: float) -> None:
    """Weights of its own, whole on every rank."""
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(torch.full(param.shape, fill)))


def inputs() -> dict[str, torch.Tensor]:
    return {
        "embedding": torch.arange(4) % pair.TOKENS,
        "blocks.0": torch.randn(4, pair.WIDTH),
        "blocks.0.norm": torch.randn(4, pair.WIDTH),
        "blocks.0.up": torch.randn(4, pair.WIDTH),
        "blocks.0.down": torch.randn(4, pair.HIDDEN),
        "head": torch.randn(4, pair.WIDTH),
    }


def layers(net: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for name, x in inputs().items():
        if name != "blocks.0":
            yield name, net.get_submodule(name), x


def prepared(kind: str) -> tuple[nn.Module, Any]:
    """A model, and CommFuse for it."""
    if kind == "adopted":
        net = pair.build(1)
    else:
        torch.manual_seed(0)
        net = pair.Net(1)
        net = pair.shard(net, ignored_params=commfuse_dp.claim(net, pair.config()).params)
    return net, commfuse_dp.apply(net, pair.config())


def copies_of_layers(rank: int, world_size: int, kind: str) -> int:
    torch.manual_seed(rank)
    net, report = prepared(kind)
    raised = 0
    for name, layer, x in layers(net):
        expected = layer(x).detach()
        for how, duplicate in COPIES.items():
            before = report.probe.counters.snapshot()
            twin = duplicate(layer)
            inner = twin.module if how == "AveragedModel" else twin
            # As a copy of a layer that FSDP2 has sharded: sharded parameters, that an ordinary tensor does not go with.
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                twin(x)
            raised += 1
            if how == "copy.copy":
                continue  # shares its dictionary of parameters with the original: no weights of its own
            make_plain(inner, 0.0)
            y = twin(x)
            torch.testing.assert_close(y.detach(), torch.zeros_like(expected), rtol=0, atol=0)
            y.sum().backward()
            assert all(param.grad is not None for param in inner.parameters()), (name, how)  # its own
            moved = report.probe.counters.since(before)
            assert moved.param_bytes_received == moved.grad_bytes_received == 0, (name, how)
        torch.testing.assert_close(layer(x).detach(), expected, rtol=0, atol=0)  # served as ever
    assert all(param.grad is None for param in net.parameters())
    commfuse_dp.remove(net)
    return raised


@pytest.mark.parametrize("kind", ["adopted", "claimed"])
def test_copies_of_layers_compute_with_their_own_weights(workers, kind):
    assert workers(2).run(copies_of_layers, kind, timeout=120) == [5 * len(COPIES)] * 2


class Parts(nn.Module):
    """Of which only the linears are given to fully_shard, or only the whole: the parts between are ordinary modules."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def unpicklable() -> Any:
    """A class that FSDP2 has made, or what it has put a function into, as pickle says of both."""
    return pytest.raises((pickle.PicklingError, AttributeError), match=r"(?i)can.t (pickle|get) .*(FSDP|local object)")


def copies_of_models(rank: int, world_size: int) -> None:
    x = torch.randn(3, 6)
    for sharded, refusal in (("root", RuntimeError), ("linears", AssertionError)):
        torch.manual_seed(0)
        models = [Parts(), Parts()]
        for model in models:
            for module in [model] if sharded == "root" else [model.part[0], model.part[2]]:
                fully_shard(module)
        commfuse_dp.apply(models[1], pair.config())
        y = models[1](x).detach()
        for model in models:  # stock, then CommFuse: the same refusals
            with pytest.raises(refusal):
                copy.deepcopy(model.part)(x)
            for how in ("pickle", "torch.save"):
                if sharded == "root" and model is models[1]:  # ours is shards without FSDP2, which cannot be called
                    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                        COPIES[how](model.part)(x)
                else:
                    with unpicklable():
                        COPIES[how](model.part)
            with pytest.raises(AssertionError, match="deepcopy"):
                AveragedModel(model)
            with unpicklable():
                pickle.dumps(model)
        if sharded == "root":
            twin = copy.deepcopy(copy.deepcopy(models[1].part))
            make_plain(twin, 0.0)
            assert not twin(x).any() and models[1](x).any()
        torch.testing.assert_close(copy.copy(models[1])(x).detach(), y, rtol=0, atol=0)  # the same layers
        commfuse_dp.remove(models[1])


def test_copies_of_blocks_and_models(workers):
    workers(2).run(copies_of_models)


def copies_of_claimed_models(rank: int, world_size: int) -> None:
    """Blocks and the root refuse, as those of stock do."""
    net, _ = prepared("claimed")
    x = inputs()["blocks.0"]
    y = net.blocks[0](x).detach()
    for module in (net.blocks[0], net):
        for refused in (AveragedModel, copy.deepcopy):
            with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
                refused(module)
        with unpicklable():
            pickle.dumps(module)
    torch.testing.assert_close(net.blocks[0](x).detach(), y, rtol=0, atol=0)
    commfuse_dp.remove(net)


def test_copies_of_claimed_blocks_and_models(workers):
    workers(2).run(copies_of_claimed_models)


def called_functionally(rank: int, world_size: int, compiled: bool) -> None:
    graphs.fresh()
    net, other = pair.build(2), pair.build(2, seed=1)
    report = commfuse_dp.apply(net, pair.config())
    if compiled:
        for block in (*net.blocks, net.head):
            block.compile(backend="aot_eager")
    # A layer with whole weights of another model.
    x = torch.randn(4, pair.WIDTH)
    pair.loss_of(net, pair.batch(rank, world_size, 0)).backward()
    before = report.probe.counters.snapshot()
    weights = {name: nn.Parameter(whole(param)) for name, param in other.head.named_parameters()}
    y = functional_call(net.head, weights, (x,))
    torch.testing.assert_close(y, F.linear(x, weights["weight"], weights["bias"]), rtol=1e-6, atol=1e-6)
    assert all(grad is not None for grad in torch.autograd.grad(y.sum(), list(weights.values())))
    assert report.probe.counters.since(before).param_bytes_received == 0
    # The model with another one's sharded parameters, as far as CommFuse serves them: their values, and their gradients.
    served = {row.name for row in report.rows if row.path != "hooks"}
    mixed = pair.build(2)
    state = {name: other.state_dict()[name] if name in served else value for name, value in net.state_dict().items()}
    mixed.load_state_dict(state)
    swapped = {name: param for name, param in other.named_parameters() if name in served}
    net.zero_grad()
    tokens, wanted = pair.batch(rank, world_size, 1)
    y = functional_call(net, swapped, (tokens,))
    loss = F.cross_entropy(y.flatten(0, 1), wanted.flatten())
    loss.backward()
    reference = pair.loss_of(mixed, (tokens, wanted))
    reference.backward()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    for name, param in mixed.named_parameters():
        owner = other if name in served else net
        torch.testing.assert_close(pair.local(owner.get_parameter(name).grad), pair.local(param.grad), rtol=1e-4, atol=1e-6)
        assert (net.get_parameter(name).grad is None) == (name in served)
    # And on with its own.
    net.zero_grad()
    pair.assert_gradients_of_one_step(net, pair.build(2), rank, world_size)
    commfuse_dp.remove(net)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_functional_call_computes_with_what_it_is_given(workers, compiled):
    workers(2).run(called_functionally, compiled, timeout=120)


def copies_of_compiled(rank: int, world_size: int) -> None:
    graphs.fresh()
    net = pair.build(1)
    commfuse_dp.apply(net, pair.config())
    layer, x = net.blocks[0].up, torch.randn(4, pair.WIDTH)
    expected = layer(x).detach()
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x).detach(), expected, rtol=1e-6, atol=1e-6)
    for twin in (copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer))):
        make_plain(twin, 0.0)
        assert not torch.compile(twin, backend="aot_eager")(x).any()
    torch.testing.assert_close(compiled(x).detach(), expected, rtol=1e-6, atol=1e-6)
    layer.compile(backend="aot_eager")  # the graph is in the layer: a copy must not take it along
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-6, atol=1e-6)
    twin = copy.deepcopy(layer)
    make_plain(twin, 0.0)
    assert not twin(x).any()
    commfuse_dp.remove(net)


def test_copies_of_compiled_layers(workers):
    workers(2).run(copies_of_compiled, timeout=120)
