"""The order of events: layers in changing order, evaluation in between, several forwards or backwards.

In fp64 where nothing else is said; every comparison is with stock FSDP2 on the same data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.fsdp2.models import (
    mean_square,
    token_loss,
    wide_bytes,
    wide_stack,
)
from tests.parity.fsdp2.twin import MODES, RTOL64, Twin, compare, settings
from tests.support.cells import slow


def small_window(**more: Any) -> Any:
    """A window of one layer: what comes in another order than recorded was fetched in vain."""
    return settings("tcp", prefetch_bytes=8192, **more)


# ---- order of layers -------------------------------------------------------------------------------------------------
def orders(rank: int, world_size: int, transport: str) -> None:
    config = small_window() if transport == "tcp" else settings(transport)
    with Twin(wide_bytes, config=config) as twin:
        twin.step()
        twin.step()
        assert twin.counters.order_misses == 0
        for order in ([2, 1, 0], [0, 1, 2], [1, 1, 2], [2, 0], [0, 1, 2], [0, 2, 1, 0]):
            twin.set_order(order)
            moved = twin.counted(twin.step)
            if transport == "tcp":
                assert moved.order_misses > 0, order
        twin.set_order([2, 1, 0])
        twin.step()
        again = twin.counted(twin.step)  # recorded anew: no misses, and no more bytes than in any other order
        if transport == "tcp":
            assert again.order_misses == 0
        assert again.param_bytes_received + again.grad_bytes_received <= 1.1 * twin.report.minimum_bytes_per_step


@pytest.mark.parametrize(("world_size", "transport"), [slow(2, "shm"), (2, "tcp"), slow(3, "tcp"), slow(2, "p2p")])
def test_another_order_than_recorded_is_slower_but_right(workers, world_size, transport):
    workers(world_size).run(orders, transport)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluation(rank: int, world_size: int, transport: str, first: str | None) -> None:
    config = small_window() if transport == "tcp" else settings(transport)
    for keep in (True, False):
        with Twin(wide_bytes, config=config, reshard_after_forward=not keep) as twin:
            ids, _ = twin.batch()

            def evaluate(name: str, ids=ids, twin=twin) -> None:
                twin.each(lambda model: model.eval())
                with MODES[name]():
                    twin.check_outputs(lambda model: model(ids))
                twin.each(lambda model: model.train())

            if first == "inference":  # even before the first training step; stock cannot train after that
                with torch.inference_mode():
                    out = twin.fused(ids)
                with torch.no_grad():
                    compare("outputs", {"y": twin.stock(ids)}, {"y": out.clone()}, RTOL64)
            elif first is not None:
                evaluate(first)
            for name in ("no_grad", "inference", "grad", "no_grad"):
                twin.step()
                evaluate(name)
                evaluate(name)  # with the parameters of the same version
            twin.step()
            received = twin.counted(lambda evaluate=evaluate: evaluate("no_grad"))
            assert received.grad_bytes_received == 0


@pytest.mark.parametrize(
    ("transport", "first"),
    [
        ("shm", "inference"),
        *(slow(*cell) for cell in (("tcp", "no_grad"), ("tcp", None), ("shm", None), ("shm", "no_grad"), ("tcp", "inference"))),
    ],
)
def test_evaluation_between_steps(workers, transport, first):
    workers(2).run(evaluation, transport, first)


def between(rank: int, world_size: int, transport: str) -> None:
    """Evaluations between a forward and its backward (a teacher, a line search)."""
    with Twin(wide_bytes, config=settings(transport)) as twin:
        twin.step()
        for _ in range(2):
            batch, other = twin.batch(), twin.batch()
            losses = twin.each(lambda model, batch=batch: token_loss(model, batch))
            with torch.no_grad():
                twin.check_outputs(lambda model, other=other: model(other[0]))
            for loss in losses:
                loss.backward()
            twin.check_gradients()
            twin.update()
        twin.step()


@pytest.mark.parametrize("transport", [slow("shm"), "tcp"])
def test_evaluation_between_forward_and_backward(workers, transport):
    workers(2).run(between, transport)


def stale(rank: int, world_size: int, fuse: str) -> None:
    """An evaluation leaves out layers that were fetched ahead; then the parameters change, and those layers are used."""
    with Twin(wide_bytes, config=settings("tcp", fuse=fuse)) as twin:
        for order in ([0], [], [0, 1]):
            twin.step()
            twin.backward()
            twin.check_gradients()
            ids, _ = twin.batch()
            twin.set_order(order)
            with torch.no_grad():
                twin.check_outputs(lambda model, ids=ids: model(ids))
            twin.each(lambda model: model.reshard())  # stock keeps its root gathered after an evaluation, as it then was
            twin.set_order([0, 1, 2])
            for optimizer in twin.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            twin.step()


@pytest.mark.parametrize("fuse", ["auto", "never"])
def test_what_was_fetched_ahead_in_vain_is_not_used_later(workers, fuse):
    workers(2).run(stale, fuse)


def parts(rank: int, world_size: int, transport: str) -> None:
    """FSDP2 modules inside the model are called by themselves, without the root."""
    with Twin(wide_bytes, config=settings(transport)) as twin:
        twin.step()
        x = torch.randn(3, 24, generator=twin.generator).double()
        with torch.no_grad():
            twin.check_outputs(lambda model: model.layers[1](x))
        twin.step()
        for _ in range(2):
            twin.backward(lambda model, x: model.layers[2](x).square().mean(), x)
            twin.check_gradients()
            assert twin.fused.layers[0].up.weight.grad is None
            twin.update()
            twin.step()


@pytest.mark.parametrize("transport", ["shm", slow("tcp")])
def test_a_part_of_the_model_called_by_itself(workers, transport):
    workers(2).run(parts, transport)


# ---- several forwards or backwards -----------------------------------------------------------------------------------
def two_forwards(rank: int, world_size: int, transport: str) -> None:
    with Twin(wide_bytes, config=settings(transport)) as twin:
        for how in ("sum", "in order", "reversed", "sum"):
            batches = [twin.batch() for _ in range(3)]
            for model in (twin.stock, twin.fused):
                losses = [token_loss(model, batch) for batch in batches]
                if how == "sum":
                    sum(losses).backward()
                else:
                    for loss in losses if how == "in order" else reversed(losses):
                        loss.backward()
            twin.check_gradients()
            twin.update()
        twin.step()


@pytest.mark.parametrize("transport", [slow("shm"), "tcp"])
def test_several_forwards_before_a_backward(workers, transport):
    workers(2).run(two_forwards, transport)


def twice(rank: int, world_size: int, transport: str) -> None:
    with Twin(wide_bytes, config=settings(transport)) as twin:
        for _ in range(2):
            batch = twin.batch()
            for model in (twin.stock, twin.fused):
                loss = token_loss(model, batch)
                loss.backward(retain_graph=True)
                loss.backward()
            twin.check_gradients()
            twin.update()
        twin.step()


@pytest.mark.parametrize("transport", ["shm", slow("tcp")])
def test_backward_twice_over_one_graph(workers, transport):
    workers(2).run(twice, transport)


def abandoned(rank: int, world_size: int, transport: str) -> None:
    """Forwards with a graph whose backward never comes; losses of which only a part depends on the model."""
    with Twin(wide_bytes, config=settings(transport)) as twin:
        for _ in range(2):
            batch = twin.batch()
            twin.each(lambda model, batch=batch: token_loss(model, batch))
            twin.step()
        batch = twin.batch()
        twin.each(lambda model, batch=batch: (0.0 * token_loss(model, batch)).backward())
        twin.check_gradients()
        twin.update()
        twin.step()


@pytest.mark.parametrize("transport", [slow("shm"), "tcp"])
def test_a_forward_without_its_backward(workers, transport):
    workers(2).run(abandoned, transport)


def inputs_only(rank: int, world_size: int) -> None:
    """torch.autograd.grad with respect to the input: the same input gradients; what happens to the parameters is stock's."""
    with Twin(wide_stack, config=settings("tcp")) as twin:
        x = torch.randn(3, 6, generator=twin.generator).double().requires_grad_()
        out = []
        for model in (twin.stock, twin.fused):
            out.append(torch.autograd.grad(mean_square(model, x), x)[0])
            model.zero_grad()
        compare("input gradients", {"x": out[0]}, {"x": out[1]}, RTOL64)
        for _ in range(2):
            twin.step(mean_square, torch.randn(3, 6, generator=twin.generator).double())


def test_gradients_of_the_input_alone(workers):
    workers(2).run(inputs_only)
