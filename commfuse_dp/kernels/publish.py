"""Publishing: cast and pack many shards into the segment that peers read, in one launch.

| tensor | shape | dtype |
| --- | --- | --- |
| sources | any number of contiguous tensors, empty ones too | bfloat16, float16, float32 or float64, each its own |
| destinations | as many contiguous tensors of the same numbers of elements | likewise |

A step of a model with L layers publishes several L shards, from norms of a few thousand elements to matrices of many millions;
one torch copy for each would be several L launches, most of them too short to fill the GPU. The kernel numbers equal tiles
(16 KB of source) through all shards and gives every block an equal share of them. One launch serves up to 1000 shards of one
destination dtype; its argument is passed by value, see nvrtc.py [Note: Arguments by value].

Each element is rounded once, as torch's `copy_` rounds (double to half by way of float, there too), so that kernel, reference
and CPU are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from commfuse_dp.device.compat import raw_stream
from commfuse_dp.kernels import nvrtc
from commfuse_dp.kernels.packs import THREADS, TYPE_NAMES, Implementation, common_head

CAPACITIES = (16, 120, 1000)  # items of an argument: 0.5, 3.8 and 31.3 KiB; the smallest that fits is compiled
TILE_PACKS = THREADS * 4  # Copy::TILE of publish.cu, in packs of 16 bytes of the source
BLOCKS_PER_MULTIPROCESSOR = 4  # run at once: __launch_bounds__ of publish.cu
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

ITEM = np.dtype(
    [
        ("source", np.uint64),
        ("destination", np.uint64),
        ("numel", np.int64),
        ("end", np.int32),
        ("type", np.uint8),
        ("head", np.uint8),
        ("vector", np.uint8),
        ("reserved", np.uint8),
    ]
)


@dataclass(frozen=True)
class Shard:
    """Addresses and sizes of one copy."""

    source: int
    destination: int
    numel: int
    source_dtype: torch.dtype
    destination_dtype: torch.dtype


@dataclass(frozen=True)
class Launch:
    """One launch: what to compile, its argument (struct Publish of publish.cu), and the tiles to be shared out."""

    spec: nvrtc.Spec
    argument: np.ndarray  # uint8
    tiles: int


def plan_publish(shards: Sequence[Shard]) -> list[Launch]:
    """The launches for these shards: one for each destination dtype and 1000 shards that are not empty."""
    by_dtype: dict[torch.dtype, list[Shard]] = {}
    for shard in shards:
        if shard.numel:
            by_dtype.setdefault(shard.destination_dtype, []).append(shard)
    most = CAPACITIES[-1]
    return [
        _pack(dtype, group[start : start + most]) for dtype, group in by_dtype.items() for start in range(0, len(group), most)
    ]


def _pack(dtype: torch.dtype, shards: Sequence[Shard]) -> Launch:
    capacity = next(size for size in CAPACITIES if size >= len(shards))
    argument = np.zeros(8 + capacity * ITEM.itemsize, dtype=np.uint8)
    items = argument[8:].view(ITEM)
    tiles = 0
    for item, shard in zip(items, shards, strict=False):
        size = shard.source_dtype.itemsize
        pack = 16 // size
        head = common_head([(shard.source, size), (shard.destination, dtype.itemsize)], pack)
        vector = head is not None and shard.numel >= pack
        skipped = head if head is not None and vector else 0
        tiles += max(1, -(-(shard.numel - skipped) // (TILE_PACKS * pack)))
        item["source"], item["destination"], item["numel"] = shard.source, shard.destination, shard.numel
        item["end"], item["type"] = tiles, _CODES[shard.source_dtype]
        item["head"], item["vector"] = skipped, vector
    argument[:8].view(np.int32)[:] = len(shards), tiles
    spec = nvrtc.Spec("publish", (("COMMFUSE_OUT", TYPE_NAMES[dtype]), ("COMMFUSE_CAPACITY", str(capacity))))
    return Launch(spec, argument, tiles)


class PublishPlan:
    """Copies between fixed tensors, packed once and run every step.

    Keeps the tensors, so their memory stays. The plan holds addresses: if a tensor's storage is replaced (`set_`, `.data = `)
    or its dtype changes, make a new plan; `fits` knows addresses and sizes.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        *,
        implementation: Implementation = "auto",
    ) -> None:
        """`implementation` as in `publish`. Raises ValueError on tensors that do not match."""
        _check(sources, destinations)
        self._sources = list(sources)
        self._destinations = list(destinations)
        self._places = _places(sources, destinations)
        self._device = destinations[0].device if destinations else torch.device("cpu")
        self._implementation = implementation
        self._launches: list[Launch] | None = None
        if implementation == "kernel" and destinations and self._device.type != "cuda":
            raise ValueError(
                f"publish: the kernel runs on CUDA tensors, these are on {self._device}: use implementation='auto'"
            )
        if implementation != "reference" and self._device.type == "cuda":
            self._launches = plan_publish(_shards(sources, destinations))

    def __len__(self) -> int:
        """Number of copies."""
        return len(self._sources)

    def fits(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> bool:
        """The tensors still lie where the plan says."""
        return self._places == _places(sources, destinations)

    def run(self) -> None:
        """Copy, on the current stream."""
        if self._launches is not None:
            try:
                self._launch(self._launches)
                return
            except (nvrtc.ToolchainError, nvrtc.CompileError) as error:
                if self._implementation == "kernel":
                    raise
                nvrtc.warn_of_fallback("publish", error)
                self._launches = None
        _copy(self._sources, self._destinations)

    def _launch(self, launches: Sequence[Launch]) -> None:
        kernels = [nvrtc.kernel(launch.spec, self._device) for launch in launches]  # all or none: no half-published segment
        stream = raw_stream(self._device.index)
        most = BLOCKS_PER_MULTIPROCESSOR * nvrtc.multiprocessors(self._device)
        for launch, kernel in zip(launches, kernels, strict=True):
            kernel.launch(min(launch.tiles, most), THREADS, launch.argument.ctypes.data, stream)


def publish(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], *, implementation: Implementation = "auto"
) -> None:
    """Copy and cast every source into its destination; asynchronous on a GPU, on the current stream.

    Destinations must not overlap each other or any source. Who publishes the same tensors every step keeps a PublishPlan.
    `implementation`: "auto": the kernel for CUDA tensors where it can be compiled (if not, one warning), else torch's copies.
    Raises ValueError on tensors that do not match; ToolchainError or CompileError if "kernel" cannot be had.
    """
    PublishPlan(sources, destinations, implementation=implementation).run()


def publish_reference(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """The same by torch's copies, bitwise equal, on any device."""
    _check(sources, destinations)
    _copy(sources, destinations)


@torch.library.custom_op("commfuse::publish", mutates_args=("destinations",))
def publish_op(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """torch.ops.commfuse.publish: `publish` as a registered op."""
    publish(sources, destinations)


@publish_op.register_fake
def _(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    return None


@torch.no_grad()
def _copy(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source.view(destination.shape))


def _places(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensors in (sources, destinations) for tensor in tensors]


def _shards(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> list[Shard]:
    return [
        Shard(source.data_ptr(), destination.data_ptr(), source.numel(), source.dtype, destination.dtype)
        for source, destination in zip(sources, destinations, strict=True)
    ]


def _check(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    if len(sources) != len(destinations):
        raise ValueError(f"publish: {len(sources)} sources and {len(destinations)} destinations: there must be one for each")
    device = destinations[0].device if destinations else None
    for index, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.numel() != destination.numel():
            raise ValueError(
                f"publish: source {index} has {source.numel()} elements, its destination {destination.numel()}: they must be "
                "equal"
            )
        for name, tensor in (("source", source), ("destination", destination)):
            if tensor.device != device:
                raise ValueError(
                    f"publish: {name} {index} is on {tensor.device}, destination 0 on {device}: one device is needed"
                )
            if tensor.dtype not in TYPE_NAMES:
                raise ValueError(f"publish: {name} {index} is {tensor.dtype}; allowed: {', '.join(map(str, TYPE_NAMES))}")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"publish: {name} {index} is not contiguous (strides {tensor.stride()}): pass contiguous tensors"
                )
