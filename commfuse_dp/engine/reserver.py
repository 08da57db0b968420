"""Room in the peers' inboxes for gradients, behind what plain collectives have still to send."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from commfuse_dp.transport.base import Transport

if TYPE_CHECKING:
    from commfuse_dp.engine.collective_port import CollectivePort


class Reserver:
    """See [Note: Program order in a ring] in collective_port.py."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.ports: list[CollectivePort] = []

    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None:
        """A place for one message; None: no credit, or a collective that was begun before has something to send to `dst`."""
        for port in self.ports:
            if port.under_way and port.sends_to(dst):
                port.progress()
                if port.sends_to(dst):
                    return None
        found = self._transport.reserve((dst,), (nbytes,))
        return found[0] if found else None
