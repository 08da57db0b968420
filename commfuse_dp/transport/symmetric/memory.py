"""Memory of all ranks' GPUs that every rank can copy from and to: an interface, and torch's symmetric memory behind it.

[Note: What torch's symmetric memory is]
`torch.distributed._symmetric_memory` allocates physical memory by the driver's virtual memory management, passes its handle
to the peers and maps theirs here. A mapping keeps the memory alive: a rank may free its own block, or end, while peers still
hold theirs. Freeing a block calls `cudaDeviceSynchronize`, so no stream may wait for ever when the last reference goes.
Blocks are allocated without torch's memory pool (`empty_strided_p2p`): they come back to the driver when they are freed. All
ranks must ask for the same number of bytes, so the largest wish counts.

[Note: Several ranks on one GPU]
Torch refuses two ranks with the same host name and device number unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1 (its
own test: test_allow_overlapping_devices). The number is 0 on all ranks where CUDA_VISIBLE_DEVICES leaves one GPU to each. The
variable is set around the rendezvous only; it also turns multicast off, which is not used here.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist

from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import raise_failures

_ALIGNMENT = 256  # bytes; where torch lays its signal pad in front of the block, the block itself may be aligned to less
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricMemory(ABC):
    """Blocks of memory, one on every rank, each mapped on all ranks."""

    @abstractmethod
    def allocate(self, nbytes: int, purpose: str) -> list[torch.Tensor]:
        """Collective. A zeroed block on every rank; returns all of them in rank order: uint8, 1-D, 64-byte aligned.

        Ranks may ask for different sizes; every block is at least as large as its owner asked for. `purpose`: "the inboxes
        (...)", for the error. Raises the same TransportError on all ranks if one of them has no room.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of all blocks. Nothing may be under way in them. Safe to call twice."""


class TorchSymmetricMemory(SymmetricMemory):
    """CUDA memory that torch lets processes share. Run by processes on one GPU.

    Args:
        group: whose store the handles travel over. None: the default group.
        overlapping: some ranks have the same device number on one host.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, exchange: ExchangeFn, device: torch.device, *, overlapping: bool
    ) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        self._native = _SymmetricMemory
        self._exchange = exchange
        self._device = device
        self._overlapping = overlapping
        process_group = group if group is not None else dist.group.WORLD
        assert process_group is not None
        self._group_name = process_group.group_name
        self._rank, self._world_size = process_group.rank(), process_group.size()
        self._blocks: list[torch.Tensor] = []
        raise_failures(exchange, exchange(self._backend_problem()))
        with warnings.catch_warnings():  # needed before torch 2.12 or so, deprecated since
            warnings.simplefilter("ignore", FutureWarning)
            _symmetric_memory.enable_symm_mem_for_group(self._group_name)

    def _backend_problem(self) -> str | None:
        backend = self._native.get_backend(self._device)
        if backend != "CUDA":
            return (
                f"torch's symmetric memory uses the backend {backend!r}, 'CUDA' is needed: set "
                "TORCH_SYMMMEM=CUDA, or leave it and _symmetric_memory.set_backend alone"
            )
        return None

    def allocate(self, nbytes: int, purpose: str) -> list[torch.Tensor]:
        wishes = self._exchange(nbytes)
        size = max(*wishes, 1) + _ALIGNMENT
        block, error = None, None
        try:
            block = self._native.empty_strided_p2p((size,), (1,), torch.uint8, self._device, None)
        except RuntimeError as failure:  # torch.OutOfMemoryError, or the driver's CUDA_ERROR_OUT_OF_MEMORY
            free, total = torch.cuda.mem_get_info(self._device)
            error = (
                f"cannot get {size} bytes of symmetric memory for {purpose}: {free} of {total} bytes are "
                f"free on {self._device} ({str(failure).splitlines()[0][:200]}). Lower inbox_bytes or prefetch_bytes, use more "
                "ranks, or free memory on the GPU (torch.cuda.empty_cache)"
            )
        raise_failures(self._exchange, self._exchange(error))
        assert block is not None
        block.zero_()
        torch.cuda.current_stream(self._device).synchronize()
        handle = None
        try:
            with self._rendezvous_allowed():
                handle = self._native.rendezvous(block, self._group_name)
        except RuntimeError as failure:  # a peer that fails alone leaves the others waiting for the store's timeout
            error = f"cannot map its peers' memory for {purpose}: {str(failure).splitlines()[0][:300]}"
        raise_failures(self._exchange, self._exchange(error))
        assert handle is not None
        self._blocks.append(block)
        views = []
        for rank in range(self._world_size):
            whole = block if rank == self._rank else handle.get_buffer(rank, (size,), torch.uint8)
            views.append(whole.narrow(0, -whole.data_ptr() % _ALIGNMENT, size - _ALIGNMENT))
        return views  # zeroed: every rank has done so before it came to the rendezvous

    @contextlib.contextmanager
    def _rendezvous_allowed(self) -> Iterator[None]:
        before = os.environ.get(_OVERLAPPING)
        if self._overlapping:
            os.environ[_OVERLAPPING] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_OVERLAPPING, None)
            else:
                os.environ[_OVERLAPPING] = before

    def close(self) -> None:
        self._blocks.clear()
