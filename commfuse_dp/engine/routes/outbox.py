"""Room in the inboxes of other ranks, and what leaves for them on routes and has found none yet."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import Sending, Tag, Transport

if TYPE_CHECKING:
    from commfuse_dp.engine.collective_port import CollectivePort
    from commfuse_dp.engine.routes.stream import Crossing


class Reserver:
    """Room for gradients, behind what plain collectives have still to send: see [Note: Program order in a ring] in
    collective_port.py."""

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


class _Outgoing(NamedTuple):
    where: Where
    tag: Tag
    buffer: torch.Tensor


class Outbox:
    """Messages of all units, by destination, in program order: one that finds no room waits here, and all behind it.

    Attributes:
        kept: messages that have not left.
        sender: a transport, or what stands for one (stream.py).
    """

    def __init__(self, sender: Transport | Crossing, slots: Reserver | Crossing, pool: BufferPool) -> None:
        self.sender = sender
        self._slots = slots
        self._pool = pool
        self._waiting: dict[int, deque[_Outgoing]] = defaultdict(deque)
        self.kept = 0

    def slot(self, dst: int, nbytes: int) -> torch.Tensor | None:
        """Memory of the transport for a message that is sent next; None: it has to be kept."""
        return None if self.kept and self._waiting[dst] else self._slots.try_reserve(dst, nbytes)

    def keep(self, dst: int, where: Where, tag: Tag, buffer: torch.Tensor) -> None:
        """buffer: of the pool, to which it goes back."""
        self._waiting[dst].append(_Outgoing(where, tag, buffer))
        self.kept += 1

    def flush(self) -> bool:
        """Send what there is room for. True if anything was sent."""
        before = self.kept
        for dst, waiting in self._waiting.items():
            while waiting:
                _, tag, buffer = waiting[0]
                slot = self._slots.try_reserve(dst, buffer.numel())
                if slot is None:
                    break
                slot.copy_(buffer)
                self.sender.send((Sending(dst, tag, slot),))
                self._pool.give(buffer)
                waiting.popleft()
                self.kept -= 1
        return self.kept < before

    def oldest(self) -> tuple[Where, int] | None:
        """(what, destination) of something that is kept."""
        return next(((waiting[0].where, dst) for dst, waiting in self._waiting.items() if waiting), None)
