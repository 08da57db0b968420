"""Rings that grow with what calls send: for transports that are opened before anybody knows how much that is.

The shapes of activations come with the first call. Streams do not share the CPUs' way out, where a message is cut into whatever
there is room for just now: each part would cost the host as much as a whole slice. So a call whose slices do not go whole
makes room first. All ranks know that of each other, for they have agreed on the call's sizes; nothing is under way between two
calls.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.budget import Footprint, Share
from commfuse_dp.transport.closing import done_within
from commfuse_dp.transport.one_sided.ring import align
from commfuse_dp.transport.streams.core import StreamCore

MOST = 64 << 20  # bytes of a message; larger ones are cut, into parts that are worth a message each

_log = logging.getLogger("commfuse_dp")


class GrowingRings(Transport):
    """Attributes:
    growing: rings may become larger than inbox_bytes allows. Such a transport carries calls, and nothing beside them."""

    growing = False
    _core: Any

    def make_room(self, nbytes: int) -> None:
        """Collective, between two calls: have messages of so many bytes go whole. Waits for the device, and for all ranks.

        Where memory is short the rings stay as they are, on all ranks, with a warning."""
        limit = 2 * align(min(nbytes, MOST))  # half of a ring may be lost to a gap at its end: PlaceRing
        if not self.growing or limit <= self.message_limit:
            return
        core: StreamCore = self._core
        device = core.device
        events = [core.record(stream) for stream in (core.enter(), device.side_stream("scatter"))]
        if not done_within(events, self.deadline_s, lambda: core.watch.failure is not None):
            core.check()
            raise TransportError(
                f"transport {self.name}: streams did not come to their end within deadline_s={self.deadline_s:g}"
            )
        try:
            rings = self._renew(limit)
        except TransportError as error:  # raised on all ranks alike
            self.growing = False
            _log.warning("messages stay cut into parts of up to %s bytes: %s", f"{self.message_limit // 4:,}", error)
            return
        self.message_limit = limit
        budget = self.footprint.share.budget if self.footprint is not None else 0
        share = Share(limit, rings, budget)
        self.footprint = Footprint(share) if self.footprint is None else self.footprint._replace(share=share)
        _log.log(
            logging.WARNING if share.nbytes > budget else logging.INFO,
            "transport %s takes %s bytes on this rank for messages of %s bytes from now on: %d x %s; inbox_bytes=%s",
            *(self.name, f"{share.nbytes:,}", f"{nbytes:,}", rings, f"{limit:,}", f"{budget:,}"),
        )

    @abstractmethod
    def _renew(self, limit: int) -> int:
        """Collective: rings of so many bytes for calls, in place of those that there are, which nobody uses. Returns how many.
        Raises TransportError on all ranks, and has changed nothing, if one has no memory for it."""
