"""The order of events: layers in changing order, evaluation in between, several forwards or backwards, exceptions, long runs.

In fp64 where nothing else is said; every comparison is with stock FSDP2 on the same data.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commfuse_dp
from tests.fsdp2.models import VOCABULARY, ByteModel, Stack, shard_root, token_batch, token_loss
from tests.fsdp2.twin import RTOL64, SEED, Twin, build, compare, gradients, settings


def wide_bytes() -> nn.Module:
    return ByteModel().double()


def wide_stack() -> nn.Module:
    return Stack(6, 37, 5, 4).double()


def small_window(**more: Any) -> Any:
    """A window of one layer: what comes in another order than recorded was fetched in vain."""
    return settings("tcp", prefetch_bytes=8192, **more)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def check_outputs(twin: Twin, run: Callable[[nn.Module], torch.Tensor]) -> None:
    stock, fused = twin.each(run)
    assert stock.requires_grad == fused.requires_grad and stock.is_inference() == fused.is_inference()
    compare("outputs", {"y": stock.detach().clone()}, {"y": fused.detach().clone()}, RTOL64)


def set_order(twin: Twin, order: list[int]) -> None:
    twin.stock.order = twin.fused.order = order


# ---- order of layers -------------------------------------------------------------------------------------------------
def orders(rank: int, world_size: int, transport: str) -> None:
    config = small_window() if transport == "tcp" else settings(transport)
    with Twin(wide_bytes, config=config) as twin:
        twin.step()
        twin.step()
        assert twin.counters.order_misses == 0
        for order in ([2, 1, 0], [0, 1, 2], [1, 1, 2], [2, 0], [0, 1, 2], [0, 2, 1, 0]):
            set_order(twin, order)
            moved = twin.counted(twin.step)
            if transport == "tcp":
                assert moved.order_misses > 0, order
        set_order(twin, [2, 1, 0])
        twin.step()
        again = twin.counted(twin.step)  # recorded anew: no misses, and no more bytes than in any other order
        if transport == "tcp":
            assert again.order_misses == 0
        assert again.param_bytes_received + again.grad_bytes_received <= 1.1 * twin.report.minimum_bytes_per_step


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), (2, "tcp"), (3, "tcp"), (2, "p2p")])
def test_another_order_than_recorded_is_slower_but_right(workers, world_size, transport):
    workers(world_size).run(orders, transport)


# ---- evaluation ------------------------------------------------------------------------------------------------------
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def evaluation(rank: int, world_size: int, transport: str, first: str | None) -> None:
    config = small_window() if transport == "tcp" else settings(transport)
    for keep in (True, False):
        with Twin(wide_bytes, config=config, reshard_after_forward=not keep) as twin:
            ids, _ = twin.batch()

            def evaluate(name: str, ids=ids, twin=twin) -> None:
                twin.each(lambda model: model.eval())
                with MODES[name]():
                    check_outputs(twin, lambda model: model(ids))
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


@pytest.mark.parametrize("first", [None, "no_grad", "inference"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
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
                check_outputs(twin, lambda model, other=other: model(other[0]))
            for loss in losses:
                loss.backward()
            twin.check_gradients()
            twin.update()
        twin.step()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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
            set_order(twin, order)
            with torch.no_grad():
                check_outputs(twin, lambda model, ids=ids: model(ids))
            twin.each(lambda model: model.reshard())  # stock keeps its root gathered after an evaluation, as it then was
            set_order(twin, [0, 1, 2])
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
            check_outputs(twin, lambda model: model.layers[1](x))
        twin.step()
        for _ in range(2):
            twin.backward(lambda model, x: model.layers[2](x).square().mean(), x)
            twin.check_gradients()
            assert twin.fused.layers[0].up.weight.grad is None
            twin.update()
            twin.step()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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


# ---- exceptions ------------------------------------------------------------------------------------------------------
class Boom(Exception):
    pass


def blow_up(model: nn.Module, phase: str) -> Any:
    """Raise Boom once in the given phase, whatever the layers do."""

    def blow(*_: Any) -> None:
        raise Boom

    def in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(blow)

    if phase == "forward":
        return model.layers[1].down.register_forward_pre_hook(blow)
    if phase == "backward":
        return model.layers[1].up.register_forward_hook(in_backward)
    return model.embedding.register_forward_hook(in_backward)


def failing(rank: int, world_size: int, transport: str, reset: bool) -> None:
    """All ranks raise at the same place, catch it and go on; stock runs the good steps only. Fused layers recover by
    themselves; FSDP2's own groups (here: the embedding's) need its reset_iter_state."""
    exclude = ("embedding",) if reset else ()
    config = settings(transport, exclude=exclude, prefetch_bytes=8192)
    for phase in ("forward", "backward", "end of backward"):
        with Twin(wide_bytes, config=config) as twin:
            twin.step()
            for sync in (True, False):
                handle = blow_up(twin.fused, phase)
                twin.fused.set_requires_gradient_sync(sync)
                with pytest.raises(Boom):
                    token_loss(twin.fused, twin.batch()).backward()
                handle.remove()
                twin.fused.set_requires_gradient_sync(True)
                twin.fused.zero_grad()
                if reset:
                    twin.fused.reset_iter_state()
                elif not sync and phase != "forward":
                    break  # what the broken microbatch has accumulated is kept until a reset, as in stock
                twin.step()
                twin.step()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), (3, "tcp")])
def test_the_step_after_an_exception(workers, world_size, transport, reset):
    workers(world_size).run(failing, transport, reset)


class Twice(Stack):
    """Its one square layer is called twice."""

    def __init__(self) -> None:
        super().__init__(9, 9)
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.between(torch.tanh(self.layers[0](x))))


def failing_between_calls(rank: int, world_size: int) -> None:
    """The first call's part of the gradient was waiting for the second's when the backward broke off."""

    def blow(grad: torch.Tensor) -> None:
        raise Boom

    def between(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(blow)
        return x

    with Twin(Twice, shard=shard_root) as twin:
        g = twin.generator
        twin.step(mean_square, torch.randn(3, 9, generator=g).double())
        twin.fused.between = between
        with pytest.raises(Boom):
            mean_square(twin.fused, torch.randn(3, 9, generator=g).double()).backward()
        twin.fused.between = lambda x: x
        twin.fused.zero_grad()
        twin.step(mean_square, torch.randn(3, 9, generator=g).double())


def test_an_exception_between_two_calls_of_a_layer(workers):
    workers(2).run(failing_between_calls)


# ---- inputs ----------------------------------------------------------------------------------------------------------
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


# ---- equal bits ------------------------------------------------------------------------------------------------------
def three_steps(transport: str) -> list[dict[str, torch.Tensor]]:
    """Gradients of three steps of mixed flow: a changed order, a microbatch without synchronisation, a reused block. The
    embedding goes through the hooks."""
    model = build(ByteModel)
    commfuse_dp.apply(model, settings(transport, exclude=("embedding",)))
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())
    out = []
    for order, sync in (([0, 1, 2], True), ([2, 1, 1], False), ([2, 1, 1], True)):
        model.order = order
        model.set_requires_gradient_sync(sync)
        token_loss(model, token_batch(generator)).backward()
        if sync:
            out.append(gradients(model))
            model.zero_grad()
    commfuse_dp.remove(model)
    return out


def equal_bits(rank: int, world_size: int) -> None:
    first = three_steps("shm")
    for transport in ("shm", "tcp", "p2p"):
        for one, other in zip(first, three_steps(transport), strict=True):
            for name, gradient in one.items():
                same = gradient is other[name] is None or torch.equal(gradient, other[name])
                assert same, f"{transport}: other bits in {name}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_are_equal_on_all_transports(workers, world_size):
    workers(world_size).run(equal_bits)


# ---- any mixture -----------------------------------------------------------------------------------------------------
def mixture(rank: int, world_size: int, transport: str, seed: int, fuse: str) -> None:
    """A random program of everything above, the same on all ranks. The error names the actions so far."""
    choose = random.Random(seed)
    done: list[str] = []
    window, slices = choose.choice([8192, 1 << 20]), choose.choice([1, 2])
    config = settings(transport, fuse=fuse, prefetch_bytes=window, slices_per_rank=slices)
    with Twin(wide_bytes, config=config, reshard_after_forward=choose.choice([True, False])) as twin:
        twin.step()
        for _ in range(25):
            action = choose.choice(["step", "backward", "unsynced", "order", "evaluate", "two", "twice", "freeze", "apply"])
            done.append(action)
            try:
                _act(twin, action, choose, config)
            except AssertionError as error:
                raise AssertionError(f"after {done}: {error}") from error
        twin.check_gradients()
        twin.each(lambda model: model.set_requires_gradient_sync(True))
        twin.step()


def _act(twin: Twin, action: str, choose: random.Random, config: Any) -> None:
    batch = twin.batch()
    if action == "step":
        twin.each(lambda model: model.set_requires_gradient_sync(True))
        twin.step(batch=batch)
    elif action == "backward":
        twin.backward(batch=batch)
    elif action == "unsynced":
        twin.each(lambda model: model.set_requires_gradient_sync(False))
        twin.backward(batch=batch)
        twin.each(lambda model: model.set_requires_gradient_sync(True))
        twin.backward(batch=twin.batch())
    elif action == "order":
        set_order(twin, [choose.randrange(3) for _ in range(choose.randrange(5))])
    elif action == "evaluate":
        with MODES[choose.choice(list(MODES))]():
            check_outputs(twin, lambda model: model(batch[0]))
    elif action == "two":
        other = twin.batch()
        twin.backward(lambda model, _: token_loss(model, batch) + token_loss(model, other), batch)
    elif action == "twice":
        for model in (twin.stock, twin.fused):
            loss = token_loss(model, batch)
            loss.backward(retain_graph=True)
            loss.backward()
    elif action == "freeze":
        name = choose.choice(["layers.0.up.weight", "layers.1.norm.weight", "layers.2.up.bias", "embedding.weight"])
        twin.each(lambda model: model.zero_grad())
        twin.each(lambda model: [p.requires_grad_(not p.requires_grad) for n, p in model.named_parameters() if n == name])
    else:
        commfuse_dp.remove(twin.fused)
        twin.report = commfuse_dp.apply(twin.fused, config)


@pytest.mark.parametrize(
    ("world_size", "transport", "seed", "fuse"),
    [(2, "shm", 1, "auto"), (2, "tcp", 2, "auto"), (3, "tcp", 3, "auto"), (2, "p2p", 4, "auto"), (2, "shm", 5, "never")],
)
def test_random_mixtures(workers, world_size, transport, seed, fuse):
    workers(world_size).run(mixture, transport, seed, fuse)


# ---- long runs -------------------------------------------------------------------------------------------------------
def long_run(rank: int, world_size: int, transport: str, steps: int) -> tuple[float, float, float]:
    """Both models run freely in fp32, on a task that can be learnt: the next id is a function of this one and its rank."""
    with Twin(
        lambda: ByteModel(16, 32, 1), config=settings(transport), optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3)
    ) as twin:
        worst, history = 0.0, []
        for _ in range(steps):
            ids, _ = twin.batch()
            batch = ids, (3 * ids + 1) % VOCABULARY
            losses = []
            for model, optimizer in zip((twin.stock, twin.fused), twin.optimizers, strict=True):
                loss = token_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            worst = max(worst, abs(losses[0] - losses[1]))
            history.append(losses[1])
    return worst, history[0], history[-1]


@pytest.mark.parametrize(("world_size", "transport", "steps"), [(2, "tcp", 200), (4, "shm", 30)])
def test_losses_of_a_long_run(workers, world_size, transport, steps):
    for worst, first, last in workers(world_size).run(long_run, transport, steps, timeout=200):
        assert worst <= 1e-4
        assert last < first - (0.5 if steps == 200 else 0.0)  # it did learn
