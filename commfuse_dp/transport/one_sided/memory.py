"""Memory of a rank whose segments peers fetch over a wire: own segments, a staging ring and an inbox ring per peer."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import ClassVar

import torch

from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.one_sided.parts import Memory, own_segments
from commfuse_dp.transport.one_sided.ring import align


class FetchedMemory(Memory):
    """Anonymous memory, whose pages come when they are written."""

    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int) -> None:
        self._rank = rank
        self._exchange = exchange
        peers = [peer for peer in range(world_size) if peer != rank]
        self.outgoing, self.incoming = ({peer: _take(align(inbox_bytes)) for peer in peers} for _ in range(2))

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self.segments = {self._rank: own_segments(sizes, self._rank, self._exchange, _take)}


def _take(nbytes: int) -> torch.Tensor:
    """Zeroed; it is unmapped with the last tensor on it."""
    try:
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    except OSError as error:
        raise TransportError(
            f"no memory for {nbytes} published, staged or received bytes ({error}): use more ranks, or lower inbox_bytes"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
