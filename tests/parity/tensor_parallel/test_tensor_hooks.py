"""Full backward hooks on tensor-parallel modules see what they see without CommFuse, and the gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tests.parity.tensor_parallel.block import Llama, batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients
from tests.support.serving import applied

Register = Callable[[Llama, Callable[..., None]], list[RemovableHandle]]


def _on(*names: str, pre: bool = False) -> Register:
    def register(model: Llama, hook: Callable[..., None]) -> list[RemovableHandle]:
        modules = [model.get_submodule(name) for name in names]
        if pre:
            return [module.register_full_backward_pre_hook(lambda module, out: hook(module, out)) for module in modules]
        return [module.register_full_backward_hook(lambda module, ins, outs: hook(module, (ins, outs))) for module in modules]

    return register


def _on_all(model: Llama, hook: Callable[..., None]) -> list[RemovableHandle]:
    inside = set(model.modules())

    def of_model(module: nn.Module, ins: Any, outs: Any) -> None:
        if module in inside:
            hook(module, (ins, outs))

    return [nn.modules.module.register_module_full_backward_hook(of_model)]


PLACES: dict[str, Register] = {
    "block": _on("layers.0"),
    "holder": _on("layers.0.attention", "layers.1.feed_forward"),
    "members": _on("layers.0.attention.wq", "layers.1.feed_forward.w1"),
    "row": _on("layers.0.attention.wo", pre=True),
    "alone": _on("output"),
    "norm": _on("norm", "layers.0.ffn_norm"),
    "all modules": _on_all,
}
REST = sorted(PLACES.keys() - {"members", "row"})


def _seen(model: Llama, register: Register, tokens: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
    names = {module: name for name, module in model.named_modules()}
    found: list[Any] = []

    def hook(module: nn.Module, grads: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(grads)
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in leaves if isinstance(g, torch.Tensor)]
        found.append((names[module], [g.clone() for g in whole]))

    handles = register(model, hook)
    try:
        return found, gradients(model, tokens)
    finally:
        for handle in handles:
            handle.remove()


def _hooked(rank: int, world_size: int, places: list[str]) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    tokens = batch(0)
    stock, model = parallelize(whole(), mesh), parallelize(whole(), mesh)
    without = gradients(stock, tokens)
    with applied(model) as report:
        for place in places:
            wanted, expected = _seen(stock, PLACES[place], tokens)
            found, got = _seen(model, PLACES[place], tokens)
            assert wanted and [name for name, _ in found] == [name for name, _ in wanted], place
            for (_, mine), (_, theirs) in zip(found, wanted, strict=True):
                alike(mine, theirs)
            alike(got, expected)
        alike(gradients(model, tokens), without)
        assert not report.gathered_inputs  # where there are no hooks, all is served


@pytest.mark.parametrize(
    "places",
    [
        ["members", "row"],
        *(pytest.param([place], marks=pytest.mark.slow) for place in PLACES if place not in ("members", "row")),
    ],
    ids="-".join,
)
def test_full_backward_hooks(workers: Any, places: list[str]) -> None:
    workers(2).run(_hooked, places, timeout=60)
