"""All of it together: equal bits on all transports, random programs, long runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commfuse_dp
from tests.parity.fsdp2.models import (
    VOCABULARY,
    ByteModel,
    token_batch,
    token_loss,
    wide_bytes,
)
from tests.parity.fsdp2.twin import MODES, SEED, Twin, build, gradients, settings
from tests.support.cells import slow


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


@pytest.mark.parametrize("world_size", [2, slow(3)])
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
        twin.set_order([choose.randrange(3) for _ in range(choose.randrange(5))])
    elif action == "evaluate":
        with MODES[choose.choice(list(MODES))]():
            twin.check_outputs(lambda model: model(batch[0]))
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
    [
        slow(2, "shm", 1, "auto"),
        (2, "tcp", 2, "auto"),
        slow(3, "tcp", 3, "auto"),
        slow(2, "p2p", 4, "auto"),
        slow(2, "shm", 5, "never"),
    ],
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


@pytest.mark.parametrize(
    ("world_size", "transport", "steps"),
    [
        (2, "tcp", 30),
        pytest.param(2, "tcp", 60, marks=pytest.mark.slow),
        pytest.param(2, "tcp", 200, marks=pytest.mark.slow),
        pytest.param(4, "shm", 30, marks=pytest.mark.slow),
    ],
)
def test_losses_of_a_long_run(workers, world_size, transport, steps):
    for worst, first, last in workers(world_size).run(long_run, transport, steps, timeout=200):
        assert worst <= 1e-4
        assert last < first - (0.5 if steps == 200 else 0.0)  # it did learn
