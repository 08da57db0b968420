"""What all one-sided transports check and count alike."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Counters
from commfuse_dp.transport.base import CHANNEL_PARAM


def window_bytes(sizes: Sequence[Sequence[int]] | None, owner: int, key: int, world_size: int) -> int:
    """What `owner` publishes under `key`. sizes: as exposed, None before.

    Raises TransportError before `expose`, ValueError if there is no such window."""
    if sizes is None:
        raise TransportError("no windows: call expose(sizes) on all ranks first")
    if not (0 <= key < len(sizes) and 0 <= owner < world_size):
        raise ValueError(f"no window (rank {owner}, key {key}): ranks 0 .. {world_size - 1}, keys 0 .. {len(sizes) - 1}")
    return sizes[key][owner]


def pull_bytes(owner: int, key: int, epoch: int, *, start: int, nbytes: int | None, published: int, finished: int) -> int:
    """Bytes of a pull. nbytes None: to the end. published: bytes of the window; finished: this rank's last finished epoch.

    Raises ValueError for bytes that are not in the window and for an epoch that is over."""
    if nbytes is None:
        nbytes = published - start
    if start < 0 or nbytes < 0 or start + nbytes > published:
        raise ValueError(
            f"pull: bytes [{start}, {start + nbytes}) of key {key} of rank {owner}, which publishes {published} bytes there"
        )
    if epoch <= finished or epoch <= 0:
        raise ValueError(f"pull: epoch {epoch} is over: this rank has finished epoch {finished}")
    return nbytes


def count_message(counters: Counters, channel: int, nbytes: int, *, sent: bool) -> None:
    """Bytes of messages count as gradients except on the parameter channel."""
    if channel == CHANNEL_PARAM:
        if sent:
            counters.param_bytes_sent += nbytes
        else:
            counters.param_bytes_received += nbytes
    elif sent:
        counters.grad_bytes_sent += nbytes
    else:
        counters.grad_bytes_received += nbytes
