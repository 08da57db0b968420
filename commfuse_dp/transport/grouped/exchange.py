"""Grouped exchanges: several sends and receives as one step, on communicators of their own, ordered by streams.

Where all ranks know in which step who sends what to whom, nothing has to be asked for, and no thread has to answer: in step t
of a ring-shifted order every rank sends to one peer and receives from another, in one call.

    rank 0     exchange: to 2, from 1  |  exchange: to 1, from 2         step 1 | step 2, each one group
    rank 1     exchange: to 0, from 2  |  exchange: to 2, from 0
    rank 2     exchange: to 1, from 0  |  exchange: to 0, from 1

[Note: Order, and why nothing can wait for ever]
The n-th exchange of rank a on a lane that names b meets b's n-th on that lane that names a. A communicator works off its
exchanges in the order of the calls. So there must be one order of all exchanges, on both lanes, that the calls of every rank
agree with (each leaving out those that do not concern it), as programs that are the same on all ranks have. Then no circle is
possible, however few multiprocessors or hardware queues are left for the communicators: an exchange waits only for work
that was enqueued before it, here and at its peers, and the first one that has not run anywhere can run. For the same reason no
kernel may wait inside itself for an exchange: it would hold the multiprocessors that the exchange needs.

[Note: Streams and lifetime]
    current   pack x                                                   |wait()   read y
    lane           | send x, receive y (behind what was in current at the call) ---^
An exchange starts behind what is in the current stream when it is called, runs in the communicator's stream, and holds up
neither the current stream nor the host. `x` may be written and `y` read behind `wait`. Tensors are kept here until the device
has done the exchange, so nothing here needs `record_stream`. Torch calls it for sends and receives all the same, which tells
only when memory is freed: a block then comes back late, and the allocator's pools grow. So what is exchanged in every step
should be memory that is not freed: segments, rings, pooled buffers.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from commfuse_dp.errors import TransportError, Where
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, NOWHERE, PARAM_LANE
from commfuse_dp.transport.grouped.watch import Ballot
from commfuse_dp.transport.two_sided.p2p import open_lanes, transfer_error

Part = tuple[int, torch.Tensor]  # (peer, contiguous tensor on the exchange's device)
Labels = tuple[torch.Tensor, torch.Tensor]  # sent with what is sent, received with what is received
LANES = (PARAM_LANE, GRAD_LANE)


class GroupedExchange:
    """`torch.distributed.batch_isend_irecv`, which NCCL runs as one group. (NCCL: not yet run on a GPU)

    One rank's end, on two lanes; see [Note: Order, and why nothing can wait for ever]. One thread calls it, but `abort`.

    The same code runs over gloo on CPU tensors, whose parts are sent and received one by one. There `Work.is_completed` stays
    False until `wait` has returned, and a send ends only once its receive is posted.

    Args:
        lanes: a communicator for each of PARAM_LANE and GRAD_LANE, of the same ranks. All ranks must take part in the first
            exchange of each (torch makes NCCL's communicator then): `open_grouped` does that. One for CONTROL_LANE is for the
            `ballot`.
        device: of what is exchanged.
        deadline_s: longest wait of the host, in seconds (CPU).
        keep: called by `close` if the communicators can be used again.
    """

    numbers: Sequence[int] | None = None  # of the ranks in the default group, for errors; None: their own
    ballot: Ballot | None = None  # how the ranks compare what they do; None: not at all

    def __init__(
        self,
        lanes: Mapping[int, dist.ProcessGroup],
        *,
        device: torch.device,
        deadline_s: float,
        keep: Callable[[], None] | None = None,
    ) -> None:
        self._lanes = {lane: lanes[lane] for lane in LANES}
        control = lanes.get(CONTROL_LANE)
        self.ballot = Ballot(control) if control is not None else None
        self.rank, self.world_size = lanes[PARAM_LANE].rank(), lanes[PARAM_LANE].size()
        self.device, self.deadline_s = device, deadline_s
        self._keep = keep
        self._under_way: dict[int, deque[Exchanged]] = {lane: deque() for lane in LANES}
        self._ended = ""  # why it cannot be used any more
        self._lock = threading.Lock()  # `abort` against `close`

    def exchange(
        self,
        lane: int,
        sends: Sequence[Part],
        receives: Sequence[Part],
        *,
        labels: Labels | None = None,
        where: Where = NOWHERE,
    ) -> Exchanged:
        """Send and receive as one step. lane: PARAM_LANE or GRAD_LANE.

        At most one send to and one receive from each peer; each must be of the size that the peer gives. Tensors without
        elements are left out, at both ends. CPU: every exchange must be waited for.

        labels: small tensors that go with the send and come with the receive, of which there is at most one each; alike on all
        ranks, and left out where the tensor that they go with is.
        where: what is moved, for errors. Raises ValueError for a peer, lane or tensor that is not possible, TransportError
        after `close` or `abort`.
        """
        if self._ended:
            raise TransportError(f"grouped exchange of rank {self.called(self.rank)}: {self._ended}")
        if lane not in self._lanes:
            raise ValueError(f"lane {lane}: {PARAM_LANE} (parameters) and {GRAD_LANE} (gradients) are allowed")
        group = self._lanes[lane]
        operations = []
        both = ((dist.irecv, receives, "receive from"), (dist.isend, sends, "send to"))
        for label, (operation, parts, doing) in zip(reversed(labels or (None, None)), both, strict=True):
            self._check(parts, doing)
            for peer, data in parts:
                for tensor in (data,) if label is None else (data, label):
                    if data.numel():
                        operations.append(dist.P2POp(operation, tensor, group=group, group_peer=peer))
        under_way = self._under_way[lane]
        while under_way and under_way[0].done():
            under_way.popleft()
        peers = tuple(sorted({peer for peer, data in (*sends, *receives) if data.numel()}))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            here, there = self.called(self.rank), self.called(peers[0])
            raise transfer_error(error, here, there, where, deadline_s=self.deadline_s, backend=group.name()) from error
        exchanged = Exchanged(self, works, peers, [data for _, data in (*sends, *receives)], where, group.name())
        if works:
            under_way.append(exchanged)
        return exchanged

    def called(self, rank: int) -> int:
        """Its number in the default group."""
        return rank if self.numbers is None else self.numbers[rank]

    def abort(self) -> None:
        """Break off what is under way: streams that wait for it go on, what it wrote is worthless. Any thread, any time."""
        with self._lock:
            if self._ended:
                return
            self._ended = "it was aborted"
            self._keep = None
            for group in self._lanes.values():
                group.abort()

    def close(self) -> None:
        """Give the communicators back. Safe to call twice. What is under way should be over: see `Exchanged.done`."""
        with self._lock:
            keep, self._keep = self._keep, None
            self._ended = self._ended or "it is closed"
            if keep is not None and all(exchanged.done() for queue in self._under_way.values() for exchanged in queue):
                keep()
            for queue in self._under_way.values():
                queue.clear()
            self._lanes = {}

    def _check(self, parts: Sequence[Part], doing: str) -> None:
        seen = set()
        for peer, data in parts:
            if peer == self.rank or not 0 <= peer < self.world_size:
                raise ValueError(f"{doing} rank {peer}: rank {self.rank} of {self.world_size} has no such peer")
            if peer in seen:
                raise ValueError(f"{doing} rank {peer} twice in one exchange: make two of it")
            if data.device != self.device or not data.is_contiguous():
                raise ValueError(
                    f"{doing} rank {peer}: a contiguous tensor on {self.device} is needed; one on {data.device} of shape "
                    f"{tuple(data.shape)} with strides {data.stride()} was given"
                )
            seen.add(peer)


class Exchanged:
    """An exchange under way."""

    __slots__ = ("_backend", "_owner", "_peers", "_tensors", "_waited", "_works", "where")

    def __init__(
        self,
        owner: GroupedExchange,
        works: list[dist.Work],
        peers: tuple[int, ...],
        tensors: list[torch.Tensor],
        where: Where,
        backend: str,
    ) -> None:
        self._owner, self._works, self._peers, self._tensors = owner, works, peers, tensors
        self._waited = False
        self._backend = backend
        self.where = where

    def done(self) -> bool:
        """Whether the device is through with it. Never blocks; any thread may ask. CPU: True only after `wait`."""
        if self._owner.device.type == "cpu":
            return self._waited or not self._works
        return all(work.is_completed() for work in self._works)

    def wait(self, where: Where = NOWHERE) -> None:
        """Device: the current stream waits until it is done; the host goes on. CPU: the host blocks, with the deadline.

        where: for the error; the exchange's own if nowhere. Raises DeadlineError or PeerLostError (CPU)."""
        where = where if where is not NOWHERE else self.where
        owner = self._owner
        try:
            if owner.device.type != "cpu":
                for work in self._works:
                    work.wait()
                return
            limit = time.monotonic() + owner.deadline_s
            for work in self._works if not self._waited else ():
                work.wait(datetime.timedelta(seconds=max(0.001, limit - time.monotonic())))
        except RuntimeError as error:
            here, there = owner.called(owner.rank), tuple(map(owner.called, self._peers))
            raise transfer_error(error, here, there, where, deadline_s=owner.deadline_s, backend=self._backend) from error
        self._waited = True
        self._tensors = []


def wrong_device(device: torch.device) -> str | None:
    """Why grouped exchanges of this process cannot be on `device`, if they cannot."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return None
    return (
        f"grouped exchanges on {device} while the current device is cuda:{torch.cuda.current_device()}: call "
        f"torch.cuda.set_device({device.index}) first"
    )


def open_grouped(group: dist.ProcessGroup | None, *, deadline_s: float, device: torch.device) -> GroupedExchange:
    """Collective over `group` (None: the default group): grouped exchanges on communicators of their own.

    NCCL's own watchdog ends the process after twice deadline_s: whoever uses this looks after shorter deadlines.

    Raises TransportError if torch.distributed is not initialised, if the group has no backend for `device`, if that is not the
    current device (torch's grouped calls need that), or if the communicators cannot be made.
    """
    wrong = wrong_device(device)
    if wrong is not None:
        raise TransportError(wrong)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    lanes = open_lanes(group, setup_s=2 * deadline_s, device=device)
    exchange = GroupedExchange(lanes.item, device=device, deadline_s=deadline_s, keep=lanes.keep)
    exchange.numbers = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    try:
        for lane in LANES if exchange.world_size > 1 else ():
            _introduce(exchange, lane)
    except TransportError as error:
        exchange.abort()
        raise TransportError(
            f"the first exchange failed, which makes the communicator: {error} (NCCL refuses several ranks on one GPU)"
        ) from error
    return exchange


def _introduce(exchange: GroupedExchange, lane: int) -> None:
    """All ranks take part: each tells the next one who it is."""
    rank, size, device = exchange.rank, exchange.world_size, exchange.device
    out, into = torch.full((1,), rank, device=device), torch.empty(1, dtype=torch.int64, device=device)
    exchange.exchange(lane, [((rank + 1) % size, out)], [((rank - 1) % size, into)], where=Where("(start)")).wait()
    if int(into.item()) != (rank - 1) % size:
        here, there = exchange.called(rank), exchange.called((rank - 1) % size)
        raise TransportError(f"rank {here} received {int(into.item())} where rank {there} introduces itself")
