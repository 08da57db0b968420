"""How a rank's `inbox_bytes`, one budget for all of its peers, is divided into rings.

| transport | rings per peer | what for |
| --- | --- | --- |
| shm | 1 | inbox; the sender writes there |
| tcp, mpi, p2p | 2 | inbox, and what is computed for the peer until it has left |
| p2p on GPUs (NCCL) | 2 | likewise |
| symmetric | 4 | an inbox for each of three channels, and what is computed for the peer |
| hierarchical on CPUs | 1 for ranks of the host, 2 for others | shm and tcp |
| hierarchical on GPUs | 4 x hosts, for ranks of the host | symmetric; what crosses hosts is the engine's |

A ring must hold a slice of every layer (engine/room.py says how much that is): where the budget is too small for that, rings
are larger, and the budget is passed. Whoever opens a transport is told before memory is taken.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, align

LEAST_RING = 1 << 12  # bytes
_log = logging.getLogger("commfuse_dp")

_PER_PEER = {"shm": 1, "tcp": 2, "mpi": 2, "p2p": 2}


class Share(NamedTuple):
    """What one rank takes for messages."""

    ring: int  # bytes of each ring; the largest message
    rings: int
    budget: int

    @property
    def nbytes(self) -> int:
        return self.ring * self.rings

    def __str__(self) -> str:
        text = f"{self.nbytes:,} bytes per rank for all peers: {self.rings} x {self.ring:,}"
        if self.nbytes > self.budget:
            text += f", more than inbox_bytes={self.budget:,}: that is too little for a slice of the largest layer per peer"
        return text


def rings_of(kind: str, world_size: int, hosts: Hosts | None = None) -> int:
    """Rings of one rank. kind: a transport's name; hosts: of the hierarchical order, in which it is 'cpu' or 'cuda'."""
    if hosts is not None:
        inside, outside = hosts.per_host - 1, world_size - hosts.per_host
        # The block of a symmetric transport has a place for the rank itself, too.
        return inside + 2 * outside if kind == "cpu" else (4 * inside + 3) * len(hosts.members)
    if kind == "symmetric":
        return 4 * (world_size - 1) + 3
    return _PER_PEER[kind] * (world_size - 1)


def divide(budget: int, rings: int, least: int) -> Share:
    """least: bytes that a ring must have for the sake of some layer."""
    ring = max(budget // max(1, rings) // ALIGNMENT * ALIGNMENT, align(least), min(LEAST_RING, align(budget)))
    return Share(ring, rings, budget)


class Room:
    """The budget of one rank, for whichever transport is opened."""

    def __init__(self, budget: int, world_size: int, least: int) -> None:
        self.share = Share(0, 0, budget)
        self._world_size = world_size
        self._least = least

    def ring(self, kind: str, hosts: Hosts | None = None) -> int:
        """Bytes of each ring of a transport that is about to be opened; says so."""
        self.share = divide(self.share.budget, rings_of(kind, self._world_size, hosts), self._least)
        level = logging.WARNING if self.share.nbytes > self.share.budget else logging.INFO
        name = kind if hosts is None else "hierarchical"
        _log.log(level, "transport %s takes memory for messages: %s", name, self.share)
        return self.share.ring
