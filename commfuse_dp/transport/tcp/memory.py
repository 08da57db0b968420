"""The memory of the TCP transport: own segments, staging rings, inboxes."""

from __future__ import annotations

import mmap
import os

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.one_sided.memory import FetchedMemory
from commfuse_dp.transport.tcp.links import Source


class Region:
    """Zeroed memory that `sendfile` can send from: a memfd where there is one, plain anonymous memory elsewhere (fd -1).

    It has no name in any file system, so nothing is left behind however the process ends.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = -1
        size = max(nbytes, mmap.PAGESIZE)
        try:
            if hasattr(os, "memfd_create"):
                self.fd = os.memfd_create("commfuse-tcp", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            self.close()
            raise TransportError(
                f"no memory for {nbytes} published or staged bytes ({error}): use more ranks, or lower inbox_bytes"
            ) from None
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]  # keeps the mapping alive

    def close(self) -> None:
        """Give the descriptor back; the memory lives as long as a tensor aliases it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StagedMemory(FetchedMemory):
    """Own segments in one region, a staging region per peer."""

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int) -> None:
        self._regions: dict[int, Region] = {}  # by address of the storage
        super().__init__(rank, world_size, exchange, inbox_bytes)

    def _take(self, nbytes: int) -> torch.Tensor:
        region = Region(nbytes)
        self._regions[region.tensor.untyped_storage().data_ptr()] = region
        return region.tensor

    def source(self, payload: torch.Tensor) -> Source:
        """Where the wire finds the bytes of a part of a segment or of a staging ring."""
        return Source(
            payload.numpy().data, self._regions[payload.untyped_storage().data_ptr()].fd, int(payload.storage_offset())
        )

    def close(self) -> None:
        # The I/O thread has ended; had it not in time, what it sends from and writes to lives as long as it refers to that.
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        super().close()
