"""Reduced shards summed over the replicas of hybrid sharding.

[Note: Steps that replicas broke off] The all-reduces of a group are paired by their order. A replica that breaks a step off
begins fewer of them than one that does not, and from then on they would sum what does not belong together. So a rank that
breaks a step off says in the store of torch.distributed with how many begun in all, and goes on once all replicas have said the
same. Nothing else is counted: forwards between, of a validation, may differ from one to another. What does not fit is final:

    a replica waits for an all-reduce that another one had not begun when it broke off
    both broke off, with different numbers begun

The rank that finds it says so, too, and raises; whoever waits for it raises as well. On a device, where nobody waits on the
host, a broken step ends the run anyway.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.errors import CommFuseError
from commfuse_dp.interrupts import HELD, deliver_held

_FINAL = "for good"
_PATIENCE = timedelta(milliseconds=200)  # of a wait, before it looks at what the replicas say


class Replicating:
    """One all-reduce under way."""

    __slots__ = ("_group", "_index", "_step", "_work")

    def __init__(self, group: ReplicaGroup, work: Any, index: int, step: int) -> None:
        self._group, self._work, self._index, self._step = group, work, index, step

    def wait(self, *, interruptible: bool = False) -> None:
        """interruptible: a Ctrl-C that was held back may raise in here."""
        self._group.wait(self._work, self._index, self._step, interruptible=interruptible)


class ReplicaGroup:
    """A communicator of its own.

    [Note: Never ended] torch names a group by its ranks and by how many groups there are. After one was destroyed the next of
    the same ranks would get its name and meet the old addresses in the store; and ranks that collect garbage at different times
    would name it differently. So it stays until torch.distributed ends, as groups of the framework do.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store | None, deadline_s: float) -> None:
        """store: where the replicas tell how their steps end; None, on a device: they do not."""
        self.size = group.size()
        self._group = group
        self._store = dist.PrefixStore(f"commfuse {group.group_name}", store) if store is not None else None
        self._deadline_s = deadline_s
        self._rank = dist.get_rank()
        self._peers = [rank for rank in dist.get_process_group_ranks(group) if rank != self._rank]
        self._begun = 0
        self._broken = 0  # steps that all replicas broke off

    def all_reduce(self, tensor: torch.Tensor, step: int) -> Replicating:
        self._begun += 1
        return Replicating(self, dist.all_reduce(tensor, group=self._group, async_op=True), self._begun, step)

    def wait(self, work: Any, index: int, step: int, *, interruptible: bool) -> None:
        limit = time.monotonic() + self._deadline_s
        while self._store is not None:
            if interruptible and HELD.pending:
                deliver_held()
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:  # time is up, or the all-reduce failed
                if work.is_completed():
                    break
            for peer in self._peers:
                told = self._told(peer)
                if told is not None and told[0] < index:
                    self._give_up(step, peer, told[1])
            if time.monotonic() > limit:
                self._give_up(step, self._peers[0], f"it was waited for longer than deadline_s = {self._deadline_s:g} s")
        work.wait()

    def tell_broken(self, cause: str) -> None:
        """A step is broken off here, and begins no more all-reduces."""
        self._tell(str(self._broken), self._begun, cause)

    def agree(self, step: int, cause: str) -> None:
        """After `tell_broken`. Raises CommFuseError if the replicas did not all do the same."""
        limit = time.monotonic() + self._deadline_s
        for peer in self._peers if self._store is not None else ():
            while (told := self._told(peer)) is None and time.monotonic() < limit:
                time.sleep(0.005)
            if told is None or told[0] != self._begun:
                self._give_up(step, peer, told[1] if told is not None else cause)
        self._broken += 1

    def _tell(self, what: str, begun: int, cause: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._rank} {what}", f"{begun}\n{cause}")

    def _told(self, peer: int) -> tuple[int, str] | None:
        """What `peer` has said since all replicas last broke a step off: how many all-reduces it had begun, and why it did."""
        assert self._store is not None
        for what in (str(self._broken), _FINAL):
            if self._store.check([f"{peer} {what}"]):
                begun, cause = self._store.get(f"{peer} {what}").decode().split("\n", 1)
                return int(begun), cause
        return None

    def _give_up(self, step: int, peer: int, cause: str) -> None:
        self._tell(_FINAL, -1, cause)
        raise CommFuseError(
            f"rank {self._rank} and its replica, rank {peer}, did not go through step {step} alike: {cause}. Under hybrid "
            "sharding no step follows one that was broken off on some replicas only: stop all ranks and resume from the last "
            "checkpoint. (After an exception in the same place on all ranks the next step goes on.)"
        )
