"""A gradient's way to its owner through all other ranks (chain.py), where waits stand in streams.

What the host does there by looking whether something has come or fits is fixed here in advance: all of a layer's hops are
enqueued on the stream "reduce" once its partials are computed, in an order that cannot lock.

[Note: Order of a chain]
A slice of owner o starts at rank o+1 (hop 0) and ends at o (hop N-1): rank r has it at hop (r - o - 1) mod N. Every rank goes
through the hops slice by slice, and for each slice index i through the hops from 0 on; a hop whose owner has no slice i is left
out. Hop h of rank r takes what hop h-1 of rank r-1 has sent, so both ends of a link agree on the order of its messages.

    compute  | partials of layer k, each in a buffer of its own | dgrad, layer k-1 ...                     (| stands for a wait)
    reduce       |compute   (i,0): copy    (i,1): |arrival, |place free, add    (i,2): ...    (i,N-1): |arrival, add
    scatter                           |credit, copy to r+1                |credit, copy to r+1

Call p = (layer, i, h), compared from left to right: the same sequence on all ranks. `reduce` at p stands for compute, which has
the layer's partials without waiting for anything but sums of earlier layers; for the message that rank r-1 sent at the step
before p; and for a place in the staging, from which a message of an earlier step must have left. A message of p leaves when its
receiver has released an earlier one, say of q < p: it does so at the step after q, which is p at the latest. So `reduce` at p
depends on steps before p alone, `scatter` at p on `reduce` up to p, and nothing waits in a circle, whatever fits into an inbox:
one slice is enough. (Hops first and slices second would need room for all slices of a hop.)

A message is tagged by its step (i, h), not by its owner: on a lockstep transport, where a rank takes in what its predecessor
sends in the step in which it sends itself, both have the same tag; and a rank that has nothing to send takes the step all the
same. There, `scatter` at p stands for both neighbours to have come to p, and p is before what `reduce` at p's successor needs.

Compute does not write into the staging here, as it does where gradients go straight to their owners: it could come to stand
for messages of its own layer. Partials are in pooled buffers, two layers' worth; then compute waits for the layer before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Word
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.ordering import Ordering
from commfuse_dp.engine.plan import Geometry, UnitSlice
from commfuse_dp.engine.routes.chain import chain_total
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_GRAD, Sending, Tag, Transport

_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Step(NamedTuple):
    """This rank's part in one step: a hop of a slice, or nothing but a lockstep transport's step."""

    item: UnitSlice | None
    place: int  # index of the slice among its owner's
    hop: int


class StreamChain(Route):
    """All slices of one unit's gradient on this rank; stands where a `Chain` stands on a host."""

    def __init__(
        self,
        transport: Transport,
        pool: BufferPool,
        geometry: Geometry,
        ordering: Ordering,
        *,
        unit: int,
        seq: int,
        out_dtype: torch.dtype,
        divisor: float | None,
        where: Callable[[UnitSlice], Where],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._ordering = ordering
        self._out_dtype = out_dtype
        self._divisor = divisor
        self._where = where
        self._probe = transport.probe
        self._dtype = geometry.dtype
        rank, n = transport.rank, transport.world_size
        self._previous, self._next, self._last = (rank - 1) % n, (rank + 1) % n, n - 1
        self._key = unit, seq, n
        every = range(max(map(len, geometry.slices)))
        self._steps = []
        for index, hop in itertools.product(every, range(n)):
            own = geometry.slices[(rank - hop - 1) % n]
            if index < len(own):
                self._steps.append(_Step(own[index], index, hop))
            elif transport.lockstep and hop < self._last:
                self._steps.append(_Step(None, index, hop))
        self._items = [step.item for step in self._steps if step.item is not None]
        for step in self._steps:
            if step.hop and step.item is not None:
                transport.expect((self._previous,), self._tag(step.place, step.hop - 1), step.item.nbytes)
        self._most = 2 * len(self._items)
        self._partials: dict[tuple[int, int], torch.Tensor] = {}  # computed, by owner and index

    def _tag(self, index: int, hop: int) -> Tag:
        unit, seq, n = self._key
        return Tag(CHANNEL_GRAD, unit, seq, index * n + hop)

    # ---- producing ---------------------------------------------------------------------------------------------------
    def reserve(self, item: UnitSlice, own: torch.Tensor) -> torch.Tensor:
        return own if item.owner == self._transport.rank else self._pool.take(item.nbytes, most=self._most)

    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Word | None = None) -> None:
        # What computes it is in the current stream, behind which `reduce` will be.
        self._partials[item.owner, item.index] = buffer

    # ---- passing on --------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        """Enqueue all hops, once all partials are produced."""
        if not self._steps or len(self._partials) < len(self._items):
            return False
        if self._probe.timing is not None:
            self._probe.timing.layer = ""
        with self._ordering.reducing():
            for step in self._steps:
                if step.item is not None:
                    self._enqueue(step, step.item, self._partials[step.item.owner, step.place])
                else:
                    self._transport.send((Sending(self._next, self._tag(step.place, step.hop), _NOTHING),))
        self._steps, self._items = [], []
        self._partials.clear()
        return True

    def _enqueue(self, step: _Step, item: UnitSlice, buffer: torch.Tensor) -> None:
        """One hop, on the current stream."""
        transport, own = self._transport, buffer.view(self._dtype)
        came = self._tag(step.place, step.hop - 1)
        begun, where = self._probe.mark(), self._where(item)
        if step.hop:
            sums = transport.receive((self._previous,), came, where)[0].view(self._dtype)
            self._probe.tail(f"{where.layer} (tail)", begun)
        if step.hop == self._last:
            own.add_(sums)
            transport.release((self._previous,), came, more=True)
            return
        slot = transport.reserve((self._next,), (item.nbytes,))[0]
        if step.hop:
            torch.add(own, sums, out=slot.view(self._dtype))
            transport.release((self._previous,), came, more=True)
        else:
            slot.copy_(buffer)
        transport.send((Sending(self._next, self._tag(step.place, step.hop), slot),))
        self._pool.give(buffer)

    @property
    def done(self) -> bool:
        return not self._steps

    def missing(self) -> tuple[UnitSlice, int, str] | None:
        return None  # the host waits for nothing

    def uncomputed(self) -> Iterator[UnitSlice]:
        return (item for item in self._items if (item.owner, item.index) not in self._partials)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return chain_total(own, self._dtype, self._out_dtype, self._divisor, self._pool)
