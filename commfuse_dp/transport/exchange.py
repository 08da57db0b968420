"""How the ranks of a group exchange small objects while a transport is set up."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commfuse_dp.transport.base import ExchangeFn


def exchange_of(group: dist.ProcessGroup | None) -> ExchangeFn:
    """Collective exchange of one object per rank over `group`; without torch.distributed there is one rank."""
    if not dist.is_initialized():
        return lambda item: [item]

    def exchange(item: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, item, group=group)
        return everyone

    return exchange
