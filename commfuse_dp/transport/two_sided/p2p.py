"""Communicators of torch.distributed of our own, one for each lane (parameters, gradients, control): so neither queues behind
another nor behind the user's.

[Note: What gloo does, as measured]
* `Work.is_completed()` stays False until `wait()` has returned.
* Sends rendezvous, even small ones: a send completes only once its receive is posted. Post receives early.
* A wait that ran into its timeout leaves the connection unusable: a deadline there is final.
* Messages with different tags may overtake each other; equal tags keep their order.

Who has used them keeps them for the next `open_lanes` of the same ranks (transport/kept.py), unless transfers were left open.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, PeerLostError, TransportError, Where
from commfuse_dp.transport.base import CONTROL_LANE, GRAD_LANE, PARAM_LANE, ExchangeFn
from commfuse_dp.transport.checks import raise_failures
from commfuse_dp.transport.compat import group_named
from commfuse_dp.transport.kept import Kept, take

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


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


Lanes = Kept[Mapping[int, dist.ProcessGroup]]  # a communicator per lane


def open_lanes(group: dist.ProcessGroup | None, *, setup_s: float, device: torch.device | None = None) -> Lanes:
    """Collective over `group` (None: the default group): communicators of a `TwoSidedChannel` or a `GroupedExchange`.

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

    def make(exchange: ExchangeFn) -> dict[int, dist.ProcessGroup]:
        groups, error = {}, None
        for lane, backend in ((PARAM_LANE, own), (GRAD_LANE, own), (CONTROL_LANE, "gloo")):
            try:
                groups[lane] = new_group(ranks, timeout=datetime.timedelta(seconds=setup_s), backend=backend)
            except (RuntimeError, ValueError) as failure:
                error = f"cannot make a {backend} communicator of ranks {ranks}, lane {lane}: {failure}"
                break
        raise_failures(exchange, exchange(error))
        return groups

    return take(group, (tuple(ranks), own), make)


_made: Counter[tuple[int, ...]] = Counter()


def new_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Collective over `ranks`, and no others: these have made equally many groups of the same ranks here."""
    with not_bound_to_a_device():
        _made[tuple(ranks)] += 1
        with group_named(f"commfuse {'-'.join(map(str, ranks))} {_made[tuple(ranks)]}"):
            return dist.new_group(list(ranks), use_local_synchronization=True, **options)


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
