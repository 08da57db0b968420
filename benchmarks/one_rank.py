"""One rank of transport `symmetric` and its engine in one process, with peers that do nothing: all that the host does is there.

Nothing on a stream-ordered path waits on the host, so the peers may be missing: all calls are made, and no one answers.

    NullDevice        a driver whose calls do nothing but count
    UnwaitingDevice   CUDA's own, on a GPU: waits for words of peers wait for a word that is there already
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.device.base import Batch, Device, Event, Span, Stream, Word, WordLike
from commfuse_dp.device.cuda import CudaBatch, CudaDevice, CudaStream
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.transport.one_sided.parts import Channel, Receiver
from commfuse_dp.transport.symmetric.memory import SymmetricMemory
from commfuse_dp.transport.symmetric.transport import SymmetricTransport

_KINDS = {  # driver call -> kind
    "cuMemcpyAsync": "copy",
    "cuMemcpyBatchAsync": "copies",
    "cuStreamBatchMemOp": "words",
    "cuStreamWaitValue32": "words",
    "cuStreamWriteValue32": "words",
}


class NullStream(Stream):
    def __init__(self, name: str) -> None:
        self.name = name


class NullEvent(Event):
    __slots__ = ()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class NullBatch(Batch):
    """Counts the calls that CUDA's batches make."""

    __slots__ = ("_counts", "_held")

    def __init__(self, device: NullDevice, stream: Stream) -> None:
        super().__init__(device, stream)
        self._counts = device.counts
        self._held = False

    def copy(self, dst: torch.Tensor, dst_start: int, src: torch.Tensor, src_start: int, nbytes: int) -> None:
        self.submit()
        self._counts["copy"] += 1

    def copy_all(self, spans: Sequence[Span]) -> None:
        self.submit()
        self._counts["copies"] += 1

    def wait(self, pad: torch.Tensor, place: int, value: int, *, exact: bool = False) -> None:
        self._held = True

    def write(self, pad: torch.Tensor, place: int, value: int) -> None:
        self._held = True

    def submit(self) -> None:
        if self._held:
            self._held = False
            self._counts["words"] += 1


class NullDevice(Device):
    """Streams, events, copies and words that are nothing. `counts`: calls by kind; on a GPU each is one call of the driver."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.counts: Counter[str] = Counter()
        self._streams = {"main": NullStream("main")}
        self._current: Stream = self._streams["main"]

    def current_stream(self) -> Stream:
        return self._current

    def side_stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, NullStream(name))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        self.counts["record"] += 1
        return NullEvent()

    def elapsed(self, start: Event, end: Event) -> int:
        return 0

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.counts["wait_event"] += 1

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        self.counts["copy"] += 1

    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        self.counts["words"] += 1

    def write_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int) -> None:
        self.counts["words"] += 1

    def write_values(self, stream: Stream, words: Sequence[WordLike]) -> None:
        self.counts["words"] += 1

    def spoil(self, memory: Sequence[torch.Tensor]) -> None:
        pass

    def batch(self, stream: Stream) -> NullBatch:
        return NullBatch(self, stream)

    def peek(self, pad: torch.Tensor) -> list[int]:
        return [0] * pad.numel()

    def poke(self, words: Sequence[Word]) -> None:
        return


def conditions(device: str, kernels: str) -> str:
    """What a record must say."""
    if device == "cpu":
        return (
            "the host's side only: driver calls, GEMMs and sums are replaced by nothing; what a driver call or a launch takes "
            "is not in it. One process as rank 0, peers that do nothing, CPU tensors."
        )
    products = "GEMMs and sums are replaced by nothing" if kernels == "none" else f"GEMMs by {kernels}"
    return f"driver calls are real; {products}. One process as rank 0; peers do nothing, their memory is the host's."


class UnwaitingBatch(CudaBatch):
    __slots__ = ()

    def wait_all(self, words: Sequence[WordLike], *, exact: bool = False) -> None:
        super().wait_all([(pad, place, 0) for pad, place, _ in words], exact=exact)


class UnwaitingDevice(CudaDevice):
    """CUDA's driver, counted. Words of peers stay 0, and all waits of streams are for that."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.counts: Counter[str] = Counter()

    def record(self, stream: Stream, *, timing: bool = False) -> Any:
        self.counts["record"] += 1
        return super().record(stream, timing=timing)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.counts["wait_event"] += 1
        super().wait_event(stream, event)

    def wait_value(self, stream: Stream, pad: torch.Tensor, index: int, value: int, *, exact: bool = False) -> None:
        super().wait_value(stream, pad, index, 0, exact=exact)

    def _do(self, result: tuple[Any, ...], call: str) -> None:
        self.counts[_KINDS.get(call, call)] += 1
        super()._do(result, call)

    def batch(self, stream: Stream) -> CudaBatch:
        assert isinstance(stream, CudaStream)
        return UnwaitingBatch(self, stream)


class NobodyThere(Channel):
    """A control channel on which nothing comes."""

    def start(self, receiver: Receiver) -> None:
        return

    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        return

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        return


class OwnMemory(SymmetricMemory):
    """The peers' blocks are memory of this process: on a GPU of the host, so that copies are a copy engine's, as between GPUs.
    Inside one GPU each is a kernel of the driver's, which takes the host four times as long to launch in a batch."""

    def __init__(self, device: torch.device, world_size: int, random: float = 0.0) -> None:
        """random: standard deviation of what peers have published, in bfloat16."""
        self._device, self._world_size, self._random = device, world_size, random

    def allocate(self, nbytes: int, purpose: str) -> list[torch.Tensor]:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        pinned = self._device.type == "cuda"
        peers = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(self._world_size - 1)]
        for block in peers if self._random and "published" in purpose else ():
            block.view(torch.bfloat16).normal_(std=self._random)  # its words, too, which nobody reads
        return [own, *peers]

    def close(self) -> None:
        return


@dataclass
class Policy:
    """Mixed precision as in training: parameters in float32, computed and sent in bfloat16, summed in float32."""

    compute_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    keep_after_forward: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    divide_factor: float | None = None


@dataclass
class Slot:
    """A float32 parameter of which this rank has its rows."""

    name: str
    shape: tuple[int, ...]
    rank: int
    world_size: int
    device: torch.device
    requires_grad: bool = True
    keeps_delivered: bool = True
    replaced: bool = False
    grad: torch.Tensor | None = None
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        low, high = chunk_bounds(self.shape[0], self.world_size)[self.rank]
        self.rows = torch.zeros(high - low, *self.shape[1:], device=self.device)

    def local(self) -> torch.Tensor:
        return self.rows

    def published(self) -> bool:
        return False

    def wants(self) -> tuple[bool, torch.dtype]:
        return self.requires_grad, torch.float32

    def deliver(self, grad: torch.Tensor) -> None:
        self.grad = grad


def lone_transport(
    device: Device, world_size: int, inbox_bytes: int, *, random: float = 0.0, **settings: Any
) -> SymmetricTransport:
    """Of rank 0, whose peers do nothing. random: see OwnMemory."""
    return SymmetricTransport(
        0,
        world_size,
        lambda item: [item] * world_size,
        device=device,
        memory=OwnMemory(device.torch_device, world_size, random),
        channel=NobodyThere(),
        inbox_bytes=inbox_bytes,
        deadline_s=600.0,
        **settings,
    )


class OneRank:
    """Rank 0 of `world_size` with a stack of `layers` square linears of `width` features, without bias."""

    def __init__(
        self,
        device: Device,
        world_size: int,
        *,
        layers: int,
        width: int,
        window: int,
        config: dict[str, Any] | None = None,
        random: float = 0.0,
        **settings: Any,
    ) -> None:
        """window: layers that fit into the window of parameters; config: further settings; random: standard deviation of the
        parameters, own and peers'; settings: of the transport."""
        where = device.torch_device
        nbytes = width * width * 2
        self.config = CommFuseConfig(
            prefetch_bytes=window * nbytes, inbox_bytes=4 * nbytes, slices_per_rank=1, **(config or {})
        )
        self.transport = lone_transport(device, world_size, self.config.inbox_bytes, random=random, **settings)
        policy = Policy()
        self.slots = [Slot(f"layer{n}", (width, width), 0, world_size, where) for n in range(layers)]
        for slot in self.slots if random else ():
            slot.rows.normal_(std=random)
        units = [Unit(n, slot.name, [slot], policy, 1) for n, slot in enumerate(self.slots)]
        self.engine = Engine(self.transport, units, self.config, device=where, replicas=None)
        self.operands = [UnitOperand(self.engine, unit) for unit in units]
        self.counts: Counter[str] = device.counts  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, one after the other, as inside a root's forward (after `engine.begin_step`)."""
        self.engine.enter_forward()
        for operand in self.operands:
            x = fused_linear(x, operand, 0)
        self.engine.end_forward(True)
        self.engine.leave_forward()
        return x

    def synchronize(self) -> None:
        """Let the device come to the end of the step, so that the host is never held up by a full queue."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)

    def close(self) -> None:
        self.engine.close()
