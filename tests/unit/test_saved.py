"""What a fused linear saves for backward, where hooks look at saved tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from commfuse_dp.ops import linear as fused
from tests.unit.local_operand import LocalOperand


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def operand() -> LocalOperand:
    torch.manual_seed(0)
    return LocalOperand([torch.randn(6, 4, dtype=torch.float64)], 0, 2, 1)


def test_hooks_see_the_input_once_and_before_it_is_computed_with():
    local, events, boxes = operand(), [], []

    def pack(tensor: torch.Tensor) -> Box:
        events.append((*tensor.shape, len(local.visits)))
        box = Box(tensor.detach().clone())
        boxes.append(weakref.ref(box))
        return box

    def unpack(box: Box) -> torch.Tensor:
        events.append("unpacked")
        return box.tensor

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        y = fused.fused_linear(x, local, 0)
    assert events == [(3, 4, 0)]
    grad = torch.randn_like(y)
    (first,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(first, second) and torch.allclose(first, grad @ local.params[0])
    assert events == [(3, 4, 0), "unpacked", "unpacked"]
    assert boxes[0]() is None  # let go of, though the graph is alive
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, grad)


def test_without_hooks_a_second_backward_is_torchs_error():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = fused.fused_linear(x, operand(), 0)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_offloaded():
    local = operand()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with save_on_cpu():
        y = fused.fused_linear(x, local, 0)
    y.sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(y) @ local.params[0])


@pytest.mark.parametrize("last", [True, False])
def test_a_recomputation_ends_before_what_nobody_reads(last):
    """A last layer is computed once; one before an operation that saves its result, twice."""
    local = operand()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = fused.fused_linear(torch.sin(x), local, 0)
        return y if last else torch.tanh(y)

    y = checkpoint(block, x, use_reentrant=False)
    forward = list(local.visits)
    y.sum().backward()
    again = local.visits[len(forward) : 2 * len(forward)] == forward
    assert again is not last
