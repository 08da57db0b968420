"""Which transport a call uses, and its call number.

A call that is given no transport uses the one of its process group and purpose, which is opened on the first such call and kept
as long as the group lives. All ranks of a group must make the same calls in the same order, as with torch.distributed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.collectives.bound import Binder
from commfuse_dp.collectives.direct import DirectExecution
from commfuse_dp.collectives.execution import NO_LIMIT, Bindings, Execution
from commfuse_dp.collectives.steps import numbers, numbers_of, steps_of
from commfuse_dp.collectives.streams import StreamExecution
from commfuse_dp.errors import TransportError
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.select import Kind, open_transport
from commfuse_dp.transport.streams.growth import GrowingRings
from commfuse_dp.transport.streams.words import WordTransport

INBOX_BYTES = 16 << 20  # per rank, for all peers
DEADLINE_S = 300.0
_LAST_CALL = (1 << 31) - 1


class Purpose(NamedTuple):
    """What a group's transport is for: streams that do not know of each other's order do not share one."""

    name: str = "collectives"
    kind: Kind = "auto"
    inbox_bytes: int = INBOX_BYTES
    deadline_s: float = DEADLINE_S


COLLECTIVES = Purpose()

_lock = threading.Lock()
_opened: weakref.WeakKeyDictionary[object, dict[tuple[Purpose, str], Transport]] = weakref.WeakKeyDictionary()


class Session(NamedTuple):
    """One call's place. `transport` is None in a world of one rank."""

    transport: Transport | None
    rank: int
    world_size: int
    call: int


ALONE = Session(None, 0, 1, 0)

# Of all its fields in a row: a named tuple's own constructor is a frame of Python.
_session: Callable[[tuple[Transport, int, int, int]], Session] = partial(tuple.__new__, Session)


def begin(
    group: dist.ProcessGroup | None, transport: Transport | None, device: torch.device, purpose: Purpose = COLLECTIVES
) -> Session:
    """The transport given, else that of the group (None: the default group; without torch.distributed, one rank alone).

    Raises ValueError if this process is no member of the group; what open_transport raises.
    """
    if transport is None:
        transport = transport_for(group, transport, device, purpose)
        if transport is None:
            return ALONE
    call = numbers.get(transport) or numbers_of(transport)  # every call asks
    return _session((transport, transport.rank, transport.world_size, call() & _LAST_CALL))


def rank_and_size(group: dist.ProcessGroup | None, transport: Transport | None) -> tuple[int, int]:
    """(rank, world size) of the transport given, else of the group; without torch.distributed, one rank alone.

    Raises ValueError if this process is no member of the group.
    """
    if transport is not None:
        return transport.rank, transport.world_size
    members = _members(group)
    return (0, 1) if members is None else (members.rank(), members.size())


def _members(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, the default one for None; None without torch.distributed. Raises as `rank_and_size`."""
    members = group
    if members is None and dist.is_available():
        members = dist.group.WORLD  # None before init_process_group
    if members is not None and not isinstance(members, dist.ProcessGroup):  # what new_group gives to who is no member
        raise ValueError(f"global rank {dist.get_rank()} is no member of the group it communicates over")
    return members


def transport_for(
    group: dist.ProcessGroup | None, transport: Transport | None, device: torch.device, purpose: Purpose = COLLECTIVES
) -> Transport | None:
    """The transport that `begin` would use, without counting a call; None in a world of one rank."""
    if transport is not None:
        return transport
    members, place = _members(group), (purpose, device.type)
    if members is None or members.size() == 1:
        return None
    with _lock:
        found = _opened.setdefault(members, {}).get(place)
    if found is None:
        found, _ = open_transport(
            purpose.kind,
            group=group,
            inbox_bytes=purpose.inbox_bytes,
            deadline_s=purpose.deadline_s,
            probe=None,
            device=device,
            stream_ordered=True,
            growing=True,
        )
        with _lock:
            _opened[members][place] = found
    return found


def open_transport_for(group: dist.ProcessGroup | None, device: torch.device, purpose: Purpose) -> Transport | None:
    """The transport of a group, if it is open already."""
    members = _members(group)
    if members is None:
        return None
    with _lock:
        return _opened.get(members, {}).get((purpose, device.type))


def execute(name: str, binder: Binder, bindings: Sequence[Bindings], session: Session, device: torch.device) -> None:
    """Run a program in its place among the calls of its transport. If it fails here, all ranks are told (`failed`)."""
    transport, _, _, call = session
    try:
        if transport is not None and transport.device is not None:
            if 2 * binder.largest > transport.message_limit and isinstance(transport, GrowingRings):
                transport.make_room(binder.largest)
            on_streams = binder.on_streams(transport.message_limit)
            kind = DirectExecution if on_streams.groups and isinstance(transport, WordTransport) else StreamExecution
            kind(name, on_streams, bindings, device, transport, call).run()
            return
        bound = binder[NO_LIMIT if transport is None else transport.message_limit]
        Execution(name, bound, bindings, device, transport, call).run()
    except BaseException as error:
        if transport is not None:
            failed(transport, name, error)
        raise


def failed(transport: Transport, what: str, error: BaseException) -> None:
    """A call ended by an exception on this rank: peers that wait for its part are told now and not at their deadline.

    The transport cannot be used any more, for the ranks' calls no longer match, before the next step of ranks that run steps
    (steps.py); one that was opened here is closed, and the next call of all ranks opens another.
    """
    steps = steps_of(transport)
    if steps is not None:
        steps.by(what, error)
        return
    with _lock:
        holders = [by_place for by_place in _opened.values() if transport in by_place.values()]
        for by_place in holders:
            by_place.pop(next(place for place, known in by_place.items() if known is transport))
    with contextlib.suppress(TransportError):
        transport.close(f"its {what} failed: {type(error).__name__}: {error}")


def opened(purpose: Purpose = COLLECTIVES) -> list[Transport]:
    """The transports that are open for process groups, for this purpose."""
    with _lock:
        return [found for by_place in _opened.values() for (kind, _), found in by_place.items() if kind == purpose]


def close_transports() -> None:
    """Close every transport that was opened for a process group; collective calls after that open new ones."""
    with _lock:
        transports = [transport for by_place in _opened.values() for transport in by_place.values()]
        _opened.clear()
    for transport in transports:
        transport.close()
