"""Host time of a column- and a row-parallel layer on a stream-ordered path, and the calls of the driver that they make.

    python -m benchmarks.micro.device_layers [--ranks 2,4,8]         no GPU: calls of the driver do nothing
    python -m benchmarks.micro.device_layers --device cuda           on a GPU: they are real.

As device_overhead.py: one process is rank 0 with peers that do nothing, and figures are the difference between two depths,
divided by the pairs of layers between them. Products are small, but they are made: torch's own calls are part of the time, one
for every slice. On a GPU no kernel waits for slices: the stream does, for words that are there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.one_rank import NullDevice, UnwaitingDevice, lone_transport
from commfuse_dp.ops import column_parallel, row_parallel
from commfuse_dp.ops.sequence.whole import kernels_for
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.budget import LEAST_RING

SHALLOW, DEEP, WARM_UP = 4, 12, 5  # pairs, steps
TOKENS, WIDTH, FEATURES = 4, 16, 8  # positions of each rank, features of the input, features between the two layers of a rank


class Pairs:
    """So many pairs of layers, one after the other, of rank 0 of `world_size`. device: counts its calls, or is CUDA's."""

    def __init__(self, device: Any, world_size: int, pairs: int) -> None:
        self.transport = lone_transport(device, world_size, LEAST_RING)  # a few slices, as rings that grow have room for
        kernels = kernels_for(self.transport, None)
        if kernels is not None:
            kernels.waits = False  # words of peers stay 0
        self._n, where = world_size, device.torch_device
        self._weights = []
        for _ in range(pairs):
            first = torch.zeros(FEATURES, WIDTH, device=where, requires_grad=True)
            self._weights.append((first, torch.zeros(WIDTH, FEATURES, device=where, requires_grad=True)))
        self._x = torch.zeros(1, TOKENS, WIDTH, device=where, requires_grad=True)
        self._made = self._x

    def forward(self) -> None:
        h, sizes = self._x, (TOKENS,) * self._n
        with mock.patch("commfuse_dp.collectives.agreement._exchange", self._all_say_the_same):
            for first, second in self._weights:
                (h,) = column_parallel(h, [first], sizes=sizes, transport=self.transport)
                h = row_parallel(h, second, sizes=sizes, transport=self.transport)
        self._made = h

    def backward(self) -> None:
        self._made.backward(torch.ones_like(self._made))

    def _all_say_the_same(self, transport: Transport, what: str, description: object, own: bytes, width: int) -> list[bytes]:
        return [own[:width].ljust(width, b"\0")] * self._n


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(world_size: int, steps: int, make: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a forward and a backward of one pair."""
    found: list[list[float]] = []
    for count in (SHALLOW, DEEP):
        pairs = Pairs(make(), world_size, count)
        spent = [(seconds(pairs.forward), seconds(pairs.backward)) for _ in range(WARM_UP + steps)]
        pairs.transport.close()
        found.append([statistics.median(column) for column in zip(*spent[WARM_UP:], strict=True)])
    few, many = found
    forward, backward = (1e6 * (deep - shallow) / (DEEP - SHALLOW) for shallow, deep in zip(few, many, strict=True))
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for world_size in map(int, arguments.ranks.split(",")):
        forward, backward = measure(world_size, arguments.steps, UnwaitingDevice if arguments.device == "cuda" else NullDevice)
        print(f"N = {world_size}  forward {forward:7.1f} us   backward {backward:7.1f} us")


if __name__ == "__main__":
    main()
