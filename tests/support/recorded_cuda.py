"""CudaDevice without a GPU: the driver is a recorder; the constants and the operations are cuda-bindings' own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_dp.device.cuda import CudaDevice, CudaStream

driver = pytest.importorskip("cuda.bindings.driver")


def operation(op: Any) -> tuple[Any, ...]:
    """(address, value, flags) of a write; of a wait the same behind its name."""
    if op.operation == driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32:
        assert op.waitValue.operation == op.operation
        return "wait", int(op.waitValue.address), int(op.waitValue.value), op.waitValue.flags
    assert op.writeValue.operation == op.operation == driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    return int(op.writeValue.address), int(op.writeValue.value), op.writeValue.flags


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
            if name == "cuStreamBatchMemOp":
                arguments = (arguments[0], arguments[1], [operation(op) for op in arguments[2]], arguments[3])
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


def recorded(kind: type[CudaDevice] = CudaDevice) -> Any:
    """Its `_driver` is a Recorder."""
    made = kind.__new__(kind)
    made.torch_device = torch.device("cpu")
    made.peer_writes = "value"
    made._driver, made._geq, made._eq = Recorder(), 0, 1
    made._threads = threading.local()
    made._known, made._own_words, made.operations = {}, {}, {}
    made._copy_attributes, made._copies_in_batches = None, True
    return made


def stream(handle: int = 7) -> CudaStream:
    return CudaStream("s", SimpleNamespace(cuda_stream=handle))  # type: ignore[arg-type]
