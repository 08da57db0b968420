"""Communicators of our own that are kept for the next who needs some of the same ranks.

[Note: Communicators are kept]
They are never destroyed while the default group lives. Making them is slow, gloo frees its connections only with the process
anyway, and a name under which addresses were put into the store must not come again. So whoever ends gives its own back, if
nothing was left open on them, and whoever begins takes what all ranks have had back. Ranks collect garbage at different times:
what some of them still use is left alone, and new ones are made.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.exchange import exchange_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Kept(Generic[T]):
    """`item`: communicators, the same ranks on all of them; `serial` is the same on all ranks."""

    item: T
    world: weakref.ref[dist.ProcessGroup]  # the default group under which they were made
    key: Hashable
    serial: int

    def keep(self) -> None:
        """For the next `take`."""
        world = self.world()
        if world is not None and dist.is_initialized() and world is dist.group.WORLD:
            _kept(self.key).append(self)


# By default group, with which they go.
_idle: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, list[Kept[Any]]]] = weakref.WeakKeyDictionary()
made: Counter[Hashable] = Counter()


def _kept(key: Hashable) -> list[Kept[Any]]:
    assert dist.group.WORLD is not None
    return _idle.setdefault(dist.group.WORLD, {}).setdefault(key, [])


def take(group: dist.ProcessGroup | None, key: Hashable, make: Callable[[ExchangeFn], T]) -> Kept[T]:
    """Collective over `group` (None: the default group): communicators that all ranks have kept under `key`, else new ones.

    make(exchange): collective; raises on all ranks, or on none. Raises PeerLostError if a rank has died."""
    kept = _kept(key)
    exchange = exchange_of(group)
    common = set.intersection(*exchange({found.serial for found in kept}))
    if common:
        chosen = next(found for found in kept if found.serial == min(common))
        kept.remove(chosen)
        return chosen
    item = make(exchange)
    made[key] += 1
    assert dist.group.WORLD is not None
    return Kept(item, weakref.ref(dist.group.WORLD), key, made[key])
