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
are larger, and the budget is passed; where all that a model sends in a step needs less, so much is taken. Whoever opens a
transport is told before memory is taken.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from commfuse_dp.program.hosts import Hosts
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, align

LEAST_RING = 1 << 12  # bytes
LARGE_PART = 4  # what is more than this part (1/4) of the free memory is warned of
_log = logging.getLogger("commfuse_dp")

_PER_PEER = {"shm": 1, "tcp": 2, "mpi": 2, "p2p": 2}
_IN_PLACE = ("shm", "cpu")  # parameters are read where their owner published them; 'cpu': the hierarchical order's


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


def divide(budget: int, rings: int, least: int, most: int | None = None) -> Share:
    """least: bytes that a ring must have for the sake of some layer. most: bytes of all rings that are of use."""
    taken = budget if most is None else min(budget, most)
    ring = max(taken // max(1, rings) // ALIGNMENT * ALIGNMENT, align(least), min(LEAST_RING, align(budget)))
    return Share(ring, rings, budget)


class Footprint(NamedTuple):
    """Bytes that one rank takes for communication: what it may hold at most, as far as that is known before the first step."""

    share: Share  # of messages
    window: int = 0  # most that is fetched ahead
    published: int = 0  # a copy of the own shards in the compute dtype; in the hierarchical order also what is passed on

    @property
    def nbytes(self) -> int:
        return self.share.nbytes + self.window + self.published

    def __str__(self) -> str:
        text = f"inboxes {self.share}" if self.share.rings else "no inboxes"
        if self.published:
            text += f"; prefetch window {self.window:,} bytes at most; published copy {self.published:,} bytes"
        return text


class Room:
    """What one rank may take, for whichever transport is opened.

    budget: for messages. least: bytes that a ring must have. most: for messages, what is of use; None: unknown.
    window: most that is fetched ahead. published: by all ranks together in a step. free: bytes of memory that are there for
    this rank, None if unknown."""

    def __init__(
        self,
        budget: int,
        world_size: int,
        least: int,
        *,
        most: int | None = None,
        window: int = 0,
        published: int = 0,
        free: int | None = None,
    ) -> None:
        self.footprint = Footprint(Share(0, 0, budget))
        self._world_size = world_size
        self._least = least
        self._most = most
        self._window = min(window, published)
        self._published = published
        self._free = free

    def ring(self, kind: str, hosts: Hosts | None = None) -> int:
        """Bytes of each ring of a transport that is about to be opened; says all that is to be taken.

        That is a warning, which is seen without any logging set up, where it is more than was allowed, or a large part of the
        memory that there is."""
        share = divide(self.footprint.share.budget, rings_of(kind, self._world_size, hosts), self._least, self._most)
        copies = self._published * (len(hosts.members) if hosts is not None else 1) // self._world_size
        remote = kind not in _IN_PLACE and self._world_size > 1
        self.footprint = taken = Footprint(share, self._window if remote else 0, copies)
        large = self._free is not None and taken.nbytes * LARGE_PART > self._free
        _log.log(
            logging.WARNING if share.nbytes > share.budget or large else logging.INFO,
            "transport %s takes memory on this rank: %s%s",
            kind if hosts is None else "hierarchical",
            taken,
            f"; more than 1/{LARGE_PART} of the {self._free:,} bytes that are free for it" if large else "",
        )
        return share.ring
