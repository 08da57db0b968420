"""How the ranks of a group exchange small objects while a transport is set up.

[Note: A rank that dies meanwhile]
gloo's collectives report the end of a connection, not the rank, and only to its neighbours; the others wait. So objects go to
the first rank of the group and come back from it, by sends and receives of the group itself: whoever misses a rank knows which.

    rank 1, 2, ...   item -> rank 0                                           <- all items, or who is lost
    rank 0           <- items, one peer after the other: a dead one raises    -> all ranks that are left

Ranks that are left all raise, with the same name. If it is the first rank that dies, each of them finds out by itself.

[Note: Giving up]
A rank that fails between two exchanges would leave its peers waiting in the next one. So every object travels with a mark,
and a rank that fails sends its failure in place of the object that the peers wait for (`give_up`): they raise ExchangeFailed.
"""

from __future__ import annotations

import pickle
import re
import struct
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.errors import CommFuseError, DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.transport.base import ExchangeFn

_HEAD = struct.Struct("<q")  # bytes of the object
_FIRST = 2048  # bytes of the first message, which holds all of most objects
_TAG = 0x43464558  # of our sends and receives on the group, which is the user's
_HUB = 0
_WHERE = Where("(setting up)")
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


Failures = dict[int, tuple[str, str]]  # global rank -> name of the exception's class, its text


class ExchangeFailed(CommFuseError):
    """Peers have given up; every rank of the group knows it now. `failures`: which, and why."""

    def __init__(self, failures: Failures) -> None:
        text = "; ".join(f"rank {rank} ({kind}): {text}" for rank, (kind, text) in failures.items())
        super().__init__(f"given up by {text}")
        self.failures = failures


def exchange_of(group: dist.ProcessGroup | None) -> ExchangeFn:
    """Collective exchange of one object per rank over `group` (None: the default group); without torch.distributed there is one
    rank. The exchange raises PeerLostError on all ranks if one of them has died, DeadlineError if one does not come within the
    group's timeout, ExchangeFailed if one gives up instead of taking part."""
    return _Exchange(group)


class _Exchange:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._unmarked = _unmarked(group)
        self.numbers = dist.get_process_group_ranks(group) if dist.is_initialized() else None  # `membership.numbers_of`

    def __call__(self, item: Any) -> list[Any]:
        everyone = self._unmarked((None, item))
        failures = _failures(everyone)
        if failures:
            raise ExchangeFailed(failures)
        return [answer for _, answer in everyone]


def give_up(group: dist.ProcessGroup, failures: Failures) -> Failures:
    """Collective, also with ranks in an `exchange`: say what has failed here ({}: nothing); returns what has anywhere."""
    return _failures(_unmarked(group)((failures, None)))


def _failures(everyone: list[Any]) -> Failures:
    return {rank: failure for failures, _ in everyone if failures for rank, failure in failures.items()}


def _unmarked(group: dist.ProcessGroup | None) -> ExchangeFn:
    if not dist.is_initialized():
        return lambda item: [item]
    if dist.get_world_size(group) > 1 and "cpu:gloo" in str(dist.get_backend_config(group)):
        return _Star(group)

    def exchange(item: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(everyone, item, group=group)
        except RuntimeError as error:  # of NCCL or MPI, which do not say who
            raise _lost(error, -1) from error
        return everyone

    return exchange


class _Star:
    """See [Note: A rank that dies meanwhile]."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)

    def __call__(self, item: Any) -> list[Any]:
        if self._rank != _HUB:
            try:
                self._send(_HUB, _pack(item))
                lost, everyone = self._receive(_HUB, self._post(_HUB))
            except RuntimeError as error:
                raise self._lost(error, _HUB) from error
            if lost is not None:
                peer, late, text = lost
                raise _error(peer, text, late=late)
            return everyone
        return self._gather(item)

    def _gather(self, item: Any) -> list[Any]:
        peers = [peer for peer in range(self._size) if peer != _HUB]
        everyone: list[Any] = [None] * self._size
        everyone[_HUB] = item
        failure: TransportError | None = None
        left: list[int] = []
        posted = {}
        for peer in peers:
            try:
                posted[peer] = self._post(peer)
            except RuntimeError as error:
                failure = failure or self._lost(error, peer)
        for peer, first in posted.items():
            try:
                everyone[peer] = self._receive(peer, first)
                left.append(peer)
            except RuntimeError as error:
                failure = failure or self._lost(error, peer)
        lost = None
        if failure is not None:
            lost = failure.peer, isinstance(failure, DeadlineError), str(failure.__cause__)  # type: ignore[attr-defined]
        answer = _pack((lost, everyone if lost is None else []))
        for peer in left:
            try:
                self._send(peer, answer)
            except RuntimeError as error:  # the others may have their answer by now
                failure = failure or self._lost(error, peer)
        if failure is not None:
            raise failure
        return everyone

    def _lost(self, error: RuntimeError, peer: int) -> TransportError:
        return _lost(error, self._members[peer])

    def _send(self, peer: int, parts: list[torch.Tensor]) -> None:
        for part in parts:
            dist.send(part, group=self._group, group_dst=peer, tag=_TAG)

    def _post(self, peer: int) -> tuple[torch.Tensor, Any]:
        first = torch.empty(_FIRST, dtype=torch.uint8, device="cpu")
        return first, dist.irecv(first, group=self._group, group_src=peer, tag=_TAG)

    def _receive(self, peer: int, posted: tuple[torch.Tensor, Any]) -> Any:
        first, work = posted
        work.wait()
        data = first.numpy().tobytes()
        (nbytes,) = _HEAD.unpack_from(data)
        data = data[_HEAD.size :]
        if nbytes > len(data):
            rest = torch.empty(nbytes - len(data), dtype=torch.uint8, device="cpu")
            dist.recv(rest, group=self._group, group_src=peer, tag=_TAG)
            data += rest.numpy().tobytes()
        return pickle.loads(data[:nbytes])


def _pack(item: Any) -> list[torch.Tensor]:
    """A first message of fixed size, and one of the rest, if any."""
    data = pickle.dumps(item)
    data = _HEAD.pack(len(data)) + data
    first, rest = data[:_FIRST].ljust(_FIRST, b"\0"), data[_FIRST:]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (first, rest) if part]


def _lost(error: RuntimeError, peer: int) -> TransportError:
    """peer: in the default group."""
    late = _TIMED_OUT.search(str(error)) is not None
    failure = _error(peer, str(error).splitlines()[0][:300], late=late)
    failure.__cause__ = error
    return failure


def _error(peer: int, text: str, *, late: bool) -> TransportError:
    rank = dist.get_rank()
    who = f"rank {peer}" if peer >= 0 else "one of its peers"
    text = text.splitlines()[0][:300] if text else "no reason given"
    if late:
        return DeadlineError(
            f"rank {rank} waited in vain for {who} while the ranks set up communication ({text}). It is stuck, much slower, or "
            "does not make the same calls: look at its log first.",
            rank=rank,
            peer=peer,
            where=_WHERE,
        )
    return PeerLostError(
        f"rank {rank} lost {who} while the ranks set up communication ({text}). It died or left (killed, out of memory, "
        "crashed): look at its log and at the kernel's (dmesg).",
        rank=rank,
        peer=peer,
        where=_WHERE,
    )
