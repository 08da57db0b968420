"""Reduced shards summed over the replicas of hybrid sharding.

[Note: Steps that replicas broke off] The all-reduces of a group are paired by their order. A replica that breaks a step off
begins fewer of them than one that does not, and from then on they would sum what does not belong together. So a rank that
breaks a step off says in the store of torch.distributed with how many begun in all, and goes on once all replicas have said the
same. Nothing else is counted: forwards between, of a validation, may differ from one to another. What does not fit is final:

    a replica waits for an all-reduce that another one had not begun when it broke off
    both broke off, with different numbers begun

The rank that finds it says so, too, and raises; whoever waits for it raises as well. On a device, where nobody waits on the
host, a broken step ends the run anyway.

[Note: Lost ranks] gloo says that a connection ended, not whose, and only to its neighbours. So a rank that has lost one says
whom in the store, and raises; a rank whose all-reduce failed looks there, and says that it is alive. Who is the only one that
has said nothing is the one that is lost. The transport among the shards is asked and told, too: the dead rank is a peer there
of ranks that are none here.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from commfuse_dp.errors import CommFuseError, PeerLostError
from commfuse_dp.interrupts import HELD, deliver_held
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.kept import Kept, take
from commfuse_dp.transport.two_sided.p2p import new_group

_FINAL = "for good"
_LOST = "lost"
_ALIVE = "alive"
_PATIENCE = timedelta(milliseconds=200)  # of a wait, before it looks at what the replicas say
_FAILURE_PATIENCE_S = 10.0  # for somebody to know who is lost


class Replicating:
    """One all-reduce under way."""

    __slots__ = ("_group", "_index", "_step", "_work")

    def __init__(self, group: ReplicaGroup, work: Any, index: int, step: int) -> None:
        self._group, self._work, self._index, self._step = group, work, index, step

    def wait(self, *, interruptible: bool = False) -> None:
        """interruptible: a Ctrl-C that was held back may raise in here."""
        self._group.wait(self._work, self._index, self._step, interruptible=interruptible)


@dataclass(eq=False)
class Communicator:
    """Of the replicas, and how far they have come on it: one engine after the other uses it."""

    group: dist.ProcessGroup
    begun: int = 0  # all-reduces
    broken: int = 0  # steps that all replicas broke off


def open_replicas(group: dist.ProcessGroup, store: dist.Store | None, deadline_s: float, transport: Transport) -> ReplicaGroup:
    """Collective over `group`: a communicator of our own, for the framework's must not see our all-reduces between its
    collectives. Further arguments: see `ReplicaGroup`."""
    ranks = dist.get_process_group_ranks(group)
    kept = take(group, ("replicas", *ranks), lambda _: Communicator(new_group(ranks)))
    return ReplicaGroup(kept, store, deadline_s, transport)


class ReplicaGroup:
    """The replicas of one engine."""

    def __init__(self, kept: Kept[Communicator], store: dist.Store | None, deadline_s: float, transport: Transport) -> None:
        """store: where the replicas tell how their steps end; None, on a device: they do not. transport: among the shards."""
        self._kept: Kept[Communicator] | None = kept
        self._over = kept.item
        group = self._over.group
        self.size = group.size()
        self._store = dist.PrefixStore(f"commfuse {group.group_name}", store) if store is not None else None
        self._deadline_s = deadline_s
        self._rank = dist.get_rank()
        self._peers = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
        self._mute = False
        self._open = 0  # all-reduces not waited for, and broken steps not agreed about
        self._transport = transport
        transport.membership.when_lost.append(self._hear_lost)

    def all_reduce(self, tensor: torch.Tensor, step: int) -> Replicating:
        self._over.begun += 1
        self._open += 1
        work = dist.all_reduce(tensor, group=self._over.group, async_op=True)
        return Replicating(self, work, self._over.begun, step)

    def wait(self, work: Any, index: int, step: int, *, interruptible: bool) -> None:
        limit = time.monotonic() + self._deadline_s
        while self._store is not None:
            if interruptible and HELD.pending:
                deliver_held()
            try:
                work.wait(_PATIENCE)
                break
            except RuntimeError:  # time is up, or the all-reduce failed
                if work.is_completed():
                    try:
                        work.wait()  # it may have come through between the two
                        break
                    except RuntimeError as error:
                        self._failed(error, step)
            self._look(step, index)
            if any(self._read(peer, _ALIVE) for peer in self._peers):  # its all-reduce failed, and this one's will not end
                self._failed(None, step)
            if time.monotonic() > limit:
                self._give_up(step, self._peers[0], f"it was waited for longer than deadline_s = {self._deadline_s:g} s")
        else:
            work.wait()
        self._open -= 1

    def tell_broken(self, cause: str) -> None:
        """A step is broken off here, and begins no more all-reduces."""
        self._open += 1
        self._tell(str(self._over.broken), f"{self._over.begun}\n{cause}")

    def agree(self, step: int, cause: str) -> None:
        """After `tell_broken`. Raises CommFuseError if the replicas did not all do the same."""
        limit = time.monotonic() + self._deadline_s
        for peer in self._peers if self._store is not None else ():
            while (told := self._told(peer)) is None and time.monotonic() < limit:
                self._look(step)
                time.sleep(0.005)
            if told is None or told[0] != self._over.begun:
                self._give_up(step, peer, told[1] if told is not None else cause)
        self._over.broken += 1
        self._open -= 1

    def _hear_lost(self, rank: int, reason: str) -> None:
        """The transport among the shards has lost a rank: the replicas are told before this one leaves."""
        self._open += 1
        self._tell(_LOST, f"{rank}\n{reason}")

    def close(self) -> None:
        """The communicator is kept for the next engine, if it was left as all replicas leave it."""
        kept, self._kept = self._kept, None
        if kept is not None and not self._open:
            kept.keep()

    # ---- what replicas say -------------------------------------------------------------------------------------------
    def _tell(self, what: str, text: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # who serves the store may be the rank that is lost
                self._store.set(f"{self._rank} {what}", text)

    def _read(self, peer: int, what: str) -> str | None:
        assert self._store is not None
        try:
            if self._store.check([f"{peer} {what}"]):
                return self._store.get(f"{peer} {what}").decode()
        except RuntimeError:  # who served it is lost: silence means nothing now
            self._mute = True
        return None

    def _told(self, peer: int) -> tuple[int, str] | None:
        """What `peer` has said since all replicas last broke a step off: how many all-reduces it had begun, and why it did."""
        text = self._read(peer, str(self._over.broken)) or self._read(peer, _FINAL)
        if text is None:
            return None
        begun, cause = text.split("\n", 1)
        return int(begun), cause

    def _look(self, step: int, index: int = 0) -> None:
        """Raises if what this rank waits for will not come: all-reduce number `index`, or the end of a broken step."""
        self._transport.progress()
        for peer in self._peers:
            lost = self._read(peer, _LOST)
            if lost is not None:
                rank, reason = lost.split("\n", 1)
                self._lose(int(rank), f"rank {peer}, a replica of this one, reports: {reason}", step)
            told = self._told(peer)
            if told is not None and told[0] < index:
                self._give_up(step, peer, told[1])

    def _failed(self, error: RuntimeError | None, step: int) -> NoReturn:
        """See [Note: Lost ranks]."""
        self._tell(_ALIVE, "yes")
        limit = time.monotonic() + min(_FAILURE_PATIENCE_S, self._deadline_s)
        reason = str(error).splitlines()[0][:300] if error is not None else "an all-reduce of the replicas failed"
        while True:
            self._look(step, self._over.begun)
            silent = [peer for peer in self._peers if self._read(peer, _ALIVE) is None]
            if len(silent) == 1 and not self._mute:
                self._lose(silent[0], reason, step)
            if time.monotonic() > limit:
                raise PeerLostError(
                    f"rank {self._rank} lost one of its replicas, the ranks {silent or self._peers}, in step {step}: {reason}",
                    rank=self._rank,
                    peer=-1,
                ) from error
            time.sleep(0.02)

    def _lose(self, rank: int, reason: str, step: int) -> NoReturn:
        self._hear_lost(rank, reason)
        self._transport.membership.tell_lost(rank, reason)
        raise PeerLostError(
            f"rank {self._rank} lost rank {rank} in step {step}, while it summed gradients with its replicas: {reason}",
            rank=self._rank,
            peer=rank,
        )

    def _give_up(self, step: int, peer: int, cause: str) -> NoReturn:
        self._open += 1
        self._tell(_FINAL, f"-1\n{cause}")
        raise CommFuseError(
            f"rank {self._rank} and its replica, rank {peer}, did not go through step {step} alike: {cause}. Under hybrid "
            "sharding no step follows one that was broken off on some replicas only: stop all ranks and resume from the last "
            "checkpoint. (After an exception in the same place on all ranks the next step goes on.)"
        )
