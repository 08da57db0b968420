"""Which way a unit's partial gradients take to their owners."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.reserver import Reserver
from commfuse_dp.engine.room import in_chain
from commfuse_dp.engine.routes.chain import Chain
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.engine.routes.stream_chain import StreamChain
from commfuse_dp.engine.routes.stream_two_level import StreamTwoLevel, Turn
from commfuse_dp.engine.routes.two_level import Outbox, TwoLevel
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.hierarchical.device import StreamHierarchicalTransport


def _wider(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    return other if other is not None and other.itemsize > dtype.itemsize else dtype


class Routes:
    """Chains for replicated units (ZeRO-1/2), two levels in the hierarchical order; each on a host and in streams.

    scratch: a block of a wide dtype, for sums.
    """

    def __init__(
        self,
        transport: Transport,
        slots: Reserver,
        pool: BufferPool,
        ordering: Ordering,
        scratch: Callable[[torch.dtype], torch.Tensor],
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._pool = pool
        self._ordering = ordering
        self._scratch = scratch
        self.outbox = Outbox(transport, slots, pool)  # what routes keep for other ranks
        self._turn = Turn()

    def choose(self, scatter: Scatter, *, divisor: float | None) -> Route | None:
        """None: straight to the owners. divisor: the sum is divided by it, if that is not None."""
        unit, transport, out_dtype = scatter.unit, self._transport, scatter.bound.out_dtype
        if in_chain(unit, transport.world_size) and transport.device is not None:
            return StreamChain(
                transport,
                self._pool,
                scatter.bound.geometry,
                self._ordering,
                unit=unit.index,
                seq=scatter.seq,
                out_dtype=out_dtype,
                divisor=divisor,
                where=scatter.where,
            )
        if in_chain(unit, transport.world_size):
            return Chain(
                transport,
                self._slots,
                self._pool,
                scatter.bound.geometry,
                scatter.bound.reduction,
                unit=unit.index,
                seq=scatter.seq,
                out_dtype=out_dtype,
                divisor=divisor,
            )
        if transport.hosts is None:
            return None
        sums = _wider(scatter.bound.geometry.dtype, unit.policy.reduce_dtype)
        if isinstance(transport, StreamHierarchicalTransport):
            return StreamTwoLevel(
                transport,
                self._pool,
                self._ordering,
                self._turn,
                scatter.bound.geometry,
                scatter.bound.reduction,
                sums,
                unit=unit.index,
                seq=scatter.seq,
                where=Where(unit.name, scatter.step, "sums of hosts", scatter.bound.geometry.segment_bytes[transport.rank]),
                out_dtype=out_dtype,
                divisor=divisor,
                scratch=self._scratch,
            )
        return TwoLevel(
            transport,
            self._pool,
            self.outbox,
            scatter.bound.geometry,
            scatter.bound.reduction,
            sums,
            unit=unit.index,
            seq=scatter.seq,
            out_dtype=out_dtype,
            divisor=divisor,
            scratch=self._scratch,
        )
