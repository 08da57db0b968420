"""Python frames of the library that one fused linear costs, and calls of the driver, counted: exact on the device path, where
nothing waits; over shared memory the fewest of several steps, in which everything had come already. Bounds stand just above
what is needed today: a change that adds frames for every layer, slice or rank is seen here on the day it comes. Lower them when
there are fewer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from benchmarks.micro import device_overhead as overhead
from benchmarks.micro.device_layers import Pairs
from benchmarks.micro.overhead import KINDS, frames, frames_of_a_layer
from benchmarks.one_rank import NullDevice, OneRank


def per_layer(count: Callable[[int], tuple[int, ...]]) -> tuple[float, ...]:
    """Counts of (forward, backward, ...) of a model of so many layers -> of one: what a step costs once is left out."""
    return tuple((many - few) / 8 for few, many in zip(count(4), count(12), strict=True))


# ---- the device path -------------------------------------------------------------------------------------------------
def on_a_device(world_size: int, layers: int) -> tuple[int, ...]:
    """Frames of a forward, of a backward; then calls of the driver."""
    rank = OneRank(NullDevice(), world_size, layers=layers, width=64, window=3)
    x = torch.zeros(8, 64, dtype=torch.bfloat16, requires_grad=True)
    found, calls = [], []
    with overhead.nothing_computed():
        for _ in range(overhead.WARM_UP + 6):
            rank.engine.begin_step()
            kept: list[torch.Tensor] = []

            def forward(kept: list[torch.Tensor] = kept) -> None:
                kept.append(rank.forward(x))

            before = rank.counts.total()
            there = frames(forward, tuples=True)
            middle = rank.counts.total()
            found.append((there, frames(lambda kept=kept: kept[0].backward(torch.ones_like(kept[0])), tuples=True)))
            calls.append((middle - before, rank.counts.total() - middle))
    rank.close()
    return *(min(column) for column in zip(*found, strict=True)), *calls[-1]


# Ranks -> most frames of a forward, of a backward, named tuples counted as one each. Just above what was counted (29.5 / 99.5,
# 30 / 98.75, 30 / 96).
DEVICE = {2: (31, 102), 8: (31, 102), 64: (31, 99)}
CALLS = (4, 16)  # of the driver; as many as were counted


@pytest.fixture(scope="module")
def counted() -> dict[int, tuple[float, ...]]:
    return {world_size: per_layer(lambda layers, n=world_size: on_a_device(n, layers)) for world_size in DEVICE}


@pytest.mark.parametrize("world_size", DEVICE)
def test_frames_of_a_layer_on_a_device(counted, world_size):
    forward, backward, *_ = counted[world_size]
    print(f"\n{world_size} ranks, device: forward {forward:g}, backward {backward:g} frames")
    assert forward <= DEVICE[world_size][0] and backward <= DEVICE[world_size][1], (forward, backward)


def test_frames_do_not_grow_with_the_ranks(counted):
    for few, many in zip(counted[2][:2], counted[64][:2], strict=True):
        assert many <= 1.5 * few, (few, many)


@pytest.mark.parametrize("world_size", DEVICE)
def test_driver_calls_of_a_layer_at_any_number_of_ranks(counted, world_size):
    """Slices of one layer come together, and leave together: a batch of copies and a batch of words each."""
    *_, forward, backward = counted[world_size]
    assert forward <= CALLS[0] and backward <= CALLS[1], (forward, backward)


# ---- tensor parallelism on a device ----------------------------------------------------------------------------------
def tensor_parallel_on_a_device(world_size: int, count: int) -> tuple[int, ...]:
    """As `on_a_device`, of a column-parallel and a row-parallel layer, so many times."""
    device = NullDevice()
    pairs = Pairs(device, world_size, count)
    for _ in range(4):
        before = device.counts.total()
        there = frames(pairs.forward, tuples=True)
        middle = device.counts.total()
        back = frames(pairs.backward, tuples=True)
        calls = middle - before, device.counts.total() - middle
    pairs.transport.close()
    return there, back, *calls


# Ranks -> frames and calls of the driver, forward and backward, as counted; both layers together. They grow with the slices:
# each is waited for by itself, and computed with.
TENSOR_PARALLEL = {2: (146, 187, 19, 29), 8: (236, 309, 31, 47)}


@pytest.mark.parametrize("world_size", TENSOR_PARALLEL)
def test_frames_and_calls_of_tensor_parallel_layers_on_a_device(world_size):
    found = per_layer(lambda count: tensor_parallel_on_a_device(world_size, count))
    assert all(count <= most for count, most in zip(found, TENSOR_PARALLEL[world_size], strict=True)), found


# ---- shared memory ---------------------------------------------------------------------------------------------------
def between_processes(rank: int, world_size: int, kind: str) -> tuple[float, ...]:
    return frames_of_a_layer(functools.partial(KINDS[kind], transport="shm"))


# Counted: 21 .. 24 / 45; 45 .. 58 / 54 .. 75, the latter at a load of 10. A step in which a rank polled for its peer has
# some more.
SHARED_MEMORY = {"linear": (27, 52), "tensor": (62, 80)}


@pytest.mark.parametrize("kind", SHARED_MEMORY)
def test_frames_of_a_layer_over_shared_memory(workers, kind):
    most = SHARED_MEMORY[kind]
    fewest = [float("inf")] * 2
    for _ in range(4):  # on a machine with too much to do there may be no step in which nobody polled
        for counts in workers(2).run(between_processes, kind, timeout=120):
            fewest = [min(pair) for pair in zip(fewest, counts, strict=True)]
        print(f"\n2 ranks, shm, {kind}: forward {fewest[0]:g}, backward {fewest[1]:g} frames")
        if fewest[0] <= most[0] and fewest[1] <= most[1]:
            return
    raise AssertionError(fewest)
