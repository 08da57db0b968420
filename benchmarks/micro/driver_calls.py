"""Microseconds of the host for each kind of call that a layer makes on a GPU: of the driver, of torch, a launch.

    python -m benchmarks.micro.driver_calls          needs a GPU

One call at a time, medians over many, into streams that are empty when a measurement begins and never full. What a layer takes
beyond the sum of its calls (micro/device_overhead.py) is Python's.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.clock import host_microseconds
from benchmarks.gpu.part import no_gpu

CALLS, WARM_UP = 300, 20


def driver_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """What `CudaDevice` offers, and what it is made of."""
    from commfuse_dp.device.cuda import CudaDevice

    cuda = CudaDevice(device)
    main, side = cuda.current_stream(), cuda.side_stream("gather")
    pad = torch.zeros(64, dtype=torch.int32, device=device)
    source, target = (torch.zeros(1 << 18, dtype=torch.uint8, device=device) for _ in range(2))
    pinned = torch.zeros(1 << 18, dtype=torch.uint8, pin_memory=True)
    size = 1 << 15
    event = cuda.record(main)

    def operations(kind: str, count: int) -> Callable[[], object]:
        def work() -> None:
            batch = cuda.batch(side)
            getattr(batch, kind)([(pad, place, 0) for place in range(count)])
            batch.submit()

        return work

    def copies(count: int, memory: torch.Tensor) -> Callable[[], object]:
        spans = [(target, place * size, memory, place * size, size) for place in range(count)]

        def work() -> None:
            batch = cuda.batch(side)
            batch.copy_all(spans)
            batch.submit()

        return work

    handle = side.handle
    driver = cuda._driver
    return {
        "nothing": lambda: None,
        "cuStreamGetPriority (a call that does nothing)": lambda: driver.cuStreamGetPriority(handle),
        "current_stream()": cuda.current_stream,
        "torch.cuda.current_stream(device)": lambda: torch.cuda.current_stream(device),
        "torch.cuda.current_device()": torch.cuda.current_device,
        "with on(side)": lambda: _within(cuda, side),
        "torch.cuda.Event()": lambda: torch.cuda.Event(),
        "record(main)": lambda: cuda.record(main),
        "record(side)": lambda: cuda.record(side),
        "wait_event(side, of main)": lambda: cuda.wait_event(side, event),
        "record(main) and wait_event(side)": lambda: cuda.wait_event(side, cuda.record(main)),
        "write_value": lambda: cuda.write_value(side, pad, 0, 0),
        "wait_value": lambda: cuda.wait_value(side, pad, 0, 0),
        **{f"{kind} of {count}": operations(kind, count) for kind in ("wait_all", "write_all") for count in (1, 2, 8)},
        "copy 32 KiB inside the GPU": lambda: cuda.copy_bytes(side, target.data_ptr(), source.data_ptr(), size),
        "copy 32 KiB from pinned memory": lambda: cuda.copy_bytes(side, target.data_ptr(), pinned.data_ptr(), size),
        **{f"copies in a batch, {count}, inside the GPU": copies(count, source) for count in (2, 8)},
        **{f"copies in a batch, {count}, from pinned memory": copies(count, pinned) for count in (2, 8)},
        "torch.empty 32 KiB": lambda: torch.empty(size, dtype=torch.uint8, device=device),
        "torch.mm 64 x 64": _product(device),
        "tensor.add_": lambda: pad.add_(0),
    }


def _within(cuda: Any, stream: Any) -> None:
    with cuda.on(stream):
        pass


def _product(device: torch.device) -> Callable[[], object]:
    a, out = torch.zeros(64, 64, device=device, dtype=torch.bfloat16), torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
    return lambda: torch.mm(a, a, out=out)


def launches(device: torch.device) -> dict[str, Callable[[], object]]:
    """Kernels by our own launchers, from the outside in."""
    from commfuse_dp.kernels import nvrtc
    from commfuse_dp.kernels.inbox_sum import inbox_sum, plan_sum
    from commfuse_dp.kernels.packs import THREADS

    found: dict[str, Callable[[], object]] = {}
    out = torch.zeros(4096, device=device)
    partials = [torch.zeros(4096, device=device, dtype=torch.bfloat16) for _ in range(8)]
    found["inbox_sum of 8"] = lambda: inbox_sum(out, partials, divisor=8.0, implementation="kernel")
    how: dict[str, Any] = {"out_dtype": out.dtype, "dtype": torch.bfloat16, "divisor": 8.0, "accumulate": False}
    spec, argument, blocks = plan_sum(out.data_ptr(), [p.data_ptr() for p in partials], 4096, **how)
    kernel, stream = nvrtc.kernel(spec, device), torch.cuda.current_stream().cuda_stream
    found["  its plan"] = lambda: plan_sum(out.data_ptr(), [p.data_ptr() for p in partials], 4096, **how)
    found["  its launch by cuda-bindings"] = lambda: kernel.launch(blocks, THREADS, ctypes.addressof(argument), stream)
    found |= _products(device)
    return found


def _products(device: torch.device) -> dict[str, Callable[[], object]]:
    """Of each product: all of it; the launch; what Triton does for a launch, and its part without the binding of arguments."""
    import triton

    from benchmarks.gpu.products import Product
    from benchmarks.gpu.shapes import Shape
    from commfuse_dp.device.cuda import CudaDevice
    from commfuse_dp.kernels import launching, tiles
    from commfuse_dp.kernels.choice import Chooser
    from commfuse_dp.kernels.gemms import Gemms

    triton.set_allocator(launching._scratch)
    gemms = Gemms(Chooser("triton"), CudaDevice(device))
    pad = torch.zeros(8, dtype=torch.int32, device=device)
    found: dict[str, Callable[[], object]] = {}
    for op in tiles.PASSES:
        product = Product(op, Shape("host", 256, 1024, 1024), 8, torch.bfloat16, device, pad=pad)
        call = partial(getattr(gemms, op), *product.arguments(), epoch=0)
        with mock.patch(f"commfuse_dp.kernels.gemm_{op}.launch") as launch:
            call()
        kernel, arguments, plan, _ = launch.call_args.args
        grid = (plan.tiles,)
        options = {**plan.constants, "num_warps": plan.config.warps, "num_stages": plan.config.stages}
        run = kernel[grid](*arguments, **options)[plan.tiles, 1, 1]
        constants = [plan.constants[name] for name in kernel.arg_names[len(arguments) :]]
        found |= {
            f"product {op}": call,
            f"  {op}: tiles.problem_of": lambda product=product: product.problem,  # type: ignore[misc]
            f"  {op}: launch": partial(launching.launch, *launch.call_args.args),
            f"  {op}: kernel[grid](...)": partial(kernel[grid], *arguments, **options),
            f"  {op}: compiled[grid](...)": partial(run, *arguments, *constants),
        }
    return found


def main() -> int:
    problem = no_gpu()
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    for table in (driver_calls, launches):
        for name, call in table(device).items():
            try:
                spent = host_microseconds(call, WARM_UP + CALLS)[WARM_UP:]
                middle, late = statistics.median(spent), statistics.quantiles(spent, n=10)[-1]
                print(f"{name:55} {middle:8.2f} us   90 %: {late:8.2f} us", flush=True)
            except Exception as error:
                print(f"{name:55} {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
