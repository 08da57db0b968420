"""Parameters gathered whole: values, gradients cut by owner, and the registered ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from commfuse_dp.ops.gathered import gather_parameters
from commfuse_dp.ops.operands import register_operand
from tests.support import graphs
from tests.unit.local_operand import LocalOperand

SHAPES = {"vectors": [(7,), (7,)], "one": [(5,)], "table": [(9, 4)], "planes": [(3, 2, 4), (3, 2, 4)]}


def operand_of_shapes(shapes: list[tuple[int, ...]], **kw) -> LocalOperand:
    generator = torch.Generator().manual_seed(11)
    return LocalOperand([torch.randn(shape, generator=generator) for shape in shapes], 1, 3, 1, **kw)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
def test_values_and_gradients(shapes):
    operand = operand_of_shapes(shapes)
    wholes = gather_parameters(operand, 0)
    for whole, param in zip(wholes, operand.params, strict=True):
        assert torch.equal(whole, param) and whole.requires_grad
        assert whole.data_ptr() != param.data_ptr()  # autograd may keep it: must not be a peer's memory
    weights = [torch.randn_like(whole) for whole in wholes]
    sum((w * whole).sum() for w, whole in zip(weights, wholes, strict=True)).backward()
    for partial, weight in zip(operand.partials, weights, strict=True):
        assert torch.equal(partial, weight)
    assert operand.expected == operand.exchanges == 1
    assert [owner for what, owner in operand.visits if what == "gather"] == [1, 2, 0]
    assert [owner for what, owner in operand.visits if what == "produce"] == [2, 0, 1]


def test_a_frozen_parameter_is_not_differentiable_and_gets_no_gradient():
    operand = operand_of_shapes([(7,), (7,)], trainable=(False, True))
    weight, bias = gather_parameters(operand, 0)
    assert not weight.requires_grad and bias.requires_grad
    bias.sum().backward()
    assert operand.partials[0].isnan().all() and torch.equal(operand.partials[1], torch.ones(7))


def test_an_unused_part_gets_a_gradient_of_zeros():
    operand = operand_of_shapes([(7,), (7,)])
    weight, _ = gather_parameters(operand, 0)
    weight.sum().backward()
    assert torch.equal(operand.partials[1], torch.zeros(7))


def test_no_grad():
    operand = operand_of_shapes([(7,)])
    with torch.no_grad():
        (whole,) = gather_parameters(operand, 0)
    assert not whole.requires_grad and operand.expected == 0


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
def test_opcheck(shapes):
    operand = operand_of_shapes(shapes)
    handle = register_operand(operand)
    ranks, sizes = [len(s) for s in shapes], [size for s in shapes for size in s]
    torch.library.opcheck(torch.ops.commfuse.gather.default, (operand.anchor, handle, ranks, sizes, torch.float32, 0))
    torch.library.opcheck(
        torch.ops.commfuse.gather_backward.default, ([torch.randn(s) for s in shapes], operand.anchor.detach(), handle, 0)
    )


def test_compiled_norm_without_a_graph_break():
    operand = operand_of_shapes([(7,), (7,)])
    handle = register_operand(operand)
    graphs.fresh()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        weight, bias = gather_parameters(operand, handle)
        return F.layer_norm(x, (7,), weight, bias)

    x = torch.randn(4, 7)
    y = run(x)
    params = [p.clone().requires_grad_() for p in operand.params]
    wanted = F.layer_norm(x, (7,), *params)
    assert torch.allclose(y, wanted, rtol=1e-6, atol=1e-6)
    grad = torch.randn(4, 7)
    y.backward(grad)
    wanted.backward(grad)
    for partial, param in zip(operand.partials, params, strict=True):
        assert torch.allclose(partial, param.grad, rtol=1e-5, atol=1e-6)
