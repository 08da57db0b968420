"""Two-sided transport over torch.distributed point-to-point: gloo, and NCCL by the same code (not yet run on a GPU)."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, NOWHERE, PARAM_LANE, Handle, TwoSidedTransport
from commfuse_dp.transport.exchange import exchange_of

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_TAG_LIMIT = 1 << 31


class TorchP2PTransport(TwoSidedTransport):
    """Sends and receives on communicators of its own, so that neither lane queues behind another nor behind the user's.

    CPU tensors only: GPUs exchange in groups, ordered by streams (grouped/exchange.py).

    [Note: What gloo does, as measured]
    * `Work.is_completed()` stays False until `wait()` has returned: `Handle.done` may be late, never early.
    * Sends rendezvous, even small ones: a send completes only once its receive is posted. Post receives early.
    * A wait that ran into its timeout leaves the connection unusable: a deadline here is final.
    * Messages with different tags may overtake each other; equal tags keep their order.

    [Note: Communicators are kept]
    They are never destroyed: `close` keeps them for the next `open_lanes` of the same ranks. Making them is slow, gloo frees
    its connections only with the process anyway, and torch names a group after its ranks and the number of groups alive
    (`new_group` with local synchronisation): a group made after one was destroyed can get that one's name, finds its
    addresses in the store, and fails to connect. Communicators with transfers left open are not used again.

    Args:
        lanes: a communicator per lane, all of the same ranks. `open_lanes` makes them.
        deadline_s: longest wait of a handle, in seconds.
        keep: called by `close` if the communicators can be used again.
    """

    name: ClassVar[str] = "p2p"

    def __init__(
        self,
        lanes: Mapping[int, dist.ProcessGroup],
        *,
        deadline_s: float,
        probe: Probe | None = None,
        keep: Callable[[], None] | None = None,
    ) -> None:
        first = lanes[PARAM_LANE]
        super().__init__(first.rank(), first.size(), deadline_s=deadline_s, probe=probe)
        self._keep = keep
        self._lanes = dict(lanes)
        self._backend = first.name()
        self._under_way = 0  # handles that were not waited for successfully
        self._lock = threading.Lock()  # handles are waited for in several threads

    def isend(self, buffer: torch.Tensor, dst: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, dst, tag, "send to")
        try:
            work = self._lanes[lane].send([buffer], dst, tag)
        except RuntimeError as error:
            raise self._error(error, dst, NOWHERE) from error
        return self._handle(work, dst, buffer)

    def irecv(self, buffer: torch.Tensor, src: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, src, tag, "receive from")
        try:
            work = self._lanes[lane].recv([buffer], src, tag)
        except RuntimeError as error:
            raise self._error(error, src, NOWHERE) from error
        return self._handle(work, src, buffer)

    def close(self) -> None:
        self._lanes = {}
        keep, self._keep = self._keep, None
        if keep is not None and not self._under_way:
            keep()

    def _handle(self, work: dist.Work, peer: int, buffer: torch.Tensor) -> Handle:
        with self._lock:
            self._under_way += 1
        return _WorkHandle(self, work, peer, buffer)

    def _settled(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _check(self, buffer: torch.Tensor, peer: int, tag: int, doing: str) -> None:
        if not self._lanes:
            raise TransportError(f"transport p2p of rank {self.rank} is closed")
        if not buffer.is_contiguous():
            raise ValueError(f"{doing} rank {peer}: a contiguous tensor is needed; shape {tuple(buffer.shape)} with strides "
                             f"{buffer.stride()} was given")  # fmt: skip
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(f"{doing} rank {peer}: rank {self.rank} of {self.world_size} has no such peer")
        if not 0 <= tag < _TAG_LIMIT:
            raise ValueError(f"{doing} rank {peer}: tag {tag} is not in 0 .. 2**31-1")

    def _error(self, error: RuntimeError, peer: int, where: Where) -> TransportError:
        return transfer_error(error, self.rank, peer, where, deadline_s=self.deadline_s, backend=self._backend)


def transfer_error(
    error: RuntimeError, rank: int, peers: int | tuple[int, ...], where: Where, *, deadline_s: float, backend: str
) -> TransportError:
    """What a failed send or receive of `rank` with one of `peers` means: DeadlineError or PeerLostError."""
    peers = (peers,) if isinstance(peers, int) else peers
    who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {list(peers)}"
    peer = peers[0] if len(peers) == 1 else -1
    if _TIMED_OUT.search(str(error)):
        return DeadlineError(
            f"rank {rank} waited {deadline_s:g} s for {who} ({where}; transport p2p): it is stuck, much "
            "slower or runs another program. Look at its log first; if the step is really that slow, raise deadline_s.",
            rank=rank,
            peer=peer,
            where=where,
        )
    text = str(error).splitlines()[0][:300]
    return PeerLostError(
        f"rank {rank} lost {who} (transport p2p over {backend}; {where}): {text}", rank=rank, peer=peer, where=where
    )


class _WorkHandle(Handle):
    __slots__ = ("_buffer", "_finished", "_peer", "_transport", "_work")

    def __init__(self, transport: TorchP2PTransport, work: dist.Work, peer: int, buffer: torch.Tensor) -> None:
        self._transport = transport
        self._work: dist.Work | None = work
        self._peer = peer
        self._buffer: torch.Tensor | None = buffer  # gloo reads or writes it until the end
        self._finished = False

    def done(self) -> bool:
        """May be late: see [Note: What gloo does, as measured]."""
        return self._finished or (self._work is not None and self._work.is_completed())

    def wait(self, where: Where = NOWHERE) -> None:
        if self._finished:
            return
        if self._work is not None:
            transport = self._transport
            patience = datetime.timedelta(seconds=transport.deadline_s)
            try:
                self._work.wait(patience)
            except RuntimeError as error:
                raise transport._error(error, self._peer, where) from error
            self._transport._settled()
        self._finished = True
        self._work = self._buffer = None


LanesKey = tuple[tuple[int, ...], str]  # ranks, backend


@dataclass(frozen=True)
class Lanes:
    """A communicator per lane, all of the same ranks; `serial` is the same on all of them."""

    groups: Mapping[int, dist.ProcessGroup]
    world: weakref.ref[dist.ProcessGroup]  # the default group under which they were made
    key: LanesKey
    serial: int

    def keep(self) -> None:
        """For the next `open_lanes`."""
        world = self.world()
        if world is not None and dist.is_initialized() and world is dist.group.WORLD:
            _kept(self.key).append(self)


# By default group, with which they go.
_idle: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[LanesKey, list[Lanes]]] = weakref.WeakKeyDictionary()
_made: Counter[LanesKey] = Counter()


def _kept(key: LanesKey) -> list[Lanes]:
    assert dist.group.WORLD is not None
    return _idle.setdefault(dist.group.WORLD, {}).setdefault(key, [])


def open_lanes(group: dist.ProcessGroup | None, *, setup_s: float, device: torch.device | None = None) -> Lanes:
    """Collective over `group` (None: the default group): communicators of a `TorchP2PTransport` or a `TorchGroupedExchange`.

    Kept ones if all ranks have the same to offer, else new ones by `new_group` with local synchronisation: ranks outside
    `group` take no part.

    device: of what is sent; CUDA: the group must have NCCL. Raises TransportError if it has not, if torch.distributed is not
    initialised, or, on all ranks, if a communicator cannot be made within setup_s seconds; PeerLostError if a rank has died.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise TransportError("transport 'p2p' needs torch.distributed: call init_process_group first, or start with torchrun")
    own = str(dist.get_backend(group))
    if device is not None and device.type == "cuda":
        if "nccl" not in str(dist.get_backend_config(group)):
            raise TransportError(
                f"transport 'p2p' on {device} needs a process group with NCCL, this one has {own!r}: use "
                'init_process_group("nccl") or ("cpu:gloo,cuda:nccl")'
            )
        own = "nccl"
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    key = (tuple(ranks), own)
    kept = _kept(key)
    exchange = exchange_of(group)
    common = set.intersection(*exchange({lanes.serial for lanes in kept}))
    if common:
        chosen = next(lanes for lanes in kept if lanes.serial == min(common))
        kept.remove(chosen)
        return chosen
    timeout = datetime.timedelta(seconds=setup_s)
    groups, error = {}, None
    for lane, backend in ((PARAM_LANE, own), (GRAD_LANE, own), (CONTROL_LANE, "gloo")):
        try:
            with not_bound_to_a_device():
                groups[lane] = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        except (RuntimeError, ValueError) as failure:
            error = f"cannot make a {backend} communicator of ranks {ranks}, lane {lane}: {failure}"
            break
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(error)) if text]
    if failures:
        raise TransportError("; ".join(failures))
    _made[key] += 1
    assert dist.group.WORLD is not None
    return Lanes(groups, weakref.ref(dist.group.WORLD), key, _made[key])


_unbinding = threading.Lock()


@contextlib.contextmanager
def not_bound_to_a_device() -> Iterator[None]:
    """New groups do not inherit the default group's `device_id`.

    With one, torch splits NCCL's communicator off the default group's, for which all ranks of that would have to call, not only
    those of the new group (local synchronisation); and `new_group` takes no other value than the default group's. So it is put
    aside for as long as the group is made: by one thread at a time, and what another thread asks of the default group meanwhile
    is only slower."""
    with _unbinding:
        world = dist.group.WORLD
        bound = world.bound_device_id if world is not None else None
        if world is None or bound is None:
            yield
            return
        world.bound_device_id = None
        try:
            yield
        finally:
            world.bound_device_id = bound
