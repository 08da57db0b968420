"""Memory of a rank whose segments peers fetch over a wire: own segments, a staging ring and an inbox ring per peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.one_sided.parts import Memory, own_segments
from commfuse_dp.transport.one_sided.ring import align


class FetchedMemory(Memory):
    """Ordinary CPU tensors. Subclasses may take what is sent from elsewhere (`_take`)."""

    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int) -> None:
        self._rank = rank
        self._exchange = exchange
        peers = [peer for peer in range(world_size) if peer != rank]
        self.outgoing = {peer: self._take(align(inbox_bytes)) for peer in peers}
        # Their pages come when they are written.
        self.incoming = {peer: torch.empty(align(inbox_bytes), dtype=torch.uint8, device="cpu") for peer in peers}

    def _take(self, nbytes: int) -> torch.Tensor:
        """Memory that is sent from, zeroed."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        self.segments = {self._rank: own_segments(sizes, self._rank, self._exchange, self._take)}
