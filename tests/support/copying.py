"""The in-process transport, not in place."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_dp.errors import Where
from commfuse_dp.transport.base import PullRequest, Transfer
from tests.support.inproc import InprocTransport


class _Copy(Transfer):
    def __init__(self, view: Transfer, out) -> None:  # type: ignore[no-untyped-def]
        self._view, self._out = view, out

    def done(self) -> bool:
        return self._view.done()

    def wait(self, where: Where = Where()):  # type: ignore[no-untyped-def]  # noqa: B008
        return self._out.copy_(self._view.wait(where))


class CopyingTransport(InprocTransport):
    """Not in place: the engine needs its window, as over a network."""

    in_place = False

    def pull(self, epoch: int, requests: Sequence[PullRequest]) -> list[Transfer]:
        found = super().pull(epoch, [request._replace(out=None) for request in requests])
        return [_Copy(transfer, request.out) for transfer, request in zip(found, requests, strict=True)]
