"""Two-sided transport over torch.distributed point-to-point: gloo, and NCCL by the same code (not yet run on a GPU)."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.probe import Probe
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, NOWHERE, PARAM_LANE, Handle, TwoSidedTransport

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_TAG_LIMIT = 1 << 31


class TorchP2PTransport(TwoSidedTransport):
    """Sends and receives on three communicators of its own, so that neither lane queues behind another nor behind the user's.

    The lanes for parameters and gradients use the backend of `group`; the control lane always uses gloo and CPU tensors.

    [Note: What gloo does, as measured]
    * `Work.is_completed()` stays False until `wait()` has returned: `Handle.done` may be late, never early.
    * Sends rendezvous, even small ones: a send completes only once its receive is posted. Post receives early.
    * A wait that ran into its timeout leaves the connection unusable: a deadline here is final.
    * Messages with different tags may overtake each other; equal tags keep their order. NCCL ignores tags and keeps the order
      of calls per pair, so users must post matching sends and receives of a lane in the same order.

    Args:
        lanes: a communicator per lane, all of the same ranks; owned from now on. `open_lanes` makes them.
        deadline_s: longest wait of a handle, in seconds.
    """

    name: ClassVar[str] = "p2p"

    def __init__(self, lanes: Mapping[int, dist.ProcessGroup], *, deadline_s: float, probe: Probe | None = None) -> None:
        first = lanes[PARAM_LANE]
        super().__init__(first.rank(), first.size(), deadline_s=deadline_s, probe=probe)
        self._lanes = dict(lanes)
        self._backend = first.name()

    def isend(self, buffer: torch.Tensor, dst: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, dst, tag, "send to")
        try:
            work = self._lanes[lane].send([buffer], dst, tag)
        except RuntimeError as error:
            raise self._error(error, dst, NOWHERE) from error
        return _WorkHandle(self, work, dst, buffer)

    def irecv(self, buffer: torch.Tensor, src: int, *, lane: int, tag: int) -> Handle:
        self._check(buffer, src, tag, "receive from")
        try:
            work = self._lanes[lane].recv([buffer], src, tag)
        except RuntimeError as error:
            raise self._error(error, src, NOWHERE) from error
        return _WorkHandle(self, work, src, buffer)

    def close(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for group in lanes.values():
            with contextlib.suppress(ValueError, AssertionError):  # the user has destroyed everything already
                dist.destroy_process_group(group)

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
        if _TIMED_OUT.search(str(error)):
            return DeadlineError(
                f"rank {self.rank} waited {self.deadline_s:g} s for rank {peer} ({where}; transport p2p): it is stuck, much "
                "slower or runs another program. Look at its log first; if the step is really that slow, raise deadline_s.",
                rank=self.rank,
                peer=peer,
                where=where,
            )
        text = str(error).splitlines()[0][:300]
        return PeerLostError(
            f"rank {self.rank} lost rank {peer} (transport p2p over {self._backend}; {where}): {text}",
            rank=self.rank,
            peer=peer,
            where=where,
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
            try:
                self._work.wait(datetime.timedelta(seconds=transport.deadline_s))
            except RuntimeError as error:
                raise transport._error(error, self._peer, where) from error
            if self._buffer is not None and self._buffer.is_cuda:
                # NCCL's wait only orders the current stream behind the transfer; whoever waits here wants the bytes.
                torch.cuda.current_stream(self._buffer.device).synchronize()
        self._finished = True
        self._work = self._buffer = None


def open_lanes(group: dist.ProcessGroup | None, *, setup_s: float) -> dict[int, dist.ProcessGroup]:
    """Collective over `group` (None: the default group): the communicators of a `TorchP2PTransport`.

    `new_group` with local synchronisation: ranks outside `group` take no part.

    Raises TransportError if torch.distributed is not initialised or a communicator cannot be made within setup_s seconds.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise TransportError("transport 'p2p' needs torch.distributed: call init_process_group first, or start with torchrun")
    own = dist.get_backend(group)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    timeout = datetime.timedelta(seconds=setup_s)
    lanes: dict[int, dist.ProcessGroup] = {}
    for lane, backend in ((PARAM_LANE, own), (GRAD_LANE, own), (CONTROL_LANE, "gloo")):
        try:
            lanes[lane] = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        except (RuntimeError, ValueError) as error:
            for made in lanes.values():
                dist.destroy_process_group(made)
            raise TransportError(f"cannot make a {backend} communicator of ranks {ranks}, lane {lane}: {error}") from error
    return lanes
