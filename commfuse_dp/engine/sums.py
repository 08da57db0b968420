"""Sums of partials that came straight to their owner: which slice is next, whether all of it is here, and the sum itself.

On a host what a bound backward sums in every step is found, not made: slots of the inbox come again, and so do their views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_dp.collectives.summation import BLOCK_ELEMENTS, sum_in_rank_order, wide_dtype
from commfuse_dp.engine.bound import MOST_VIEWS, BoundBackward
from commfuse_dp.engine.plan import UnitSlice
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.probe import COMPUTE, now_ns
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.one_sided.ring import ALIGNMENT

# A notice of so many bytes, or fewer, waits for company: on layers of microseconds the time is in messages. It leaves with the
# next larger one to the same rank, before anything waits, and at the end of the backward.
SMALL_BYTES = 1 << 14


class Sums:
    """Of one rank. divides: sums are divided here (with replicas: after the sum over these).

    Attributes:
        released: bytes of small messages whose places the peers do not know to be free yet; set to 0 when they have been told.
    """

    def __init__(self, transport: Transport, device: torch.device, *, divides: bool) -> None:
        self._transport = transport
        self._probe = transport.probe
        self._rank = transport.rank
        self._peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._device = device
        self._inbox_bytes = transport.message_limit
        self._divides = divides
        self._on_streams = transport.device is not None
        self._kept_views = transport.in_place  # slots are places of shared memory: their views come again
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self.released = 0

    def next_item(self, scatter: Scatter) -> UnitSlice | None:
        """The own slice that is summed next."""
        own = scatter.bound.geometry.slices[self._rank]
        return own[scatter.summed] if scatter.summed < len(own) else None

    def arrived(self, scatter: Scatter, item: UnitSlice, peer: int) -> bool:
        """The partial of a peer is here."""
        return (peer, item.index) in scatter.unloaded or bool(self._transport.receive((peer,), scatter.tag(item), wait=False))

    def ready(self, scatter: Scatter) -> Sequence[torch.Tensor] | None:
        """None: the next slice cannot be summed yet. Else what `add` is given for it: on a host, peers' partials in the order
        of the sum, without those that were unloaded. (An empty shard has no next slice: its unit has only to be completed.)"""
        if scatter.route is not None:
            return () if scatter.route.done else None
        bound, summed = scatter.bound, scatter.summed
        own = bound.geometry.slices[self._rank]
        if summed == len(own):
            return ()
        if scatter.own_done <= summed:
            return None
        if self._on_streams:  # the stream waits; in lockstep all steps of a slice are taken before its own partial is made
            return ()
        item = own[summed]
        peers = self._held(scatter, item) if scatter.unloaded else bound.sources[summed][0]
        if not peers:
            return ()
        return self._transport.receive(peers, scatter.tags.get(item.index) or scatter.tag(item), wait=False) or None

    @staticmethod
    def _held(scatter: Scatter, item: UnitSlice) -> Sequence[int]:
        """Peers whose partials of the next slice are not unloaded, in the order of the sum."""
        return [rank for rank in scatter.bound.sources[scatter.summed][0] if (rank, item.index) not in scatter.unloaded]

    def add(self, scatter: Scatter, item: UnitSlice, came: Sequence[torch.Tensor]) -> None:
        """Sum one own slice, the next one, into its place in the gradient. came: see `ready`."""
        probe, bound = self._probe, scatter.bound
        begun = probe.mark() if probe.timing is not None else None
        start = now_ns() if probe.sink is not None else 0
        dtype = bound.geometry.dtype
        assert scatter.own is not None
        flat = scatter.flat
        if flat is None:
            flat = scatter.flat = scatter.own if scatter.own.dtype == dtype else scatter.own.view(dtype)
        low, high = item.offset // dtype.itemsize, (item.offset + item.nbytes) // dtype.itemsize
        own = flat if item.nbytes == scatter.own.nbytes else flat[low:high]
        if bound.in_place:
            out = own
        else:
            if scatter.partials is None:
                scatter.partials = torch.empty(flat.numel(), dtype=bound.out_dtype, device=own.device)
            out = scatter.partials[low:high]
        tag = scatter.tags.get(item.index) or scatter.tag(item)
        peers, place = bound.sources[scatter.summed]
        held = self._held(scatter, item) if scatter.unloaded else peers
        if self._on_streams:
            came = self._transport.receive(held, tag, scatter.where(item))
        partials = self._typed(bound, came)
        if scatter.unloaded:
            by_rank = dict(zip(held, partials, strict=True))
            away = scatter.unloaded
            partials = [by_rank[rank] if rank in by_rank else away.pop((rank, item.index)).view(dtype) for rank in peers]
        partials.insert(place, own)
        if begun is not None:
            probe.tail(f"{scatter.unit.name} (tail)", begun)
        begun = probe.mark() if probe.sink is not None else None
        divisor = bound.divisor if self._divides else None
        scratch = self._scratch.get(bound.wide)
        if scratch is None:
            scratch = self.scratch_for(bound.wide)
        sum_in_rank_order(out, partials, own_rank=place, scale_divisor=divisor, scratch=scratch, wide=bound.wide)
        self._transport.release(held, tag, more=True)
        self.released += max(item.nbytes, ALIGNMENT) if item.nbytes <= SMALL_BYTES else self._inbox_bytes
        if probe.sink is not None:
            probe.span_since(COMPUTE, f"{scatter.unit.name} sum", start, begun, kind="sum")

    def _typed(self, bound: BoundBackward, came: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Partials that have come, as what they are."""
        dtype = bound.geometry.dtype
        if not self._kept_views:
            return [buffer.view(dtype) for buffer in came]
        views, found = bound.inbox_views, []
        for buffer in came:
            known = views.get(id(buffer))
            if known is None or known[0] is not buffer:
                if len(views) >= MOST_VIEWS:
                    views.clear()
                known = views[id(buffer)] = buffer, buffer.view(dtype)
            found.append(known[1])
        return found

    def unload(self, scatter: Scatter) -> None:
        """Copy what has come out of the inbox: see [Note: Credit and deadlock] in gradients.py."""
        for item in scatter.bound.geometry.slices[self._rank][scatter.summed :]:
            tag = scatter.tag(item)
            for peer in self._peers:
                if (peer, item.index) not in scatter.unloaded:
                    for partial in self._transport.receive((peer,), tag, wait=False):
                        scatter.unloaded[peer, item.index] = partial.clone()
                        self._transport.release((peer,), tag)

    def scratch_for(self, dtype: torch.dtype) -> torch.Tensor:
        """A block of the wide type of `dtype`."""
        wide = wide_dtype(dtype)
        scratch = self._scratch.get(wide)
        if scratch is None:
            scratch = self._scratch[wide] = torch.empty(BLOCK_ELEMENTS, dtype=wide, device=self._device)
        return scratch

    def clear(self) -> None:
        self._scratch.clear()
