"""How large an inbox has to be where streams wait.

A host that finds an inbox full copies partials out of it ([Note: Credit and deadlock] in gradients.py); streams cannot. There
all that one layer owes to one rank must fit into that rank's inbox, twice, as places in it are contiguous and up to half of it
may be lost to a gap at its end ([Note: Where credit is waited for] in transport/symmetric/transport.py). Chains need no such
room (routes/steps.py), nor does a host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

from commfuse_dp.engine.plan import Geometry, Unit
from commfuse_dp.errors import ConfigError
from commfuse_dp.transport.base import Transport


def in_chain(unit: Unit, world_size: int) -> bool:
    """Gradients of the unit travel through all ranks, see routes/steps.py."""
    return unit.replicated and world_size > 2


def box_of(transport: Transport, owner: int) -> int:
    """Whose inbox gradients for `owner` go to; this rank itself: none."""
    return owner if transport.hosts is None else transport.hosts.gateway(transport.rank, owner)


def least_ring(units: Sequence[Unit], world_size: int, *, streams: bool) -> int:
    """Bytes that there must be for the messages of one peer, whatever the budget is. streams: on a device.

    A host needs room for one slice of each layer, cut as finely as it can be; streams for all that a layer owes to one rank.
    There gradients are taken to travel in the compute dtype. What is accumulated in a wider reduce dtype before it is reduced
    travels in that one, and needs more: that is not set aside for all who never do it, but checked when it happens
    (`check_room`).
    """
    if world_size == 1:
        return 0
    if not streams:
        return max((unit.least_slice(world_size) for unit in units), default=0)
    return max((2 * unit.owed_bytes(world_size) for unit in units if not in_chain(unit, world_size)), default=0)


def most_bytes(numel: int) -> int:
    """Bytes that are of use for the messages of all peers together, on hosts, of a model with so many elements.

    A rank is owed its part of the gradients by every peer, in a wide type all of them about 4 x numel bytes; a transport that
    sets aside what it sends takes as much again, and gaps at the ends of rings are up to a half. A step then hardly waits for
    credit. What is there for small models is for the framework's own collectives and for many small messages, for which
    credit is given back when a sixteenth of a ring has come together.
    """
    return (4 << 20) + 4 * 4 * numel


def published_bytes(units: Sequence[Unit]) -> int:
    """What all ranks publish together in a step, in the compute dtype: what a hierarchical order keeps a part of."""
    return sum(prod(shape) * unit.dtype.itemsize for unit in units if not unit.replicated for shape in unit.whole_shapes())


def check_room(unit: Unit, geometry: Geometry, transport: Transport) -> None:
    """Raises ConfigError if the unit's gradients, in this layout, could fill an inbox for ever."""
    if transport.device is None or transport.world_size == 1 or in_chain(unit, transport.world_size):
        return
    boxes: dict[int, int] = defaultdict(int)  # between hosts several owners' rows go to one rank
    for owner, nbytes in enumerate(geometry.owed):
        boxes[box_of(transport, owner)] += nbytes
    owed = max(boxes.values())
    if 2 * owed > transport.message_limit:
        raise ConfigError(
            f"the gradient of layer {unit.name!r} that goes to one rank has {owed} bytes in {geometry.dtype}; on a GPU "
            f"inbox_bytes must be at least twice as large, and is {transport.message_limit}. "
            f"Set inbox_bytes to {2 * owed} or more."
        )
