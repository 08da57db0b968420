"""Which shards a rank fetches for its host, and where they are found inside it.

A rank fetches for its whole host what its *rail* (the ranks at its place on other hosts) publishes, and publishes it again
inside the host under a key of its own: key * hosts + distance in hosts (0: its own shard).
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_dp.program.hosts import Hosts


class Relays:
    """Of one rank.

    Attributes:
        rail: (hosts to go, rank) of those whose shards it passes on, the next host's first.
        numbers: of the ranks of its host, as the transport inside it counts them.
    """

    def __init__(self, hosts: Hosts, rank: int, counted: Sequence[int]) -> None:
        """counted: the ranks that the transport inside the host counts, in its order."""
        self._hosts, self._counted = hosts, counted
        self._count = len(hosts.members)
        self.rail = sorted((hosts.distance(rank, peer), peer) for peer in hosts.rail(rank) if peer != rank)
        siblings = hosts.siblings(rank)
        self.numbers = {peer: number for number, peer in enumerate(counted) if peer in siblings}
        self._sources = [
            (self.numbers[hosts.gateway(rank, owner)], hosts.distance(rank, owner)) for owner in range(hosts.world_size)
        ]

    def key(self, key: int, distance: int = 0) -> int:
        """Key inside a host of what ranks so many hosts further on publish under `key`."""
        return key * self._count + distance

    def at(self, owner: int, key: int) -> tuple[int, int]:
        """(number of a rank, key) under which the shard of any owner is found inside this host."""
        source, distance = self._sources[owner]
        return source, key * self._count + distance

    def sizes(self, sizes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Bytes that every rank publishes inside its host, by `key`: its own shard, and those that it relays."""
        members = self._hosts.members
        inside = []
        for row in sizes:
            for distance in range(self._count):
                published = [0] * self._hosts.world_size
                for host, ranks in enumerate(members):
                    for rank, owner in zip(ranks, members[(host + distance) % self._count], strict=True):
                        published[rank] = row[owner]
                inside.append([published[rank] for rank in self._counted])
        return inside
