"""Room in the peers' inboxes for gradients, behind what plain collectives have still to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from commfuse_dp.transport.base import Transport


class Port(Protocol):
    """Plain collectives over the engine's transport, as recovery from a broken step sees them."""

    calls: int
    in_doubt: bool
    giving_up: bool

    @property
    def under_way(self) -> Sequence[object]:
        """Collectives that are not complete."""
        ...

    def any_of(self, own: bool) -> bool: ...

    def sends_to(self, dst: int) -> bool: ...

    def progress(self) -> None: ...

    def recover(self, *, complete: bool) -> None:
        """All ranks do this. complete: finish what is under way; else drop it. Calls count from 0 again."""
        ...


class Reserver:
    """See [Note: Program order in a ring] in collective_port.py."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.ports: list[Port] = []

    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None:
        """A place for one message; None: no credit, or a collective that was begun before has something to send to `dst`."""
        for port in self.ports:
            if port.under_way and port.sends_to(dst):
                port.progress()
                if port.sends_to(dst):
                    return None
        found = self._transport.reserve((dst,), (nbytes,))
        return found[0] if found else None
