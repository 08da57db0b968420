"""The pulls of a one-sided transport: read in place, copied from this rank's own segment, or fetched over the wire.

They are the transport's own objects and read its state directly (friends of `OneSidedTransport`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from commfuse_dp.errors import TransportError, Where
from commfuse_dp.transport.base import NOWHERE, Transfer
from commfuse_dp.transport.waiting import wait_until

if TYPE_CHECKING:
    from commfuse_dp.transport.one_sided.protocol import OneSidedTransport


class Here(Transfer):
    """Bytes that may be read in place without a wait; segments stay where they are, so it serves in every epoch."""

    data: torch.Tensor

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def done(self) -> bool:
        return True

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        return self.data


class _Pull(Transfer):
    """What the pulls share that may have to be waited for."""

    __slots__ = ("_counted", "_epoch", "_key", "_owner", "_transport")

    def __init__(self, transport: OneSidedTransport, owner: int, key: int, epoch: int) -> None:
        self._transport = transport
        self._owner = owner
        self._key = key
        self._epoch = epoch
        self._counted = False

    @abstractmethod
    def _ready(self) -> bool: ...

    @abstractmethod
    def _bytes(self) -> torch.Tensor: ...

    def _published(self) -> bool:
        with self._transport._lock:
            epoch = self._transport._published[self._owner].get(self._key, 0)
        if epoch > self._epoch:
            owner = self._transport._called(self._owner)
            raise TransportError(
                f"pull of key {self._key} of rank {owner}, epoch {self._epoch}: it was replaced by epoch {epoch} "
                "meanwhile; a rank must wait for its pulls before it calls finish(epoch)"
            )
        return epoch == self._epoch

    def done(self) -> bool:
        if self._ready():
            return True
        self._transport._poll()
        if self._ready():
            return True
        if self._owner in self._transport._departed and not self._ready():
            raise self._transport._gone(self._owner, f"it has not published key {self._key} for epoch {self._epoch}")
        return False

    def wait(self, where: Where = NOWHERE) -> torch.Tensor:
        if not self._ready():
            doing = f"to publish key {self._key} for epoch {self._epoch}"
            wait_until(self._transport.whole, self._ready, peer=self._owner, where=where, doing=doing)
        return self._bytes()


class View(_Pull):
    """Read in place, where the owner published; or, of memory that is not read in place, this rank's own bytes, copied once
    into `out`."""

    __slots__ = ("_nbytes", "_out", "_start")

    def __init__(
        self,
        transport: OneSidedTransport,
        owner: int,
        key: int,
        epoch: int,
        start: int,
        nbytes: int,
        out: torch.Tensor | None = None,
    ) -> None:
        super().__init__(transport, owner, key, epoch)
        self._start, self._nbytes, self._out = start, nbytes, out

    def _ready(self) -> bool:
        return self._published()

    def _bytes(self) -> torch.Tensor:
        transport = self._transport
        data = transport._view(self._owner, self._key, self._start, self._nbytes).data
        if not self._counted:
            self._counted = True
            if self._owner != transport.rank:
                transport.counters.param_bytes_received += self._nbytes
            if self._out is not None:
                self._out.copy_(data)
        return data if self._out is None else self._out


class Fetch(_Pull):
    """Bytes of a peer that come over the wire into `out`; `complete` is set by the receiver."""

    __slots__ = ("complete", "out", "then")

    def __init__(
        self,
        transport: OneSidedTransport,
        owner: int,
        key: int,
        epoch: int,
        out: torch.Tensor,
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(transport, owner, key, epoch)
        self.out = out
        self.then = then
        self.complete = False

    def _ready(self) -> bool:
        return self.complete

    def _bytes(self) -> torch.Tensor:
        return self.out
