"""Host time of a fused linear on a stream-ordered path, and the calls of the driver that it makes, by kind.

    python -m benchmarks.micro.device_overhead [--ranks 2,4,8] [--save]           no GPU: calls of the driver do nothing
    python -m benchmarks.micro.device_overhead --device cuda [--kernels triton]   on a GPU: they are real
    python -m benchmarks.micro.device_overhead --profile 30                       besides: where Python's time goes, by function

One process is rank 0 with peers that do nothing (one_rank.py). Without a GPU this is the host's side only: streams, events,
copies and words are replaced by nothing but a count, and so are GEMMs and sums. What a call of the driver itself takes, and the
launch of a kernel, come on top on a GPU (driver_calls.py). There, peers are pinned memory, and whatever is waited for has come:
the device never stands.

Figures are the difference between two depths, divided by the layers between them: what a step costs once is left out. Wall time
of the calling thread, medians over steps after the first few, in which tables are written and buffers found.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import json
import platform
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.one_rank import NullDevice, OneRank, UnwaitingDevice, conditions
from commfuse_dp.kernels import by_slices

PASSES = ("publish", "forward", "backward")
SHALLOW, DEEP = 16, 64  # layers
TOKENS, WIDTH = 8, 128
WINDOW = 4  # layers
WARM_UP = 5  # steps
RESULTS = Path(__file__).resolve().parent.parent / "results"


@contextlib.contextmanager
def nothing_computed() -> Iterator[None]:
    """GEMMs and sums that return at once."""

    def nothing(*arguments: Any, **more: Any) -> None:
        return

    with contextlib.ExitStack() as stack:
        for name in ("gemm_forward", "gemm_dgrad", "gemm_wgrad"):
            stack.enter_context(mock.patch.object(by_slices, name, nothing))
        stack.enter_context(mock.patch("commfuse_dp.engine.sums.sum_in_rank_order", nothing))
        yield


def step(rank: OneRank, x: torch.Tensor) -> tuple[list[float], list[Counter[str]]]:
    """One step: (seconds, calls) of each of PASSES."""
    counts = rank.counts
    times, calls = [time.perf_counter()], [Counter(counts)]

    def mark() -> None:
        times.append(time.perf_counter())
        calls.append(Counter(counts))

    rank.engine.begin_step()
    mark()
    y = rank.forward(x)
    mark()
    y.backward(torch.ones_like(y))
    mark()
    spans = range(len(PASSES))
    return [times[n + 1] - times[n] for n in spans], [calls[n + 1] - calls[n] for n in spans]


def run(world_size: int, layers: int, steps: int, make: Any, **settings: Any) -> tuple[list[float], list[Counter[str]]]:
    """(median seconds, calls in the last step) of each pass of a model of so many layers."""
    rank = OneRank(make(), world_size, layers=layers, width=WIDTH, window=WINDOW, **settings)
    try:
        x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=rank.engine.device, requires_grad=True)
        spent = []
        for _ in range(WARM_UP + steps):
            times, calls = step(rank, x)
            spent.append(times)
            rank.synchronize()
        return [statistics.median(column) for column in zip(*spent[WARM_UP:], strict=True)], calls
    finally:
        rank.close()


def measure(
    world_size: int, steps: int = 40, make: Any = NullDevice, depths: Sequence[int] | None = None, **settings: Any
) -> dict[str, Any]:
    """Microseconds and driver calls of one fused linear, by pass. depths: layers of the two models."""
    shallow, deep = depths or (SHALLOW, DEEP)
    few, many = (run(world_size, layers, steps, make, **settings) for layers in (shallow, deep))
    row: dict[str, Any] = {"ranks": world_size}
    for n, name in enumerate(PASSES):
        calls = {
            kind: round((count - few[1][n][kind]) / (deep - shallow), 2) for kind, count in sorted(many[1][n].items()) if count
        }
        row[name] = {
            "microseconds": round(1e6 * (many[0][n] - few[0][n]) / (deep - shallow), 1),
            "calls": {kind: count for kind, count in calls.items() if count},
            "calls_in_all": round(sum(calls.values()), 2),
        }
    return row


def profile(world_size: int, lines: int, make: Any, **settings: Any) -> None:
    """Prints, for each pass, the functions that take most time themselves, per layer. With a profiler all frames take longer;
    calls of the driver do not."""
    rank = OneRank(make(), world_size, layers=SHALLOW, width=WIDTH, window=WINDOW, **settings)
    try:
        x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=rank.engine.device, requires_grad=True)
        profiles = {name: cProfile.Profile() for name in ("forward", "backward")}
        for turn in range(2 * WARM_UP):
            watched = turn >= WARM_UP
            rank.engine.begin_step()
            with profiles["forward"] if watched else contextlib.nullcontext():
                y = rank.forward(x)
            ones = torch.ones_like(y)
            with profiles["backward"] if watched else contextlib.nullcontext():
                y.backward(ones)
            rank.synchronize()
    finally:
        rank.close()
    for name, found in profiles.items():
        rows = pstats.Stats(found).stats.items()  # type: ignore[attr-defined]
        layers = WARM_UP * SHALLOW
        total = 1e6 * sum(row[2] for _, row in rows) / layers
        print(f"\nN = {world_size}, {name}, by function: {total:.0f} us a layer with the profiler")
        for (file, line, function), row in sorted(rows, key=lambda item: -item[1][2])[:lines]:
            place = f"{Path(file).name}:{line}" if line else ""
            print(f"  {1e6 * row[2] / layers:7.2f} us {row[1] / layers:6.1f} calls  {function} {place}")


def show(row: dict[str, Any]) -> None:
    for name in PASSES:
        found = row[name]
        kinds = ", ".join(f"{count:g} {kind}" for kind, count in found["calls"].items())
        print(f"N = {row['ranks']}  {name:8} {found['microseconds']:7.1f} us   {found['calls_in_all']:g} calls ({kinds})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--kernels", choices=["blas", "triton", "none"], default="none", help="on a GPU: what computes products"
    )
    parser.add_argument("--depths", default=f"{SHALLOW},{DEEP}", help="layers of the two models")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="so many functions of each pass")
    parser.add_argument("--save", action="store_true", help=f"write a record into {RESULTS.name}/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    depths = [int(depth) for depth in arguments.depths.split(",")]
    make: Any = NullDevice
    settings: dict[str, Any] = {}
    if arguments.device == "cuda":
        make = UnwaitingDevice
        settings = {"config": {"kernels": "auto" if arguments.kernels == "none" else arguments.kernels}}
    with contextlib.ExitStack() as stack:
        if arguments.kernels == "none":
            stack.enter_context(nothing_computed())
        rows = []
        for world_size in map(int, arguments.ranks.split(",")):
            rows.append(measure(world_size, arguments.steps, make, depths, **settings))
            show(rows[-1])
            if arguments.profile:
                profile(world_size, arguments.profile, make, **settings)
    if arguments.save:
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
        record = {
            "what": "host time and driver calls of one fused linear",
            "conditions": conditions(arguments.device, arguments.kernels),
            "device": name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "layers": depths,
            "window_layers": WINDOW,
            "steps": arguments.steps,
            "rows": rows,
        }
        path = RESULTS / f"{datetime.date.today()}_device-overhead_{name.replace(' ', '-').lower()}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
