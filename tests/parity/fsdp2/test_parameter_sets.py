"""Several sets of parameters in a model (`torch.func.functional_call`): what one step cannot serve is refused, never mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from commfuse_dp import CommFuseError
from tests.parity.fsdp2 import pair
from tests.support import graphs
from tests.support.versions import NEEDS_RESET

REFUSED = r"set of parameters.*functional_call.*backward\(\).*exclude=\["


def served(net: nn.Module, report: Any, source: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of `source` under the names that CommFuse serves in `net`."""
    names = {row.name for row in report.rows if row.path != "hooks"}
    return {name: param for name, param in source.named_parameters() if name in names}


def output(net: nn.Module, parameters: dict[str, torch.Tensor] | None, data: Any) -> torch.Tensor:
    return (net(data[0]) if parameters is None else functional_call(net, parameters, (data[0],))).square().mean()


def two_sets(rank: int, world_size: int, compiled: bool) -> None:
    graphs.fresh()
    net, other = pair.build(1), pair.build(1, seed=1)
    with pair.applied(net) as report:
        if compiled:
            for block in (*net.blocks, net.head):
                block.compile(backend="aot_eager")
        data, sets = pair.batch(rank, world_size, 0), served(net, report, other)
        # One backward for both.
        loss = output(net, None, data) + output(net, sets, data)
        with pytest.raises(CommFuseError, match=REFUSED):
            loss.backward()
        net.zero_grad()
        other.zero_grad()
        # The values of another set, between a forward and its backward.
        loss = output(net, None, data)
        with torch.no_grad():
            output(net, sets, data)
        with pytest.raises(CommFuseError, match=REFUSED):
            loss.backward()
        net.zero_grad()
        # One after the other they are right; and so is one set twice in one backward.
        wanted = {}
        for name, parameters in (("own", None), ("other", sets)):
            output(net, parameters, data).backward()
            wanted[name] = [pair.local(param.grad).clone() for param in (parameters or served(net, report, net)).values()]
            net.zero_grad()
            other.zero_grad()
        (output(net, sets, data) + output(net, sets, data)).backward()
        for param, grad in zip(sets.values(), wanted["other"], strict=True):
            torch.testing.assert_close(pair.local(param.grad), 2 * grad, rtol=1e-5, atol=1e-7)
        net.zero_grad()
        pair.assert_gradients_of_one_step(net, pair.build(1), rank, world_size)
        # Taken away while the model had whole parameters, brought back when it had not.
        output(net, None, data)
        with torch.no_grad():
            output(net, sets, data)
        for module in (net, *net.blocks):
            module.reshard()
        assert all(type(param) is DTensor for param in net.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_of_two_sets_is_refused(workers, compiled):
    workers(2).run(two_sets, compiled, timeout=120)


def of_a_layer(rank: int, world_size: int) -> None:
    """A layer called by itself, with sets of equal values: only their identity differs."""
    net, twin, third = pair.build(1), pair.build(1), pair.build(1)
    with pair.applied(net):
        layer, x = net.blocks[0].up, torch.randn(4, pair.WIDTH)
        sets = [dict(model.blocks[0].up.named_parameters()) for model in (twin, third)]
        layer(x).sum().backward()
        wanted = [pair.local(param.grad).clone() for param in layer.parameters()]
        net.zero_grad()
        for parameters in sets:
            functional_call(layer, parameters, (x,)).sum().backward()
            for param, grad in zip(parameters.values(), wanted, strict=True):
                torch.testing.assert_close(pair.local(param.grad), grad)
        assert all(param.grad is None for param in net.parameters())
        loss = sum(functional_call(layer, parameters, (x,)).sum() for parameters in sets)
        with pytest.raises(CommFuseError, match=REFUSED):
            loss.backward()
        net.zero_grad()
        pair.assert_gradients_of_one_step(net, pair.build(1), rank, world_size)


def test_of_a_layer_called_by_itself(workers):
    workers(2).run(of_a_layer)


class Inside(pair.Block):
    other: dict[str, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.other is None:
            return super().forward(x)
        return functional_call(self.up, self.other, (x,))[..., : pair.WIDTH]


def in_a_forward(rank: int, world_size: int) -> None:
    """The model's own parameters are published: a layer inside cannot have others."""
    net, stock, other = (pair.build(1, seed=seed, wrap=lambda _: Inside()) for seed in (0, 0, 1))
    with pair.applied(net):
        net.blocks[0].other = dict(other.blocks[0].up.named_parameters())
        with pytest.raises(CommFuseError, match=REFUSED):
            pair.loss_of(net, pair.batch(rank, world_size, 0))
        net.blocks[0].other = None
        net.reset_iter_state()
        pair.assert_gradients_of_one_step(net, stock, rank, world_size)


@NEEDS_RESET
def test_a_set_of_one_layer_inside_the_forward_is_refused(workers):
    workers(2).run(in_a_forward)


def accumulated(rank: int, world_size: int) -> None:
    """Gradients of one set that wait for a reduction are not given to another."""
    net, other = pair.build(1), pair.build(1, seed=1)
    with pair.applied(net) as report:
        data, sets = pair.batch(rank, world_size, 0), served(net, report, other)
        net.set_requires_gradient_sync(False)
        output(net, None, data).backward()
        net.set_requires_gradient_sync(True)
        loss = output(net, sets, data)
        with pytest.raises(CommFuseError, match=REFUSED):
            loss.backward()
        net.reset_iter_state()
        net.zero_grad()
        other.zero_grad()
        output(net, sets, data).backward()
        wanted = {name: pair.local(param.grad).clone() for name, param in sets.items()}
        other.zero_grad()
        output(net, sets, data).backward()
        for name, param in sets.items():
            torch.testing.assert_close(pair.local(param.grad), wanted[name])
        assert all(net.get_parameter(name).grad is None for name in sets)


@NEEDS_RESET
def test_accumulation_over_two_sets_is_refused(workers):
    workers(2).run(accumulated)
