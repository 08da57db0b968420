"""A CUDA GPU as a `Device`: torch's streams and events, the driver's copies and stream memory operations.

Needs cuda-bindings (`pip install "commfuse_dp[cuda]"`) and a driver of CUDA 12 or newer.

[Note: Writing a word of a peer]
`cuStreamWriteValue32` takes "the device address to write to" (CUDA driver API, Stream Memory Operations); it excludes managed
memory, and neither allows nor forbids a peer's memory mapped here. NCCL does not rely on it: its copy-engine collectives write
a word of their own and copy its four bytes to the peer by `cudaMemcpyAsync` in the same stream (`ncclPrepUCSync` in NCCL's
ce_coll.cc). So both ways are here, and a trial when a transport opens decides (`peer_writes`):

    "value"   cuStreamWriteValue32(stream, address in the peer's memory, value)
    "copy"    cuStreamWriteValue32(stream, own word of this stream, value); cuMemcpyAsync(address at the peer, own word, 4)

Both are ordered behind everything before them in the stream: a write of a value makes a fence over the whole system first
(CU_STREAM_WRITE_VALUE_DEFAULT), a copy starts when its stream has come to it. The own word is used again only behind the copy.

[Note: Waiting costs nothing, but must not stand in the way]
A wait for a value is done by the channel that feeds the GPU, not by a multiprocessor. When several processes share one GPU,
their work is time-sliced: a channel whose value has not come yields, so a waiting process does not hold up the one that it
waits for. Inside one process, streams may be mapped onto the same channel; then a wait also holds up a stream that nothing
orders behind it, which in a circle of ranks is a deadlock ("may deadlock the application. Synchronization ordering established
through this API is not visible to CUDA", same manual). Hence:
* our streams have a priority of their own, and thereby other channels than torch's default and pool streams;
* they are few: "gather", "scatter", "reduce" and "watch", below the 8 channels of the default CUDA_DEVICE_MAX_CONNECTIONS;
* what one process orders by a value is also ordered by events wherever both ends are its own (the transport's business);
* should all share one channel all the same (CUDA_DEVICE_MAX_CONNECTIONS=1), work runs in the order of the calls, which is safe:
  see [Note: The host may stand] in base.py.

[Note: Few calls]
A call of the driver costs the host two microseconds or more, whatever it does. So:
* waits and writes of words that follow each other in a stream are one `cuStreamBatchMemOp`, which keeps their order. It is
  called by ctypes: words are numbered, and an operation as an object of cuda-bindings takes 8 us to make, packed 0.3;
* copies that nothing tells apart are one `cuMemcpyBatchAsync` (CUDA 12.8), whose copies run in any order: there can be no word
  between them. It takes the flag PREFER_OVERLAP_WITH_COMPUTE, a hint to use copy engines where CUDA would not by itself, as
  inside one GPU. An older driver, and the legacy default stream, which it refuses, get single copies.

[Note: Lifetime]
Nothing calls `record_stream`: it would let the allocator's pools grow by every buffer whose copy was late. Whoever enqueues a
copy keeps both tensors until an event behind it is done. Streams are made once per process and never destroyed: the
allocator may remember them for ever.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch

from commfuse_dp.device.base import Batch, Device, Event, Span, Stream, Word, WordLike
from commfuse_dp.device.compat import raw_stream
from commfuse_dp.errors import TransportError

MIN_DRIVER = 12000  # cuDriverGetVersion: stream memory operations are there without a kernel module's parameter
_SPOIL_BYTES = 1 << 20  # of one copy
_BATCH = 255  # cuStreamBatchMemOp takes fewer than 256 operations
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
# CUstreamBatchMemOpParams: operation, address, value, flags, alias.
pack_operation = struct.Struct("<I4xQI4xI4xQ8x").pack
_LEGACY_STREAMS = (0, 1)  # the null stream, and CU_STREAM_LEGACY

PeerWrites = Literal["value", "copy"]


class Card(NamedTuple):
    """What the ranks tell each other about their GPUs before they choose a transport. `problem`: why this one cannot."""

    ordinal: int  # of the CUDA device in its own process
    uuid: str
    name: str
    capability: tuple[int, int]
    problem: str | None


def _driver() -> Any:
    """The module of driver calls. Raises TransportError if cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportError(
            f"cuda-bindings is missing ({error}): streams cannot be made to wait for peers. "
            'Install it: pip install "commfuse_dp[cuda]" (cuda-bindings 13 or newer)'
        ) from None
    return driver


def _checked(result: tuple[Any, ...], call: str) -> Any:
    """The value of a driver call; raises TransportError with the error's name."""
    if int(result[0]) != 0:
        raise TransportError(f"{call} failed: {result[0].name}")
    return result[1] if len(result) > 1 else None


@functools.cache
def _batch_operations() -> Callable[[int, int, bytes, int], int]:
    """cuStreamBatchMemOp(stream, count, operations, flags) -> CUresult; see [Note: Few calls]."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2  # there since MIN_DRIVER
    except (OSError, AttributeError) as error:
        raise TransportError(
            f"the NVIDIA driver's library has no cuStreamBatchMemOp ({error}): is it for CUDA 12 or newer?"
        ) from None
    call.argtypes = ctypes.c_void_p, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint
    call.restype = ctypes.c_int
    return call


def card(device: torch.device) -> Card:
    """Facts about a GPU; never raises for what is missing, but says so in `problem`."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    problem = None
    try:
        driver = _driver()
        version = _checked(driver.cuDriverGetVersion(), "cuDriverGetVersion")
        if version < MIN_DRIVER:
            problem = (
                f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10} only; update it to one for CUDA "
                f"{MIN_DRIVER // 1000} or newer"
            )
    except TransportError as error:
        problem = str(error)
    except Exception as error:  # cuda-bindings finds no driver library, whichever class it has for that
        problem = f"cuda-bindings cannot load the NVIDIA driver ({error})"
    return Card(index, str(properties.uuid), properties.name, (properties.major, properties.minor), problem)


def link(own: Card, peer: Card) -> str | None:
    """How memory of `peer` is reached from here: "one GPU", "NVLink", "PCIe", "unknown" (not visible); None: not at all."""
    if own.uuid == peer.uuid:
        return "one GPU"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    index = visible.get(peer.uuid)
    if index is None:  # CUDA_VISIBLE_DEVICES leaves one GPU to each process: the mapping itself will tell
        return "unknown"
    if not torch.cuda.can_device_access_peer(own.ordinal, index):
        return None
    driver = _driver()
    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    atomics = _checked(driver.cuDeviceGetP2PAttribute(attribute, own.ordinal, index), "cuDeviceGetP2PAttribute")
    return "NVLink" if atomics else "PCIe"  # atomic operations on a peer's memory are NVLink's


class CudaStream(Stream):
    __slots__ = ("handle", "name", "torch")

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.torch = stream
        self.handle: int = stream.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.handle == self.handle

    def __hash__(self) -> int:
        return hash(self.handle)


class _On:
    """`torch.cuda.stream` on the device that is current, in a third of its time."""

    __slots__ = ("_before", "_stream")

    def __init__(self, before: CudaStream, stream: CudaStream) -> None:
        self._before, self._stream = before, stream

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream.torch)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before.torch)


class CudaEvent(Event):
    __slots__ = ("timed", "torch")

    def __init__(self, event: torch.cuda.Event, timed: bool) -> None:
        self.torch = event
        self.timed = timed

    def done(self) -> bool:
        return self.torch.query()

    def wait(self) -> None:
        self.torch.synchronize()


_streams: dict[tuple[int, str], CudaStream] = {}  # see [Note: Lifetime]
_making = threading.Lock()


class CudaDevice(Device):
    """Raises TransportError if cuda-bindings or the driver is missing or too old."""

    def __init__(self, device: torch.device) -> None:
        facts = card(device)
        if facts.problem is not None:
            raise TransportError(f"{facts.name} (cuda:{facts.ordinal}): {facts.problem}")
        self.torch_device = torch.device("cuda", facts.ordinal)
        self.peer_writes: PeerWrites = "value"
        self.capturing = torch.cuda.is_current_stream_capturing
        self._driver = driver = _driver()
        self._geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self._eq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self._threads = threading.local()
        self._known: dict[int, CudaStream] = {}
        self._batch_operations = _batch_operations()
        self._copy_attributes: Any = None  # of cuMemcpyBatchAsync; made with the first batch
        self._copies_in_batches = hasattr(driver, "cuMemcpyBatchAsync")
        self._own_words: dict[int, torch.Tensor] = {}  # stream -> word for "copy"

    def _bind(self) -> None:
        """Give this thread torch's context: the driver's calls need one, and torch makes it current only when it runs."""
        driver = self._driver
        device = _checked(driver.cuDeviceGet(self.torch_device.index), "cuDeviceGet")
        context = _checked(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
        _checked(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self._threads.bound = True

    # ---- streams and events ------------------------------------------------------------------------------------------
    def current_stream(self) -> CudaStream:
        if not hasattr(self._threads, "bound"):
            self._bind()
        handle = raw_stream(self.torch_device.index)
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = CudaStream("current", torch.cuda.current_stream(self.torch_device))
        return known

    def side_stream(self, name: str) -> CudaStream:
        key = (self.torch_device.index, name)
        with _making:
            stream = _streams.get(key)
            if stream is None:
                stream = _streams[key] = CudaStream(name, self._make_stream())
        return stream

    def _make_stream(self) -> torch.cuda.Stream:
        driver = self._driver
        self._bind()
        with torch.cuda.device(self.torch_device):
            _, greatest = _checked_pair(driver.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")
            flag = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            handle = _checked(driver.cuStreamCreateWithPriority(flag, greatest), "cuStreamCreateWithPriority")
        return torch.cuda.ExternalStream(int(handle), device=self.torch_device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, CudaStream)
        if torch.cuda.current_device() != self.torch_device.index:
            return torch.cuda.stream(stream.torch)
        return _On(self.current_stream(), stream)

    def record(self, stream: Stream, *, timing: bool = False) -> CudaEvent:
        assert isinstance(stream, CudaStream)
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream.torch)
        return CudaEvent(event, timing)

    def elapsed(self, start: Event, end: Event) -> int:
        assert isinstance(start, CudaEvent) and isinstance(end, CudaEvent)
        return round(1e6 * start.torch.elapsed_time(end.torch))

    def wait_event(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, CudaStream) and isinstance(event, CudaEvent)
        stream.torch.wait_event(event.torch)

    # ---- bytes -------------------------------------------------------------------------------------------------------
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """By `cuMemcpyAsync`: between two GPUs a copy engine does it; inside one GPU CUDA may use multiprocessors, so no kernel
        may wait for such a copy: see [Note: Kernels that wait] in transport/symmetric/transport.py."""
        assert isinstance(stream, CudaStream) and dst.numel() == src.numel()
        if dst.numel():
            self._do(self._driver.cuMemcpyAsync(dst.data_ptr(), src.data_ptr(), dst.numel(), stream.handle), "cuMemcpyAsync")

    # ---- words -------------------------------------------------------------------------------------------------------
    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        assert isinstance(stream, CudaStream)
        address, flags = pad.data_ptr() + 4 * index, self._eq if exact else self._geq
        self._do(self._driver.cuStreamWaitValue32(stream.handle, address, value & 0xFFFFFFFF, flags), "cuStreamWaitValue32")

    def write_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int) -> None:
        assert isinstance(stream, CudaStream)
        address = pad.data_ptr() + 4 * index
        if self.peer_writes == "copy":
            self._write_by_copy(stream, [(address, value)])
        else:
            self._write_own(stream, address, value)

    def write_values(self, stream: Stream, words: Sequence[WordLike]) -> None:
        assert isinstance(stream, CudaStream)
        if self.peer_writes == "copy":
            self._write_by_copy(stream, [(pad.data_ptr() + 4 * place, value) for pad, place, value in words])
        elif len(words) == 1:
            self.write_value(stream, *words[0])
        else:
            batch = self.batch(stream)
            batch.write_all(words)
            batch.submit()

    def _write_own(self, stream: CudaStream, address: int, value: int) -> None:
        self._do(self._driver.cuStreamWriteValue32(stream.handle, address, value & 0xFFFFFFFF, 0), "cuStreamWriteValue32")

    def _write_by_copy(self, stream: CudaStream, targets: Sequence[tuple[int, int]]) -> None:
        own = self._own_words.get(stream.handle)
        if own is None:
            own = self._own_words[stream.handle] = torch.zeros(1, dtype=torch.int32, device=self.torch_device)
            torch.cuda.current_stream(self.torch_device).synchronize()  # once per stream: it must not be zeroed later on
        last: int | None = None
        for address, value in targets:
            if value != last:
                self._write_own(stream, own.data_ptr(), value)
                last = value
            self._do(self._driver.cuMemcpyAsync(address, own.data_ptr(), 4, stream.handle), "cuMemcpyAsync")

    # ---- batches -----------------------------------------------------------------------------------------------------
    def batch(self, stream: Stream) -> CudaBatch:
        assert isinstance(stream, CudaStream)
        return CudaBatch(self, stream)

    def flags(self, exact: bool) -> int:
        """Of a wait."""
        return self._eq if exact else self._geq

    def operate(self, stream: CudaStream, operations: list[bytes]) -> None:
        """At most _BATCH operations, in their order."""
        status = self._batch_operations(stream.handle, len(operations), b"".join(operations), 0)
        self._do((status,), "cuStreamBatchMemOp")

    def copy_bytes(self, stream: CudaStream, to: int, at: int, nbytes: int) -> None:
        """Between addresses; nbytes > 0."""
        self._do(self._driver.cuMemcpyAsync(to, at, nbytes, stream.handle), "cuMemcpyAsync")

    def copy_many(self, stream: CudaStream, to: list[int], at: list[int], sizes: list[int]) -> None:
        """Between addresses, in any order; sizes > 0, at least one. See [Note: Few calls]."""
        if self._copies_in_batches and stream.handle not in _LEGACY_STREAMS:
            driver = self._driver
            if self._copy_attributes is None:
                self._copy_attributes = driver.CUmemcpyAttributes()
                self._copy_attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
                self._copy_attributes.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
            pointers = [list(map(driver.CUdeviceptr, addresses)) for addresses in (to, at)]  # in a list it takes no int
            try:
                result = driver.cuMemcpyBatchAsync(*pointers, sizes, len(sizes), [self._copy_attributes], [0], 1, stream.handle)
            except RuntimeError:  # cuda-bindings does not find the function in the driver
                self._copies_in_batches = False
            else:
                if int(result[0]) != int(driver.CUresult.CUDA_ERROR_NOT_SUPPORTED):
                    self._do(result, "cuMemcpyBatchAsync")
                    return
                self._copies_in_batches = False
        for span in zip(to, at, sizes, strict=True):
            self.copy_bytes(stream, *span)

    def _do(self, result: tuple[Any, ...], call: str) -> None:
        if int(result[0]) != 0:
            _checked((self._driver.CUresult(result[0]),), call)

    # ---- out of band -------------------------------------------------------------------------------------------------
    def peek(self, pad: torch.Tensor) -> list[int]:
        words = (ctypes.c_int32 * pad.numel())()
        watch = self._watch_stream()
        arguments = (ctypes.addressof(words), pad.data_ptr(), 4 * pad.numel(), watch.handle)
        self._do(self._driver.cuMemcpyDtoHAsync(*arguments), "cuMemcpyDtoHAsync")
        watch.torch.synchronize()
        return list(words)

    def poke(self, words: Sequence[Word]) -> None:
        watch = self._watch_stream()
        for word in words:
            self._write_own(watch, word.pad.data_ptr() + 4 * word.place, word.value)
        watch.torch.synchronize()

    def spoil(self, memory: Sequence[torch.Tensor]) -> None:
        """Copied from the host, as copy engines do that; a memset would be a kernel."""
        watch = self._watch_stream()
        ones = ctypes.create_string_buffer(b"\xff" * _SPOIL_BYTES, _SPOIL_BYTES)
        for tensor in memory:
            for start in range(0, tensor.nbytes, _SPOIL_BYTES):
                nbytes = min(_SPOIL_BYTES, tensor.nbytes - start)
                arguments = (tensor.data_ptr() + start, ctypes.addressof(ones), nbytes, watch.handle)
                self._do(self._driver.cuMemcpyHtoDAsync(*arguments), "cuMemcpyHtoDAsync")
        watch.torch.synchronize()

    def _watch_stream(self) -> CudaStream:
        if not hasattr(self._threads, "bound"):
            self._bind()
        return self.side_stream("watch")


class CudaBatch(Batch):
    """See [Note: Few calls]. Addresses are worked out here, without making views."""

    __slots__ = ("_cuda", "_cuda_stream", "_held")

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        super().__init__(device, stream)
        self._cuda, self._cuda_stream = device, stream
        self._held: list[bytes] = []

    def copy(self, dst: torch.Tensor, dst_start: int, src: torch.Tensor, src_start: int, nbytes: int) -> None:
        if nbytes:
            if self._held:
                self.submit()
            self._cuda.copy_bytes(self._cuda_stream, dst.data_ptr() + dst_start, src.data_ptr() + src_start, nbytes)

    def copy_all(self, spans: Sequence[Span]) -> None:
        spans = [span for span in spans if span[4]]
        if len(spans) <= 1:
            for span in spans:
                self.copy(*span)
            return
        self.submit()
        to = [span[0].data_ptr() + span[1] for span in spans]
        at = [span[2].data_ptr() + span[3] for span in spans]
        self._cuda.copy_many(self._cuda_stream, to, at, [span[4] for span in spans])

    def wait(self, pad: torch.Tensor, place: int, value: int, *, exact: bool = False) -> None:
        self.wait_all(((pad, place, value),), exact=exact)

    def write(self, pad: torch.Tensor, place: int, value: int) -> None:
        self.write_all(((pad, place, value),))

    def wait_all(self, words: Sequence[WordLike], *, exact: bool = False) -> None:
        self._hold(_WAIT, words, self._cuda.flags(exact))

    def write_all(self, words: Sequence[WordLike]) -> None:
        if self._cuda.peer_writes == "value":
            self._hold(_WRITE, words, 0)
            return
        self.submit()
        for word in words:
            self._cuda.write_value(self._cuda_stream, *word)

    def _hold(self, kind: int, words: Sequence[WordLike], flags: int) -> None:
        """Until `submit`, which comes by itself where too many are held."""
        held = self._held
        for pad, place, value in words:
            if len(held) == _BATCH:
                self.submit()
                held = self._held
            held.append(pack_operation(kind, pad.data_ptr() + 4 * place, value & 0xFFFFFFFF, flags, 0))

    def submit(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._cuda.operate(self._cuda_stream, held)


def _checked_pair(result: tuple[Any, ...], call: str) -> tuple[int, int]:
    _checked(result, call)
    return int(result[1]), int(result[2])
