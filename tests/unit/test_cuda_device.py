"""What CudaDevice asks of the driver, without a GPU: the driver is a recorder; the constants are cuda-bindings' own."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_dp.device import cuda
from commfuse_dp.device.base import Word, as_int32, reached
from commfuse_dp.device.cuda import Card, CudaDevice
from commfuse_dp.errors import TransportError
from commfuse_dp.transport.symmetric.memory import TorchSymmetricMemory
from tests.support.recorded_cuda import driver, recorded, stream
from tests.support.threads import ExchangeFn, run_ranks

STREAM_ORDER = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@pytest.fixture
def device() -> Any:
    return recorded()


PAD = torch.zeros(8, dtype=torch.int32)
BYTES = torch.zeros(8, dtype=torch.uint8)
AT = PAD.data_ptr()


def test_marks_keep_the_time_only_if_asked(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.enable_timing, self.at = enable_timing, 0.0

        def record(self, stream: Any) -> None:
            self.at = stream.cuda_stream / 4  # ms

        def elapsed_time(self, end: Any) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    plain, first, second = device.record(stream()), device.record(stream(6), timing=True), device.record(stream(9), timing=True)
    assert [event.timed for event in (plain, first, second)] == [False, True, True] and not plain.torch.enable_timing
    assert device.elapsed(first, second) == 750_000


def test_waits(device: Any) -> None:
    device.wait_value(stream(), PAD, 3, 5)
    device.wait_value(stream(), PAD, 0, -2, exact=True)
    assert device._driver.calls == [
        ("cuStreamWaitValue32", 7, AT + 12, 5, 0),
        ("cuStreamWaitValue32", 7, AT, 0xFFFFFFFE, 1),
    ]
    assert int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == 0
    assert int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ) == 1


def _without_a_driver() -> bool:
    try:
        driver.cuDriverGetVersion()
    except Exception:
        return True
    return False


# With a driver these calls would run on made-up addresses. Without one the bindings still look at every argument first.
@pytest.mark.skipif(not _without_a_driver(), reason="there is a driver, which would do it")
@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.wait_value(stream(), PAD, 3, 5),
        lambda device: device.write_value(stream(), PAD, 3, -5),
        lambda device: device.copy(BYTES, BYTES, stream()),
        lambda device: device.copy_many(stream(), [AT], [AT + 4], [4]),
        lambda device: device._do(driver.cuMemcpyDtoHAsync(AT, AT, 4, 7), ""),
        lambda device: device._make_stream(),
    ],
)
def test_the_real_bindings_take_the_arguments(device: Any, call: Any) -> None:
    """Nothing can be done without a driver, but its arguments are looked at before it is looked for."""
    device._driver, device.torch_device = driver, torch.device("cuda", 0)
    with pytest.raises(Exception) as caught:
        call(device)
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, TransportError), repr(caught.value)
    assert "cuda" in str(caught.value), caught.value


def test_many_words_go_in_batches_below_256(device: Any) -> None:
    pad = torch.zeros(600, dtype=torch.int32)
    for epoch in (1, -1):
        device._driver.calls.clear()
        device.write_values(stream(), [Word(pad, n, epoch * (n + 1)) for n in range(600)])
        calls = device._driver.calls
        assert [call[0] for call in calls] == ["cuStreamBatchMemOp"] * 3 and [call[2] for call in calls] == [255, 255, 90]
        assert all(call[2] == len(call[3]) < 256 for call in calls)
    device._driver.calls.clear()
    device.write_values(stream(), [Word(PAD, 1, 9)])
    assert device._driver.calls == [("cuStreamWriteValue32", 7, AT + 4, 9, 0)]


def test_a_batch_holds_different_words(device: Any) -> None:
    device.write_values(stream(), [Word(PAD, n, n - 1) for n in range(8)])
    assert device._driver.calls[0][3] == [(AT + 4 * n, (n - 1) & 0xFFFFFFFF, 0) for n in range(8)]


def test_words_by_copies(device: Any) -> None:
    device.peer_writes = "copy"
    own = device._own_words[7] = torch.zeros(1, dtype=torch.int32)
    device.write_values(stream(), [Word(PAD, 0, 4), Word(PAD, 1, 4), Word(PAD, 2, 5)])
    word = own.data_ptr()
    assert device._driver.calls == [
        ("cuStreamWriteValue32", 7, word, 4, 0),
        ("cuMemcpyAsync", AT, word, 4, 7),
        ("cuMemcpyAsync", AT + 4, word, 4, 7),
        ("cuStreamWriteValue32", 7, word, 5, 0),
        ("cuMemcpyAsync", AT + 8, word, 4, 7),
    ]


def test_copies_and_errors(device: Any) -> None:
    a, b = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    device.copy(a, b, stream())
    device.copy(a[:0], b[:0], stream())  # nothing
    assert device._driver.calls == [("cuMemcpyAsync", a.data_ptr(), b.data_ptr(), 16, 7)]
    device._driver.fails = "cuStreamWriteValue32"
    with pytest.raises(TransportError, match="cuStreamWriteValue32 failed: CUDA_ERROR_NOT_SUPPORTED"):
        device.write_value(stream(), PAD, 0, 1)
    device._driver.fails = "cuStreamBatchMemOp"
    with pytest.raises(TransportError, match="cuStreamBatchMemOp failed: CUDA_ERROR_NOT_SUPPORTED"):
        device.write_values(stream(), [Word(PAD, 0, 1), Word(PAD, 1, 1)])


def test_current_streams(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object for each handle; one that is made current is so until its body ends, also by an error."""
    current = [stream(5).torch]
    device._threads.bound = True
    device.torch_device = torch.device("cuda", 1)
    monkeypatch.setattr(cuda, "raw_stream", lambda index: current[-1].cuda_stream if index == 1 else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: "of another device")
    before, side = device.current_stream(), stream(9)
    assert before.handle == 5 and device.current_stream() is before
    with pytest.raises(KeyError), device.on(side):
        assert device.current_stream() == side
        raise KeyError
    assert device.current_stream() is before
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device.on(side) == "of another device"


def test_a_batch_keeps_its_order_with_few_calls(device: Any) -> None:
    a, b = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    batch = device.batch(stream())
    batch.wait(PAD, 0, 3)
    batch.wait(PAD, 1, -1, exact=True)
    batch.copy(a, 8, b, 16, 24)
    batch.copy(a, 0, b, 0, 0)  # nothing
    batch.write(PAD, 2, 5)
    batch.wait(PAD, 3, 6)
    batch.write(PAD, 2, 7)
    batch.copy(a, 32, b, 32, 8)
    batch.write(PAD, 4, 8)
    assert len(device._driver.calls) == 4  # what is not followed by anything is held back
    batch.submit()
    batch.submit()
    assert device._driver.calls == [
        ("cuStreamBatchMemOp", 7, 2, [("wait", AT, 3, 0), ("wait", AT + 4, 0xFFFFFFFF, 1)], 0),
        ("cuMemcpyAsync", a.data_ptr() + 8, b.data_ptr() + 16, 24, 7),
        ("cuStreamBatchMemOp", 7, 3, [(AT + 8, 5, 0), ("wait", AT + 12, 6, 0), (AT + 8, 7, 0)], 0),
        ("cuMemcpyAsync", a.data_ptr() + 32, b.data_ptr() + 32, 8, 7),
        ("cuStreamBatchMemOp", 7, 1, [(AT + 16, 8, 0)], 0),
    ]


def test_a_batch_of_more_words_than_a_call_takes(device: Any) -> None:
    pad = torch.zeros(600, dtype=torch.int32)
    batch = device.batch(stream())
    for place in range(600):
        batch.write(pad, place, place)
    batch.submit()
    assert [call[2] for call in device._driver.calls] == [255, 255, 90]
    assert [word[1] for call in device._driver.calls for word in call[3]] == list(range(600))


def test_words_of_peers_by_copies_in_a_batch(device: Any) -> None:
    device.peer_writes = "copy"
    own = device._own_words[7] = torch.zeros(1, dtype=torch.int32)
    batch = device.batch(stream())
    batch.wait(PAD, 0, 3)
    batch.write(PAD, 1, 4)
    batch.submit()
    assert [call[0] for call in device._driver.calls] == ["cuStreamBatchMemOp", "cuStreamWriteValue32", "cuMemcpyAsync"]
    assert device._driver.calls[2][1:3] == (AT + 4, own.data_ptr())


def spans(count: int) -> list[Any]:
    a, b = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    return [(a, 8 * n, b, 16 * n, 4 * n) for n in range(count)]


def test_copies_in_any_order_are_one_call(device: Any) -> None:
    found = spans(3)  # the first is empty
    a, b = found[0][0].data_ptr(), found[0][2].data_ptr()
    batch = device.batch(stream())
    batch.wait(PAD, 0, 1)
    batch.copy_all(found)
    assert device._driver.calls[1:] == [
        ("cuMemcpyBatchAsync", [a + 8, a + 16], [b + 16, b + 32], [4, 8], 2, (STREAM_ORDER, 1), [0], 1, 7)
    ]
    assert int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) == 1


@pytest.mark.parametrize("why", ["not in the driver", "not supported", "legacy stream", "one copy"])
def test_copies_one_by_one(device: Any, why: str) -> None:
    device._driver.missing = why == "not in the driver"
    device._driver.fails = "cuMemcpyBatchAsync" if why == "not supported" else ""
    handle = 0 if why == "legacy stream" else 7
    found = spans(2 if why == "one copy" else 4)
    for _ in range(2):  # what has failed once is not tried again
        device.batch(stream(handle)).copy_all(found)
    names = [call[0] for call in device._driver.calls]
    single = len(found) - 1
    tried = ["cuMemcpyBatchAsync"] if why == "not supported" else []
    assert names == tried + ["cuMemcpyAsync"] * 2 * single


def test_streams_are_equal_by_their_handle() -> None:
    assert stream(1) == stream(1) != stream(2) and len({stream(1), stream(1), stream(2)}) == 2


def test_a_missing_driver_is_a_problem_and_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="u", name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    for driver_, part in (
        (SimpleNamespace(cuDriverGetVersion=lambda: (driver.CUresult.CUDA_SUCCESS, 11080)), "CUDA 11.8 only; update it"),
        (SimpleNamespace(cuDriverGetVersion=lambda: 1 / 0), "cannot load the NVIDIA driver"),
        (SimpleNamespace(cuDriverGetVersion=lambda: (driver.CUresult.CUDA_SUCCESS, 13000)), None),
    ):
        monkeypatch.setattr(cuda, "_driver", lambda d=driver_: d)
        found = cuda.card(torch.device("cuda", 1))
        assert found[:4] == (1, "u", "NVIDIA H100", (9, 0))
        assert found.problem is None if part is None else part in str(found.problem)

    def missing() -> Any:
        raise TransportError("cuda-bindings is missing")

    monkeypatch.setattr(cuda, "_driver", missing)
    assert cuda.card(torch.device("cuda", 1)).problem == "cuda-bindings is missing"
    with pytest.raises(TransportError, match=r"NVIDIA H100 \(cuda:1\): cuda-bindings is missing"):
        CudaDevice(torch.device("cuda", 1))


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Card(0, "a", "NVIDIA H100", (9, 0), None)
    visible = {0: "a", 1: "b", 2: "c", 3: "d"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=visible[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: b != 3)
    success = driver.CUresult.CUDA_SUCCESS
    fake = SimpleNamespace(
        CUdevice_P2PAttribute=driver.CUdevice_P2PAttribute,
        cuDeviceGetP2PAttribute=lambda attribute, a, b: (success, int(b == 1)),
    )
    monkeypatch.setattr(cuda, "_driver", lambda: fake)
    found = {uuid: cuda.link(own, own._replace(uuid=uuid)) for uuid in "abcde"}
    assert found == {"a": "one GPU", "b": "NVLink", "c": "PCIe", "d": None, "e": "unknown"}


@pytest.mark.parametrize(
    ("word", "value", "exact", "expected"),
    [
        (5, 5, False, True),
        (6, 5, False, True),
        (4, 5, False, False),
        (-(2**31), 2**31 - 1, False, True),  # one more, wrapped around
        (2**31 - 1, -(2**31), False, False),
        (6, 5, True, False),
        (-1, 2**32 - 1, True, True),
    ],
)
def test_what_a_wait_waits_for(word: int, value: int, exact: bool, expected: bool) -> None:
    assert reached(word, value, exact=exact) is expected


def test_int32() -> None:
    assert [as_int32(v) for v in (0, 2**31, 2**32 - 1, -1, 2**40 + 3)] == [0, -(2**31), -1, -1, 3]


# ---- torch's symmetric memory, as far as the host goes -----------------------------------------------------------------
class Native:
    """Stands for torch's `_SymmetricMemory`: `full` has no room, buffers start 16 bytes off, as behind a signal pad."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.overlapping: list[str | None] = []

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any, group: Any) -> torch.Tensor:
        if self.full:
            raise RuntimeError("CUDA driver error: out of memory\nmore")
        whole = torch.full((size[0] + 512,), 7, dtype=dtype)
        return whole[-whole.data_ptr() % 256 + 16 :][: size[0]]

    def rendezvous(self, block: torch.Tensor, group: str) -> Any:
        self.overlapping.append(os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"))
        return SimpleNamespace(get_buffer=lambda rank, size, dtype: block)


def memory(rank: int, exchange: ExchangeFn, native: Native, *, overlapping: bool) -> TorchSymmetricMemory:
    made = TorchSymmetricMemory.__new__(TorchSymmetricMemory)
    made._native, made._exchange, made._device = native, exchange, torch.device("cpu")  # type: ignore[assignment]
    made._overlapping, made._group_name, made._rank, made._world_size, made._blocks = overlapping, "0", rank, 2, []
    return made


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)


@pytest.mark.parametrize("overlapping", [False, True])
def test_blocks_are_zeroed_aligned_and_of_the_largest_size(no_gpu: None, overlapping: bool) -> None:
    native = Native()
    # One rank: the variable of the environment belongs to the process. The peer asks for 150 bytes.
    blocks = memory(0, lambda item: [item, 150 if isinstance(item, int) else None], native, overlapping=overlapping).allocate(
        100, "a test"
    )
    assert [block.numel() for block in blocks] == [150, 150] and not any(int(block.sum()) for block in blocks)
    assert all(block.data_ptr() % 256 == 0 for block in blocks)
    assert native.overlapping == (["1"] if overlapping else [None])
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ


def test_too_little_memory_is_said_on_all_ranks(no_gpu: None) -> None:
    def body(rank: int, exchange: ExchangeFn) -> str:
        with pytest.raises(TransportError) as caught:
            memory(rank, exchange, Native(full=rank == 1), overlapping=False).allocate(100, "inboxes (inbox_bytes = 100)")
        return str(caught.value)

    for text in run_ranks(2, body):
        for part in (
            "rank 1: cannot get 356 bytes",
            "inbox_bytes = 100",
            "1000 of 2000 bytes",
            "out of memory",
            "prefetch_bytes",
        ):
            assert part in text
