"""One slice, or one message, as a batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commfuse_dp.device.base import Event, WordLike
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import NOWHERE, PullRequest, Sending, Tag, Transfer, Transport


def pull(
    transport: Transport,
    owner: int,
    key: int,
    epoch: int,
    *,
    start: int = 0,
    nbytes: int | None = None,
    out: torch.Tensor | None = None,
    after: Event | None = None,
    give: tuple[int, int] = (0, 0),
) -> Transfer:
    """nbytes None: to the end of the window."""
    if nbytes is None:
        known = transport.sizes is not None and 0 <= key < len(transport.sizes) and 0 <= owner < transport.world_size
        nbytes = transport.sizes[key][owner] - start if known else 0  # type: ignore[index]
    return transport.pull(epoch, (PullRequest(owner, key, start, nbytes, out, after, give),))[0]


def reserve(transport: Transport, dst: int, nbytes: int) -> torch.Tensor | None:
    """None: no credit."""
    found = transport.reserve((dst,), (nbytes,))
    return found[0] if found else None


def send(transport: Transport, dst: int, tag: Tag, buffer: torch.Tensor, *, when: Sequence[WordLike] = (), **more: Any) -> None:
    transport.send((Sending(dst, tag, buffer, when),), **more)


def expect(transport: Transport, src: int, tag: Tag, nbytes: int) -> None:
    transport.expect((src,), tag, nbytes)


def arrived(transport: Transport, src: int, tag: Tag) -> bool:
    return bool(transport.receive((src,), tag, wait=False))


def receive(transport: Transport, src: int, tag: Tag, where: Where = NOWHERE) -> torch.Tensor:
    return transport.receive((src,), tag, where)[0]


def release(transport: Transport, src: int, tag: Tag, **more: Any) -> None:
    transport.release((src,), tag, **more)
