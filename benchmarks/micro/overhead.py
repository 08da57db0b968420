"""Host time and Python frames that a layer of CommFuse adds, per pass, on shapes too small to matter.

    torchrun --nproc-per-node 2 benchmarks/micro/overhead.py [--kind linear|tensor] [--transport shm] [--layers 64]

linear: linears of FSDP2 (8 tokens, 16 x 16). tensor: a column-parallel and a row-parallel layer, one after the other (16 tokens
of 16, 16 x 16 on each rank). Compared with the same stack unsharded, as the difference of two depths, which leaves out what a
step costs once. CPU time of the thread, not wall time, so that waiting for the peer does not count: medians over many steps,
and the fastest tenth, which a busy machine disturbs less.
Frames: calls of the library's Python functions, the fewest of several steps, in which everything had come already.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import commfuse_dp.integrations
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.ops import column_parallel, row_parallel
from commfuse_dp.transport.select import Kind, open_transport

OURS = (str(Path(commfuse_dp.__file__).parent), str(Path(commfuse_dp.integrations.__file__).parent))
TOKENS, WIDTH = 8, 16
WARM_UP, COUNTED = 5, 20  # steps


class Pair(nn.Module):
    """A column-parallel layer that gathers the sequence, and a row-parallel one that divides it again."""

    def __init__(self, transport: Any) -> None:
        super().__init__()
        self.column, self.row = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self._how = {"sizes": (TOKENS,) * transport.world_size, "transport": transport}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = column_parallel(x, [self.column], **self._how)
        return row_parallel(y, self.row, **self._how)


def frames(action: Callable[[], Any], *, tuples: bool = False) -> int:
    """Calls of the library's Python functions in `action`, in this thread. tuples: also of those that make a named tuple."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call":
            made = tuples and frame.f_code.co_filename == "<string>" and frame.f_back is not None  # NamedTuple.__new__
            count += (frame.f_back if made else frame).f_code.co_filename.startswith(OURS)  # type: ignore[union-attr]

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a finalizer of what was dropped before is no part of the action
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def seconds(action: Callable[[], Any]) -> float:
    """CPU time of this thread."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def measure(model: nn.Module, steps: int, how: Callable[[Callable[[], Any]], float]) -> tuple[list[float], list[float]]:
    """(forwards, backwards) of `steps` steps after the first few."""
    x = torch.ones(1, TOKENS, WIDTH)
    forward, backward = [], []
    for _ in range(WARM_UP + steps):
        kept: list[torch.Tensor] = []
        dist.barrier()
        forward.append(how(lambda kept=kept: kept.append(model(x).sum())))
        dist.barrier()
        backward.append(how(lambda kept=kept: kept[0].backward()))
        model.zero_grad()
    return forward[WARM_UP:], backward[WARM_UP:]


@contextlib.contextmanager
def plain(layers: int) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


@contextlib.contextmanager
def sharded(layers: int, transport: Kind) -> Iterator[nn.Module]:
    """Linears of FSDP2."""
    with plain(layers) as model:
        fully_shard(model)
        commfuse_dp.apply(model, CommFuseConfig(transport=transport, deadline_s=60.0, inbox_bytes=1 << 20))
        yield model
        commfuse_dp.remove(model)


@contextlib.contextmanager
def tensor_parallel(layers: int, transport: Kind) -> Iterator[nn.Module]:
    how: dict[str, Any] = {"group": None, "inbox_bytes": 1 << 20, "deadline_s": 60.0, "probe": None}
    opened, _ = open_transport(transport, device=torch.device("cpu"), **how)
    torch.manual_seed(0)
    yield nn.Sequential(*[Pair(opened) for _ in range(layers // 2)])
    dist.barrier()
    opened.close()


KINDS = {"linear": sharded, "tensor": tensor_parallel}
Stack = Callable[[int], contextlib.AbstractContextManager[nn.Module]]


def seconds_of_a_layer(stack: Stack, layers: int, steps: int) -> tuple[float, ...]:
    """Thread time: medians (forward, backward), then the tenth part of the steps (forward, backward) are as fast as this."""

    def figures(model: nn.Module) -> list[float]:
        columns = measure(model, steps, seconds)
        return [statistics.median(column) for column in columns] + [sorted(column)[steps // 10] for column in columns]

    return per_layer(stack, layers, figures)


def frames_of_a_layer(stack: Stack, layers: int = 12) -> tuple[float, ...]:
    """The fewest (forward, backward) of several steps: one in which a rank polled for its peer has some more."""
    return per_layer(stack, layers, lambda model: [min(column) for column in measure(model, COUNTED, frames)])


def per_layer(stack: Stack, layers: int, figures: Callable[[nn.Module], Sequence[float]]) -> tuple[float, ...]:
    found = []
    counts = (layers // 4 // 2 * 2, layers // 2 * 2)  # whole pairs
    for count in counts:
        with stack(count) as model:
            found.append(figures(model))
    return tuple((deep - shallow) / (counts[1] - counts[0]) for shallow, deep in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(KINDS), default="linear")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stack = functools.partial(KINDS[arguments.kind], transport=arguments.transport)
    stock = seconds_of_a_layer(plain, arguments.layers, arguments.steps)
    ours = seconds_of_a_layer(stack, arguments.layers, arguments.steps)
    counted = frames_of_a_layer(stack)
    if dist.get_rank() == 0:
        print(json.dumps({**vars(arguments), "world_size": dist.get_world_size(), "torch": torch.__version__}))
        for number, name in enumerate(("forward", "backward")):
            added, least = (1e6 * (ours[place] - stock[place]) for place in (number, number + 2))
            print(
                f"{name:8} us a layer: plain {1e6 * stock[number]:.1f}, here {1e6 * ours[number]:.1f}, added {added:.1f} "
                f"(fastest tenth {least:.1f}); frames of the library {counted[number]:g}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
