"""Where an op communicates: a process group or a transport, as a number for ops that take tensors and numbers only.

Inside a graph the number is a constant, guarded by the group or transport.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commfuse_dp.collectives import sessions
from commfuse_dp.ops.compat import constant_in_graphs
from commfuse_dp.ops.numbers import Numbers
from commfuse_dp.transport.base import Transport

_DEFAULT = 0  # the default group, whichever that is when the op runs
_PLACES: Numbers[Any] = Numbers("this compiled graph uses a process group or transport that is gone: compile the model again")


@constant_in_graphs
def place_of(group: dist.ProcessGroup | None, transport: Transport | None) -> int:
    """The number of a place."""
    where = transport if transport is not None else group
    return _DEFAULT if where is None else _PLACES.of(where)


def find(place: int) -> tuple[dist.ProcessGroup | None, Transport | None]:
    if place == _DEFAULT:
        return None, None
    where = _PLACES.find(place)
    return (None, where) if isinstance(where, Transport) else (where, None)


@constant_in_graphs
def rank_at(place: int) -> int:
    return sessions.rank_and_size(*find(place))[0]


@constant_in_graphs
def world_size_at(place: int) -> int:
    return sessions.rank_and_size(*find(place))[1]
