"""CudaDevice without a GPU: the driver is a recorder; the constants are cuda-bindings' own, whose objects read operations."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_dp.device.cuda import CudaDevice, CudaStream, pack_operation

driver = pytest.importorskip("cuda.bindings.driver")


def operations(packed: bytes) -> list[tuple[Any, ...]]:
    """(address, value, flags) of each write; of a wait the same behind its name. As cuda-bindings' own objects read them."""
    kinds, found = driver.CUstreamBatchMemOpType, []
    size = len(pack_operation(0, 0, 0, 0, 0))
    for start in range(0, len(packed), size):
        memory = ctypes.create_string_buffer(packed[start : start + size], size)
        op = driver.CUstreamBatchMemOpParams(ctypes.addressof(memory))
        waits = op.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        part = op.waitValue if waits else op.writeValue
        assert waits or op.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        assert part.operation == op.operation and int(part.alias) == 0
        found.append(("wait",) * waits + (int(part.address), int(part.value), part.flags))
    return found


class Recorder:
    """Calls as (name, arguments); everything else is the real module's. `fails`: name of the call that does not succeed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = ""
        self.missing = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(driver, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuMemcpyBatchAsync":
                (attributes,) = arguments[4]
                order, overlap = attributes.srcAccessOrder, attributes.flags
                arguments = (*([int(n) for n in a] for a in arguments[:3]), arguments[3], (order, overlap), *arguments[5:])
                if self.missing:
                    raise RuntimeError('Function "cuMemcpyBatchAsync_v2" not found')
            self.calls.append((name, *arguments))
            ok = driver.CUresult.CUDA_SUCCESS
            return (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED if name == self.fails else ok, 0)

        return call

    def batch_operations(self, stream: int, count: int, packed: bytes, flags: int) -> int:
        status, _ = self.cuStreamBatchMemOp(stream, count, operations(packed), flags)
        return int(status)


def recorded(kind: type[CudaDevice] = CudaDevice) -> Any:
    """Its `_driver` is a Recorder."""
    made = kind.__new__(kind)
    made.torch_device = torch.device("cpu")
    made.peer_writes = "value"
    made._driver, made._geq, made._eq = Recorder(), 0, 1
    made._threads = threading.local()
    made._known, made._own_words = {}, {}
    made._batch_operations = made._driver.batch_operations
    made._copy_attributes, made._copies_in_batches = None, True
    return made


def stream(handle: int = 7) -> CudaStream:
    return CudaStream("s", SimpleNamespace(cuda_stream=handle))  # type: ignore[arg-type]
