"""Part (f): what the transport enqueues needs no multiprocessor, shown directly: it ends while a kernel holds all of them.

| operation | expected |
| --- | --- |
| a kernel | must not end: else the multiprocessors were not held, and nothing below means anything |
| words: written, and waited for, by a stream | ends |
| copies between pinned host memory and the GPU | end: copy engines make them |
| copies between two GPUs, words of a peer | end; only where there are two |
| copies inside one GPU | whichever: a finding. Ranks that share a GPU rely on neither (transport/symmetric/transport.py) |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.hold import Hold, Trial, trial
from benchmarks.gpu.part import Options, Reporter, run_part
from commfuse_dp.device.base import Device, Stream

PATIENCE_S = 1.0  # a copy of MOST bytes takes milliseconds; a finding costs that long
MOST, LEAST = 64 << 20, 4096


class Operation(NamedTuple):
    """needs: a multiprocessor; None: to be found out."""

    name: str
    nbytes: int
    needs: bool | None
    work: Callable[[Stream], None]


def run(report: Reporter, options: Options) -> None:
    """Copies and words of the transport while a kernel holds every multiprocessor."""
    if options.device != "cuda":
        report.skip("copy engines need a GPU")
        return
    from commfuse_dp.device.cuda import CudaDevice

    device = torch.device("cuda", 0)
    cuda = CudaDevice(device)
    holds = [Hold(device, 2 * PATIENCE_S)]
    found = list(own_operations(cuda, device))
    if torch.cuda.device_count() < 2:
        report.skip("copies between GPUs: this machine has one GPU")
    elif not torch.cuda.can_device_access_peer(0, 1):
        report.skip("copies between GPUs: GPU 0 does not reach the memory of GPU 1")
    else:
        holds.append(Hold(torch.device("cuda", 1), 2 * PATIENCE_S))
        found += peer_operations(cuda, device, torch.device("cuda", 1))
    judge(report, found, lambda work: trial(Together(holds), cuda, cuda.side_stream("gather"), work, PATIENCE_S), cuda)


class Together:
    """Several GPUs held at once: either of them might copy."""

    def __init__(self, holds: list[Hold]) -> None:
        self._holds = holds
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for hold in self._holds:
            self._stack.enter_context(hold)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def holding(self) -> bool:
        return all(hold.holding for hold in self._holds)


def judge(
    report: Reporter, operations: list[Operation], attempt: Callable[[Callable[[Stream], None]], Trial], device: Device
) -> None:
    """One row each; what needs a multiprocessor against expectation is wrong, and counted for the target."""
    wrong = 0
    for operation in operations:
        about = {"kind": "multiprocessors", "operation": operation.name, "bytes": operation.nbytes}
        try:
            stream = device.side_stream("gather")
            operation.work(stream)  # loads what it needs
            device.record(stream).wait()
            found = attempt(operation.work)
        except Exception as error:
            report.row(**about, needed=f"{type(error).__name__}: {error}")
            if operation.needs is not None:
                report.fail(f"{operation.name}: {type(error).__name__}: {error}")
            continue
        report.row(**about, needed="yes" if found.needed else "no", ms=1e3 * found.seconds)
        if operation.needs is True and not found.needed:
            report.fail(
                f"{operation.name} ended while all multiprocessors were held: they were not, so this part shows nothing"
            )
            return
        if operation.needs is False and found.needed:
            wrong += 1
            report.fail(f"{operation.name} of {operation.nbytes} bytes did not end while the multiprocessors were held")
    count = sum(operation.needs is False for operation in operations)
    report.target(f"operations of the transport that need a multiprocessor, of {count}", wrong, 0, at_least=False, unit="")


def own_operations(cuda: Any, device: torch.device) -> Iterator[Operation]:
    """On one GPU; the control first."""
    values = torch.zeros(1 << 16, device=device)

    def kernel(stream: Stream) -> None:
        with cuda.on(stream):
            values.add_(1.0)

    yield Operation("a kernel (control)", values.nbytes, True, kernel)
    pad = torch.zeros(8, dtype=torch.int32, device=device)
    turn = 0

    def words(stream: Stream) -> None:
        nonlocal turn
        turn += 1
        for index in range(8):
            cuda.write_value(stream, pad, index, turn)
            cuda.wait_value(stream, pad, index, turn)

    yield Operation("words written and waited for", pad.nbytes, False, words)
    for nbytes in (MOST, LEAST):
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        one, two = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        torch.cuda.synchronize()
        yield Operation("copy from pinned host memory", nbytes, False, _copy(cuda, one, host))
        yield Operation("copy to pinned host memory", nbytes, False, _copy(cuda, host, one))
        yield Operation("copies from pinned host memory, in a batch", nbytes, False, _batch(cuda, one, host))
        yield Operation("copy inside the GPU", nbytes, None, _copy(cuda, two, one))
        yield Operation("copy inside the GPU, asked for a copy engine", nbytes, None, _overlapping(two, one))


def peer_operations(cuda: Any, device: torch.device, peer: torch.device) -> Iterator[Operation]:
    """Between two GPUs, both ways, and a word there."""
    for nbytes in (MOST, LEAST):
        here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=where) for where in (device, peer))
        here.copy_(there)  # torch opens the way between the two
        there.copy_(here)
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(peer)
        yield Operation("copy from a peer", nbytes, False, _copy(cuda, here, there))
        yield Operation("copy to a peer", nbytes, False, _copy(cuda, there, here))
        yield Operation("copies from a peer, in a batch", nbytes, False, _batch(cuda, here, there))
    pad = torch.zeros(8, dtype=torch.int32, device=peer)
    torch.cuda.synchronize(peer)
    yield Operation("a word of a peer", 4, False, lambda stream: cuda.write_value(stream, pad, 0, 1))


def _copy(cuda: Any, target: torch.Tensor, source: torch.Tensor) -> Callable[[Stream], None]:
    return lambda stream: cuda.copy(target, source, stream)


def _batch(cuda: Any, target: torch.Tensor, source: torch.Tensor) -> Callable[[Stream], None]:
    """Two copies as the transport hands over the slices of a layer."""
    half = target.numel() // 2
    spans = [(target, start, source, start, half) for start in (0, half)]

    def work(stream: Stream) -> None:
        batch = cuda.batch(stream)
        batch.copy_all(spans)
        batch.submit()

    return work


def _overlapping(target: torch.Tensor, source: torch.Tensor) -> Callable[[Stream], None]:
    """By cuMemcpyBatchAsync with CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE (CUDA 12.8)."""

    def work(stream: Any) -> None:
        from cuda.bindings import driver

        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        pointers = [[driver.CUdeviceptr(tensor.data_ptr())] for tensor in (target, source)]
        result = driver.cuMemcpyBatchAsync(*pointers, [target.numel()], 1, [attributes], [0], 1, stream.handle)
        if int(result[0]) != 0:
            raise RuntimeError(f"cuMemcpyBatchAsync: {result[0].name}")

    return work


if __name__ == "__main__":
    sys.exit(run_part("multiprocessors", run))
