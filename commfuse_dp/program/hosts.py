"""Ranks that share hosts, and who stands for whom in the hierarchical order: few bytes between hosts, many inside them.

    host 0   ranks 0 1 2 3        *rail* 1 = ranks 1, 5: those that have the same place in their hosts
    host 1   ranks 4 5 6 7

all-gather      rank 1 fetches the shard of rank 5 for its whole host, rank 2 that of rank 6, ...: a shard crosses to another
                host once, where the flat orders send it there once per rank.
reduce-scatter  what host 0 owes to rank 5 is added up by rank 1, inside host 0, and crosses once.

So with L ranks per host the bytes between hosts are 1/L of the flat orders'. Who comes when: program/orders.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from commfuse_dp.errors import TransportError


@dataclass(frozen=True)
class Hosts:
    """`members[host]`: its ranks, ascending; hosts in the order of their first ranks. All have equally many."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, identities: Sequence[Hashable]) -> Hosts:
        """From one identity per rank. Raises ValueError if hosts have different numbers of ranks."""
        found: dict[Hashable, list[int]] = {}
        for rank, identity in enumerate(identities):
            found.setdefault(identity, []).append(rank)
        members = tuple(tuple(ranks) for ranks in found.values())
        if len({len(ranks) for ranks in members}) > 1:
            raise ValueError(f"hosts have different numbers of ranks: {', '.join(map(str, members))}")
        return cls(members)

    @property
    def world_size(self) -> int:
        return len(self.members) * self.per_host

    @property
    def per_host(self) -> int:
        return len(self.members[0])

    def place(self, rank: int) -> tuple[int, int]:
        """(host, place in it)"""
        found = self._places.get(rank)
        if found is None:
            raise ValueError(f"rank {rank} is on none of the hosts {self.members}")
        return found

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Asked for every slice of every layer in every step."""
        return {rank: (host, place) for host, ranks in enumerate(self.members) for place, rank in enumerate(ranks)}

    def siblings(self, rank: int) -> tuple[int, ...]:
        """All ranks of its host, itself among them, ascending."""
        return self.members[self.place(rank)[0]]

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks at its place in all hosts, itself among them, in the order of hosts."""
        place = self.place(rank)[1]
        return tuple(ranks[place] for ranks in self.members)

    def rail_from_next(self, rank: int) -> tuple[int, ...]:
        """`rail`, beginning on the host that follows, so itself last: the order in which gradients are made for its ranks."""
        rail, host = self.rail(rank), self.place(rank)[0]
        return (*rail[host + 1 :], *rail[: host + 1])

    def gateway(self, rank: int, owner: int) -> int:
        """The rank on the host of `rank` through which shards and gradients of `owner` go; `owner` itself if it is there."""
        return self.siblings(rank)[self.place(owner)[1]]

    def distance(self, rank: int, owner: int) -> int:
        """Hosts to go from that of `rank`, cyclically, to that of `owner`."""
        return (self.place(owner)[0] - self.place(rank)[0]) % len(self.members)


def check_hosts(identities: Sequence[str]) -> Hosts:
    """Raises TransportError, with the reason and the fix, if the ranks' hosts allow no hierarchical order."""
    try:
        hosts = Hosts.of(identities)
    except ValueError as error:
        raise TransportError(f"order 'hierarchical' needs equally many ranks on every host, but {error}") from None
    if len(hosts.members) == 1:
        raise TransportError("order 'hierarchical' is for several hosts, but all ranks are on one")
    if hosts.per_host == 1:
        raise TransportError("order 'hierarchical' is for several ranks per host, but every rank has a host of its own")
    return hosts
