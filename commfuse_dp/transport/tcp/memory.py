"""The memory of the TCP transport: own segments, staging rings, inboxes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.one_sided.parts import Closed, Memory, check_same_sizes
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.tcp.wire import Source


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


class StagedMemory(Memory):
    """Own segments in one region, a staging region and an inbox ring per peer."""

    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int) -> None:
        self._rank = rank
        self._exchange = exchange
        self._segments: list[torch.Tensor] = []
        self._regions: dict[int, Region] = {}  # by address of the storage
        capacity = align(inbox_bytes)
        peers = [peer for peer in range(world_size) if peer != rank]
        self._outgoing = {p: self._region(capacity) for p in peers}
        self._incoming = {p: torch.empty(capacity, dtype=torch.uint8) for p in peers}  # pages come as they are written

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        failure = None
        mine = [row[self._rank] for row in sizes]
        try:
            published = self._region(sum(align(nbytes) for nbytes in mine))
        except TransportError as error:
            failure = str(error)
        answers = self._exchange(([tuple(row) for row in sizes], failure))
        check_same_sizes(sizes, [theirs for theirs, _ in answers])
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if failures:
            raise TransportError("; ".join(failures))
        start = 0
        for nbytes in mine:
            self._segments.append(published.narrow(0, start, nbytes))
            start += align(nbytes)

    def segment(self, owner: int, key: int) -> torch.Tensor:
        assert owner == self._rank, "peers' segments are fetched, not mapped"
        return self._segments[key]

    def outgoing(self, dst: int) -> torch.Tensor:
        return self._outgoing[dst]

    def incoming(self, src: int) -> torch.Tensor:
        return self._incoming[src]

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
        self._outgoing = self._incoming = self._segments = Closed()  # type: ignore[assignment]

    def _region(self, nbytes: int) -> torch.Tensor:
        region = Region(nbytes)
        self._regions[region.tensor.untyped_storage().data_ptr()] = region
        return region.tensor
