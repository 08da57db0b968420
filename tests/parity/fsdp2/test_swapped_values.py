"""Other values for the length of a forward (of an average of the weights, say), between a forward and its backward, or between
steps: all layers compute with what the parameters hold when they run, forward and backward, as with stock FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from commfuse_dp.integrations.fsdp2 import engine_of
from torch import nn

from tests.parity.fsdp2 import pair
from tests.support.cells import slow

Put = Callable[[torch.Tensor, torch.Tensor], object]


def copied(param: torch.Tensor, value: torch.Tensor) -> None:
    param.data.copy_(value)


def copied_local(param: torch.Tensor, value: torch.Tensor) -> None:
    pair.local(param).data.copy_(pair.local(value))


def new_data(param: torch.Tensor, value: torch.Tensor) -> None:
    param.data = value


@contextmanager
def averaged(net: nn.Module, put: Put) -> Iterator[None]:
    params = whole_sharded(net)
    own = [param.detach().clone() for param in params]
    for param, value in zip(params, own, strict=True):
        put(param, value * 0.5 + 0.125)
    yield
    for param, value in zip(whole_sharded(net), own, strict=True):
        put(param, value)


def whole_sharded(net: nn.Module) -> list[torch.Tensor]:
    """The sharded parameters: FSDP2 keeps groups gathered after a forward, and would not see what is written to the shards."""
    for module in net.modules():
        module.reshard() if hasattr(module, "reshard") else None
    return list(net.parameters())


def swapped(rank: int, world_size: int, transport: str, keep: bool, put: Put) -> None:
    stock, net = (pair.build(2, reshard_after_forward=not keep) for _ in range(2))
    batches = [pair.batch(rank, world_size, step) for step in range(3)]

    def same(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> None:
        for theirs, ours in zip(wanted, found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    def each(run: Callable[[nn.Module], Any]) -> None:
        for model in (stock, net):
            model.zero_grad()
        same(*(run(model) for model in (stock, net)))
        pair.assert_same_gradients(net, stock, relative=1e-5)

    def between(grad: bool, model: nn.Module) -> list[torch.Tensor]:
        loss = pair.loss_of(model, batches[0])
        with averaged(model, put), torch.set_grad_enabled(grad):
            other = pair.loss_of(model, batches[1])
        loss.backward()
        return [loss.detach(), other.detach()]

    def after(model: nn.Module) -> list[torch.Tensor]:
        with averaged(model, put), torch.no_grad():
            other = pair.loss_of(model, batches[1])
        loss = pair.loss_of(model, batches[2])
        loss.backward()
        return [loss.detach(), other]

    def both(model: nn.Module) -> list[torch.Tensor]:
        losses = [pair.loss_of(model, data) for data in batches[:2]]
        sum(losses).backward()
        return [loss.detach() for loss in losses]

    def later(model: nn.Module) -> list[torch.Tensor]:
        """The second of two backwards, and one more of a graph that was kept, each behind a validation."""
        losses = [pair.loss_of(model, data) for data in batches[:2]]
        losses[0].backward(retain_graph=True)
        found = []
        for loss in (losses[1], losses[0]):
            with averaged(model, put), torch.no_grad():
                found.append(pair.loss_of(model, batches[2]))
            loss.backward()
        return [*found, *(loss.detach() for loss in losses)]

    with pair.applied(net, transport=transport):
        each(later)
        for grad in (False, True, False):
            each(lambda model, grad=grad: between(grad, model))
            each(after)
        step = engine_of(net).step
        each(both)
        assert engine_of(net).step == step + 2, "no value has changed"
        each(after)


@pytest.mark.parametrize(
    ("transport", "keep", "put"),
    [
        ("tcp", False, copied),
        slow("shm", True, copied),
        slow("shm", False, copied_local),
        slow("tcp", True, copied_local),
        slow("shm", False, new_data),
    ],
)
def test_layers_compute_with_the_values_of_now(workers, transport, keep, put):
    workers(2).run(swapped, transport, keep, put, timeout=60)


def left(rank: int, world_size: int) -> str:
    """One rank leaves the step where the others ask whether values have changed."""
    stock, net = (pair.build(1) for _ in range(2))
    data = pair.batch(rank, world_size, 0)
    with pair.applied(net, deadline_s=20.0):
        losses = [pair.loss_of(net, data) for _ in range(2)]
        error = ""
        if rank:
            with pytest.raises(pair.commfuse_dp.BrokenStepError) as caught:
                losses[0].backward()
            error = str(caught.value)
            net.reset_iter_state() if hasattr(net, "reset_iter_state") else None
        pair.assert_gradients_of_one_step(net, stock, rank, world_size)
        torch.distributed.barrier()
    return error


def test_who_asks_hears_of_a_peer_that_has_left_the_step(workers):
    assert "it runs another program" in workers(2).run(left, timeout=60)[1]
