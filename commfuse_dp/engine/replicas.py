"""Reduced shards summed over the replicas of hybrid sharding.

[Note: Steps that replicas broke off] The all-reduces of a group are paired by their order. A replica that breaks a step off
begins fewer of them than one that does not, and from then on they would sum what does not belong together. So ranks tell in the
store of torch.distributed how each step ended, and with how many begun in all:

    ended       the step went through
    broken      it was broken off; the next step goes on if all replicas broke it off with equally many begun
    final       they did not: whoever waits for this rank raises, as it does itself

It costs one message to the store a step, which nobody waits for; it is read after an exception, and by whoever waits for long.
On a device, where nobody waits on the host, a broken step ends the run anyway.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.errors import CommFuseError

ENDED, BROKEN, FINAL = "ended", "broken", "final"
_PATIENCE = timedelta(milliseconds=200)  # of a wait, before it looks at what the replicas say


class Replicating:
    """One all-reduce under way."""

    __slots__ = ("_group", "_index", "_step", "_work")

    def __init__(self, group: ReplicaGroup, work: Any, index: int, step: int) -> None:
        self._group, self._work, self._index, self._step = group, work, index, step

    def wait(self) -> None:
        self._group.wait(self._work, self._index, self._step)


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

    def all_reduce(self, tensor: torch.Tensor, step: int) -> Replicating:
        self._begun += 1
        return Replicating(self, dist.all_reduce(tensor, group=self._group, async_op=True), self._begun, step)

    def wait(self, work: Any, index: int, step: int) -> None:
        limit = time.monotonic() + self._deadline_s
        while self._store is not None:
            try:
                work.wait(_PATIENCE)
                return
            except RuntimeError:  # time is up, or the all-reduce failed
                if work.is_completed():
                    break
            for peer in self._peers:
                kind, at, begun, cause = self._told(peer)
                if kind == FINAL or (kind == BROKEN and at >= step and begun < index):
                    self._give_up(step, peer, cause)
            if time.monotonic() > limit:
                self._give_up(step, self._peers[0], f"it was waited for longer than deadline_s = {self._deadline_s:g} s")
        work.wait()

    def tell(self, kind: str, step: int, cause: str = "") -> None:
        """How `step` has ended on this rank."""
        if self._store is not None:
            self._store.set(str(self._rank), f"{kind}\n{step}\n{self._begun}\n{cause}")

    def agree(self, step: int, cause: str) -> None:
        """After a step that this rank told to be broken. Raises CommFuseError if the replicas did not all do the same."""
        limit = time.monotonic() + self._deadline_s
        for peer in self._peers if self._store is not None else ():
            while (told := self._told(peer))[1] < step and time.monotonic() < limit:
                time.sleep(0.005)
            kind, at, begun, theirs = told
            if kind != BROKEN or at != step or begun != self._begun:
                self._give_up(step, peer, theirs or cause)

    def _told(self, peer: int) -> tuple[str, int, int, str]:
        assert self._store is not None
        if not self._store.check([str(peer)]):
            return ENDED, 0, 0, ""
        kind, step, begun, cause = self._store.get(str(peer)).decode().split("\n", 3)
        return kind, int(step), int(begun), cause

    def _give_up(self, step: int, peer: int, cause: str) -> None:
        self.tell(FINAL, step, cause)
        raise CommFuseError(
            f"rank {self._rank} and its replica, rank {peer}, did not go through step {step} alike: {cause}. Under hybrid "
            "sharding no step follows one that was broken off on some replicas only: stop all ranks and resume from the last "
            "checkpoint. (After an exception in the same place on all ranks the next step goes on.)"
        )


__all__ = ["BROKEN", "ENDED", "ReplicaGroup", "Replicating"]
