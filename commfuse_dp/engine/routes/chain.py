"""A gradient's way to its owner through all other ranks, for units that have one owner (or few) at a time.

Where every rank owns a part of each layer (FSDP2, ZeRO-3), partials go straight to their owners and every link carries the
same. Under ZeRO-1/2 a rank owns whole layers: sent straight, the partials of N - 1 ranks would meet at one owner's link, layer
after layer, and take N - 1 times as long as they need. So they travel as a chain

    owner+1  ->  owner+2  ->  ...  ->  owner        each adds its own partial to what it got

in which every link carries each layer once: the bytes of a reduce-scatter, (N-1)/N of the gradient per rank.

The sum is made in the order of the chain and in the dtype that travels, as a ring all-reduce does it: the same bits in every
run and on every transport, but rounded at every hop if that dtype is a narrow one.

[Note: No credit is waited for]
A rank that gets no room at the next one keeps its sum in a buffer of its own and goes on computing; a sum that has arrived is
added to the own partial and leaves the inbox as soon as that partial exists. So nobody waits for a rank behind him, and what
is kept is at most the gradient itself, as in stock ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from commfuse_dp.device.base import Word
from commfuse_dp.engine.broken import ROOM
from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.engine.plan import Geometry, UnitSlice
from commfuse_dp.engine.programs import Reduction
from commfuse_dp.engine.reserver import Reserver
from commfuse_dp.engine.routes.route import Route
from commfuse_dp.transport.base import CHANNEL_GRAD, Sending, Tag, Transport


class _Link:
    """This rank's part in the chain of one slice."""

    __slots__ = ("arrived", "buffer", "item", "reserved", "source", "tag", "to")

    def __init__(self, item: UnitSlice, tag: Tag, source: int | None, to: int | None) -> None:
        """source: whose sum comes here, None: the chain begins here; to: who gets it next, None: the owner is here."""
        self.item = item
        self.tag = tag
        self.source = source
        self.to = to
        self.arrived = source is None
        self.buffer: torch.Tensor | None = None  # the own partial, then the sum; None: not yet computed, or gone
        self.reserved = False  # the buffer is a slot in the next rank's inbox


class Chain(Route):
    """All slices of one unit's gradient on this rank."""

    def __init__(
        self,
        transport: Transport,
        slots: Reserver,
        pool: BufferPool,
        geometry: Geometry,
        reduction: Reduction,
        *,
        unit: int,
        seq: int,
        out_dtype: torch.dtype,
        divisor: float | None,
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._pool = pool
        self._dtype = geometry.dtype
        self._out_dtype = out_dtype
        self._divisor = divisor
        self._links: dict[tuple[int, int], _Link] = {}
        for part, item in enumerate(item for own in geometry.slices for item in own):
            tag = Tag(CHANNEL_GRAD, unit, seq, part)
            source, to = reduction.links[item.owner, item.index]
            self._links[item.owner, item.index] = _Link(item, tag, source, to)
            if source is not None:
                transport.expect((source,), tag, item.nbytes)
        self._open = dict(self._links)  # this rank's part is not yet done

    # ---- producing ---------------------------------------------------------------------------------------------------
    def reserve(self, item: UnitSlice, own: torch.Tensor) -> torch.Tensor:
        link = self._links[item.owner, item.index]
        if link.to is None:
            return own
        slot = self._slots.try_reserve(link.to, item.nbytes) if link.source is None else None
        link.reserved = slot is not None
        return slot if slot is not None else self._pool.take(item.nbytes)

    def produced(self, item: UnitSlice, buffer: torch.Tensor, when: Word | None = None) -> None:
        link = self._links[item.owner, item.index]
        if link.reserved:
            assert link.to is not None
            self._transport.send((Sending(link.to, link.tag, buffer),))
            del self._open[item.owner, item.index]
            return
        link.buffer = buffer
        self.advance()

    # ---- passing on --------------------------------------------------------------------------------------------------
    def advance(self) -> bool:
        worked = False
        for key, link in list(self._open.items()):
            if link.buffer is None:
                continue
            if not link.arrived and link.source is not None and self._transport.receive((link.source,), link.tag, wait=False):
                self._add(link, link.source)
                worked = True
            if link.arrived and (link.to is None or self._pass_on(link, link.to)):
                del self._open[key]
                worked = True
        return worked

    def _add(self, link: _Link, source: int) -> None:
        assert link.buffer is not None
        sums = self._transport.receive((source,), link.tag)[0]
        link.buffer.view(self._dtype).add_(sums.view(self._dtype))
        self._transport.release((source,), link.tag, more=True)
        link.arrived = True

    def _pass_on(self, link: _Link, to: int) -> bool:
        assert link.buffer is not None
        slot = self._slots.try_reserve(to, link.item.nbytes)
        if slot is None:
            return False
        slot.copy_(link.buffer)
        self._transport.send((Sending(to, link.tag, slot),))
        self._pool.give(link.buffer)
        link.buffer = None
        return True

    @property
    def done(self) -> bool:
        return not self._open

    def missing(self) -> tuple[UnitSlice, int, str] | None:
        for link in self._open.values():
            if link.buffer is None:
                continue  # not computed here
            if not link.arrived and link.source is not None:
                return link.item, link.source, "its sum of the partial gradients"
            if link.to is not None:
                return link.item, link.to, ROOM
        return None

    def uncomputed(self) -> Iterator[UnitSlice]:
        return (link.item for link in self._open.values() if link.buffer is None)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return chain_total(own, self._dtype, self._out_dtype, self._divisor, self._pool)


def chain_total(
    own: torch.Tensor, dtype: torch.dtype, out_dtype: torch.dtype, divisor: float | None, pool: BufferPool
) -> torch.Tensor:
    """The sum at a chain's end, in the dtype that is delivered, averaged. own: its bytes."""
    sums = own.view(dtype)
    if dtype != out_dtype:
        sums = sums.to(out_dtype)
        if own.numel():
            pool.give(own)
    return sums if divisor is None else sums.div_(divisor)
