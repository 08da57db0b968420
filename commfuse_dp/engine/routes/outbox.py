"""What leaves for other ranks on routes, and what has found no room yet."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from commfuse_dp.engine.memory.buffers import BufferPool
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import Sending, Tag


class Reserves(Protocol):
    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor | None: ...


class Sends(Protocol):
    def send(self, sendings: Sequence[Sending]) -> None: ...


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

    def __init__(self, sender: Sends, slots: Reserves, pool: BufferPool) -> None:
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
