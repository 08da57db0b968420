"""Shapes and strides of inputs and of gradients, in fp64 against stock FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parity.fsdp2.models import (
    wide_stack,
)
from tests.parity.fsdp2.twin import RTOL64, SEED, Twin, compare, settings


def shapes(rank: int, world_size: int, transport: str) -> None:
    g = torch.Generator().manual_seed(SEED + rank)
    wide = torch.randn(4, 12, generator=g, dtype=torch.float64)
    inputs = {
        "1-D": torch.randn(6, generator=g).double(),
        "3-D": torch.randn(2, 3, 6, generator=g).double(),
        "5-D": torch.randn(2, 1, 3, 1, 6, generator=g).double(),
        "no rows": torch.randn(0, 6).double(),
        "every other column": wide[:, ::2],
        "transposed": torch.randn(6, 4, generator=g).double().t(),
        "batch and length swapped": torch.randn(3, 5, 6, generator=g).double().transpose(0, 1),
        "expanded": torch.randn(1, 6, generator=g).double().expand(5, 6),
        "overlapping": torch.as_strided(wide, (3, 6), (2, 1)),
    }
    with Twin(wide_stack, config=settings(transport)) as twin:
        for what, data in inputs.items():
            for needs_grad in (False, True):
                x = data.detach().requires_grad_(needs_grad)
                grads = []
                for model in (twin.stock, twin.fused):
                    out = model(x)
                    (out.transpose(0, -1).sum() if needs_grad else out.square().sum()).backward()
                    grads.append(x.grad)
                    x.grad = None
                twin.check_gradients()
                compare(f"input gradients, {what}", {"x": grads[0]}, {"x": grads[1]}, RTOL64)
                twin.each(lambda model: model.zero_grad())
        stock, fused = twin.each(lambda model: model(wide[:, ::2]))
        assert stock.stride() == fused.stride() and stock.shape == fused.shape


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_shapes_and_strides_of_inputs(workers, transport):
    workers(2).run(shapes, transport)


def gradients_of_strange_strides(rank: int, world_size: int) -> None:
    """Gradients of outputs that are expanded, transposed or strided; outputs changed in place; a view taken of them."""
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "expanded": lambda y: y.sum(),
        "transposed": lambda y: (y.t() @ torch.arange(1.0, 4.0, dtype=y.dtype)).square().sum(),
        "some columns": lambda y: y[:, ::2].square().sum(),
        "in place": lambda y: y.mul_(2.0).add_(1.0).square().sum(),
        "one row": lambda y: y[1].square().sum(),
    }
    with Twin(wide_stack) as twin:
        for loss in losses.values():
            twin.step(lambda model, x, loss=loss: loss(model(x)), torch.randn(3, 6, generator=twin.generator).double())


def test_strides_of_gradients(workers):
    workers(2).run(gradients_of_strange_strides)
