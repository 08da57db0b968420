"""Two-sided transport over torch.distributed point-to-point: gloo, and NCCL by the same code (not yet run on a GPU)."""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, NOWHERE, PARAM_LANE, Handle, TwoSidedTransport

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_TAG_LIMIT = 1 << 31


class TorchP2PTransport(TwoSidedTransport):
    """Sends and receives on communicators of its own, so that neither lane queues behind another nor behind the user's.

    The lanes for parameters and gradients use the backend of `group`; the control lane always uses gloo and CPU tensors.

    [Note: NCCL, one direction per communicator] (not yet run on a GPU)
    A communicator runs its sends and receives one after the other in one stream, and a receive stands there until its send
    comes. Of two ranks that both post a receive and then send, each would stand before its own send for ever. Grouped calls
    would need both ends to agree on pairs beforehand, which requests that come at any time do not. So what goes to higher
    ranks and what goes to lower ranks has a communicator each (`lanes`, `down`): in each, one end only sends, the other only
    receives, both in one order. Torch makes a communicator per pair of ranks for ungrouped sends and receives, but puts all
    peers on one if the process group was initialised with a `device_id`: `open_lanes` leaves it out for ours.

    [Note: NCCL and streams] (not yet run on a GPU)
    A transfer starts behind what is in the current stream when it is posted, and `wait` orders the current stream behind it.
    Threads that wait therefore use a stream of their own: the default stream would hold up the compute. Buffers are kept by
    handles until the end and are part of memory that lives as long as the transport, so nothing depends on `record_stream`.

    [Note: What gloo does, as measured]
    * `Work.is_completed()` stays False until `wait()` has returned: `Handle.done` may be late, never early.
    * Sends rendezvous, even small ones: a send completes only once its receive is posted. Post receives early.
    * A wait that ran into its timeout leaves the connection unusable: a deadline here is final.
    * Messages with different tags may overtake each other; equal tags keep their order. NCCL ignores tags and keeps the order
      of calls per pair, so users must post matching sends and receives of a lane in the same order.

    [Note: Communicators are kept]
    They are never destroyed: `close` keeps them for the next `open_lanes` of the same ranks. Making them is slow, gloo frees
    its connections only with the process anyway, and torch names a group after its ranks and the number of groups alive
    (`new_group` with local synchronisation): a group made after one was destroyed can get that one's name, finds its
    addresses in the store, and fails to connect. Communicators with transfers left open are not used again.

    Args:
        lanes: a communicator per lane, all of the same ranks. `open_lanes` makes them.
        down: those for transfers to lower ranks; None: the same.
        deadline_s: longest wait of a handle, in seconds.
        keep: called by `close` if the communicators can be used again.
    """

    name: ClassVar[str] = "p2p"

    def __init__(
        self,
        lanes: Mapping[int, dist.ProcessGroup],
        *,
        down: Mapping[int, dist.ProcessGroup] | None = None,
        deadline_s: float,
        probe: Probe | None = None,
        keep: Callable[[], None] | None = None,
    ) -> None:
        first = lanes[PARAM_LANE]
        super().__init__(first.rank(), first.size(), deadline_s=deadline_s, probe=probe)
        self._keep = keep
        self._lanes = dict(lanes)
        self._down = dict(down) if down is not None else self._lanes
        self._backend = first.name()
        self.keeps_tags = self._backend != "nccl"
        self._under_way = 0  # handles that were not waited for successfully
        self._lock = threading.Lock()  # handles are waited for in several threads

    def isend(self, buffer: torch.Tensor, dst: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, dst, tag, "send to")
        try:
            work = self._towards(lane, self.rank < dst).send([buffer], dst, tag)
        except RuntimeError as error:
            raise self._error(error, dst, NOWHERE) from error
        return self._handle(work, dst, buffer)

    def irecv(self, buffer: torch.Tensor, src: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, src, tag, "receive from")
        try:
            work = self._towards(lane, src < self.rank).recv([buffer], src, tag)
        except RuntimeError as error:
            raise self._error(error, src, NOWHERE) from error
        return self._handle(work, src, buffer)

    def _towards(self, lane: int, up: bool) -> dist.ProcessGroup:
        return (self._lanes if up else self._down)[lane]

    def close(self) -> None:
        self._lanes = self._down = {}
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
                if self._buffer is not None and self._buffer.is_cuda:  # see [Note: NCCL and streams]
                    stream = _waiting_stream(self._buffer.device)
                    with torch.cuda.stream(stream):
                        self._work.wait(patience)
                    stream.synchronize()
                else:
                    self._work.wait(patience)
            except RuntimeError as error:
                raise transport._error(error, self._peer, where) from error
            self._transport._settled()
        self._finished = True
        self._work = self._buffer = None


_of_this_thread = threading.local()


def _waiting_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that only this thread waits on."""
    stream = getattr(_of_this_thread, "stream", None)
    if stream is None or stream.device != device:
        stream = _of_this_thread.stream = torch.cuda.Stream(device)
    return stream


LanesKey = tuple[tuple[int, ...], str, bool]  # ranks, backend, communicators per direction


@dataclass(frozen=True)
class Lanes:
    """A communicator per lane, all of the same ranks; `serial` is the same on all of them."""

    groups: Mapping[int, dist.ProcessGroup]
    down: Mapping[int, dist.ProcessGroup]  # for transfers to lower ranks
    world: object  # the default group under which they were made
    key: LanesKey
    serial: int

    def keep(self) -> None:
        """For the next `open_lanes`."""
        if dist.is_initialized() and self.world is dist.group.WORLD:
            _idle[self.key].append(self)


_idle: dict[LanesKey, list[Lanes]] = defaultdict(list)
_made: Counter[LanesKey] = Counter()


def open_lanes(
    group: dist.ProcessGroup | None, *, setup_s: float, device: torch.device | None = None, grouped: bool = False
) -> Lanes:
    """Collective over `group` (None: the default group): the communicators of a `TorchP2PTransport`, or (grouped) of a
    `TorchGroupedExchange`, which needs none per direction.

    Kept ones if all ranks have the same to offer, else new ones by `new_group` with local synchronisation: ranks outside
    `group` take no part.

    device: of what is sent; CUDA: the group must have NCCL. Raises TransportError if it has not, if torch.distributed is not
    initialised, or if a communicator cannot be made within setup_s seconds.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise TransportError("transport 'p2p' needs torch.distributed: call init_process_group first, or start with torchrun")
    own = str(dist.get_backend(group))
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        if "nccl" not in str(dist.get_backend_config(group)):
            raise TransportError(
                f"transport 'p2p' on {device} needs a process group with NCCL, this one has {own!r}: use "
                'init_process_group("nccl") or ("cpu:gloo,cuda:nccl")'
            )
        own = "nccl"
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    directed = on_gpu and not grouped
    key = (tuple(ranks), own, directed)
    kept = _idle[key] = [lanes for lanes in _idle[key] if lanes.world is dist.group.WORLD]
    offers: list[set[int]] = [set()] * len(ranks)
    dist.all_gather_object(offers, {lanes.serial for lanes in kept}, group=group)
    common = set.intersection(*offers)
    if common:
        chosen = next(lanes for lanes in kept if lanes.serial == min(common))
        kept.remove(chosen)
        return chosen
    timeout = datetime.timedelta(seconds=setup_s)

    def make(lane: int, backend: str) -> dist.ProcessGroup:
        try:
            with not_bound_to_a_device():
                return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"cannot make a {backend} communicator of ranks {ranks}, lane {lane}: {error}") from error

    groups = {PARAM_LANE: make(PARAM_LANE, own), GRAD_LANE: make(GRAD_LANE, own), CONTROL_LANE: make(CONTROL_LANE, "gloo")}
    down = {**groups, **{lane: make(lane, own) for lane in (PARAM_LANE, GRAD_LANE)}} if directed else groups
    _made[key] += 1
    return Lanes(groups, down, dist.group.WORLD, key, _made[key])


@contextlib.contextmanager
def not_bound_to_a_device() -> Iterator[None]:
    """New groups do not inherit the default group's `device_id`: see [Note: NCCL, one direction per communicator]."""
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
