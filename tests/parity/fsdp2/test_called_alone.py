"""A part of the model called by itself computes with the parameters of now, whatever happened since the last forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from commfuse_dp.integrations.fsdp2 import engine_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.parity.fsdp2 import pair
from tests.support.cells import slow


class Parts(nn.Module):
    """`narrow` has fewer rows than there are ranks: the last ones have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.narrow = nn.Sequential(nn.Linear(6, 2))
        self.last = nn.Sequential(nn.Linear(2, 5, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.narrow(self.first(x)))


def build() -> Parts:
    torch.manual_seed(0)
    net = Parts()
    for part in net.children():
        fully_shard(part, reshard_after_forward=True)
    return fully_shard(net)


def weights(net: nn.Module) -> list[DTensor]:
    for module in net.modules():
        module.reshard() if hasattr(module, "reshard") else None  # stock keeps its root gathered after a forward
    return list(net.parameters())  # type: ignore[arg-type]


def optimizer_step(net: nn.Module) -> None:
    params = weights(net)
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.SGD(params, lr=0.1).step()
    for param in params:
        param.grad = None


@torch.no_grad()
def in_place(net: nn.Module) -> None:
    for param in weights(net):
        param.mul_(0.5)


def past_the_version_counter(net: nn.Module) -> None:
    for param in weights(net):
        param.to_local().data.add_(0.25)


def new_data(net: nn.Module) -> None:
    for param in weights(net):
        param.data = param.detach() * 2


def loaded(net: nn.Module) -> None:
    net.load_state_dict({name: value.clone() + 0.5 for name, value in net.state_dict().items()})


def assigned(net: nn.Module) -> None:
    net.load_state_dict({name: value.clone() - 0.5 for name, value in net.state_dict().items()}, assign=True)


def on_one_rank(net: nn.Module) -> None:
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            for param in weights(net):
                param.to_local().add_(1.0)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    change.__name__: change
    for change in (optimizer_step, in_place, past_the_version_counter, new_data, loaded, assigned, on_one_rank)
}


def called_alone(rank: int, world_size: int, transport: str) -> None:
    stock, net = build(), build()
    generator = torch.Generator().manual_seed(rank)

    def check(what: str, part: str) -> Any:
        x = torch.randn(3, net.get_submodule(part)[0].in_features, generator=generator)
        y, wanted = net.get_submodule(part)(x), stock.get_submodule(part)(x)
        assert y.requires_grad == wanted.requires_grad, what
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}, {part}: {text}")

    def forward() -> None:
        x = torch.randn(4, 6, generator=generator)
        torch.testing.assert_close(net(x), stock(x), rtol=1e-5, atol=1e-5)

    with pair.applied(net, transport=transport):
        engine = engine_of(net)
        for training in (True, False):
            for model in (stock, net):
                model.train(training)
            with torch.set_grad_enabled(training):
                forward()  # its backward never comes
                for what, change in CHANGES.items():
                    for part in ("narrow", "first"):
                        check(f"before {what}", part)
                    step = engine.step
                    for part in ("narrow", "narrow", "first", "last"):
                        check(f"unchanged, before {what}", part)
                    assert engine.step == step, f"before {what}: nothing has changed, and yet all was published again"
                    for model in (stock, net):
                        change(model)
                    for part in ("narrow", "first", "last"):
                        check(f"after {what}", part)
                    if what != "new_data":  # of a DTensor: its local tensor stays (torch 2.13)
                        assert engine.step == step + 1, f"after {what}: published once"
                    forward()
        for model in (stock, net):
            model.train()
        for _ in range(2):  # the step that follows is one as ever
            x = torch.randn(4, 6, generator=generator)
            for model in (stock, net):
                model.zero_grad()
                model(x).square().mean().backward()
            pair.assert_same_gradients(net, stock, relative=1e-5)
            for model in (stock, net):
                optimizer_step(model)


@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), (2, "tcp"), slow(3, "tcp")])
def test_a_part_called_by_itself_sees_the_parameters_of_now(workers, world_size, transport):
    workers(world_size).run(called_alone, transport, timeout=120)


def broken_here(rank: int, world_size: int) -> None:
    """Ctrl-C on one rank, between a forward and its backward; all then call parts by themselves."""
    stock, net = build(), build()
    with pair.applied(net, transport="shm", deadline_s=15.0):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for victim in range(world_size):
            net(x)
            if rank == victim:
                engine_of(net).interrupted(KeyboardInterrupt(), tell=True)
            for part in (net.first, net.first, net.narrow):
                wanted = stock.get_submodule("first" if part is net.first else "narrow")(x)
                torch.testing.assert_close(part(x), wanted, rtol=1e-5, atol=1e-5)
            torch.distributed.barrier()


def test_a_step_that_is_broken_off_on_one_rank_only_is_left_by_all(workers):
    workers(2).run(broken_here, timeout=60)
