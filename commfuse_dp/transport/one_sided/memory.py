"""Memory of a rank whose segments peers fetch over a wire: own segments, a staging ring and an inbox ring per peer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.one_sided.parts import Memory, check_same_sizes
from commfuse_dp.transport.one_sided.ring import align


class FetchedMemory(Memory):
    """Ordinary CPU tensors. Subclasses may take what is sent from elsewhere (`_take`)."""

    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int) -> None:
        self._rank = rank
        self._exchange = exchange
        peers = [peer for peer in range(world_size) if peer != rank]
        self.outgoing = {peer: self._take(align(inbox_bytes)) for peer in peers}
        self.incoming = {peer: torch.empty(align(inbox_bytes), dtype=torch.uint8) for peer in peers}  # pages come when written

    def _take(self, nbytes: int) -> torch.Tensor:
        """Memory that is sent from, zeroed."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        failure, mine = None, [row[self._rank] for row in sizes]
        try:
            published = self._take(sum(map(align, mine)))
        except RuntimeError as error:  # of torch, or a TransportError
            failure = f"no memory for {sum(mine)} published bytes ({error})"
        answers = self._exchange(([tuple(row) for row in sizes], failure))
        check_same_sizes(sizes, [theirs for theirs, _ in answers])
        raise_failures([text for _, text in answers])
        starts = accumulate(map(align, mine), initial=0)
        own = [published.narrow(0, start, nbytes) for start, nbytes in zip(starts, mine, strict=False)]
        self.segments = {self._rank: own}
