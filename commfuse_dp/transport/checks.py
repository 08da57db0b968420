"""What all transports refuse, in the same words, and count alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from commfuse_dp.errors import TransportError, Where
from commfuse_dp.probe import Counters
from commfuse_dp.transport.base import CHANNEL_PARAM, ExchangeFn, Part, PullRequest, Tag, Transport
from commfuse_dp.transport.membership import Membership, called_in

_FIELD_LIMIT = 1 << 31


def check_sizes(sizes: Sequence[Sequence[int]], before: object, world_size: int) -> list[tuple[int, ...]]:
    """What a rank exposes, as a table. before: the one that was exposed before, if any.

    Raises TransportError the second time, ValueError for sizes that are none."""
    if before is not None:
        raise TransportError("expose() was called twice: a transport exposes its windows once; open another for others")
    table = [tuple(int(n) for n in row) for row in sizes]
    for key, row in enumerate(table):
        if len(row) != world_size or min(row) < 0:
            raise ValueError(f"expose: sizes[{key}] = {row}: one size >= 0 for each of {world_size} ranks is needed")
    return table


def check_publications(
    transport: Transport, keys: Sequence[int], epoch: int, published: Mapping[int, int], readers: str
) -> None:
    """published: key -> its epoch so far. readers: who may still read the epoch before.

    Raises ValueError if this one is not the next, TransportError if somebody may read, and what `window_bytes` does."""
    windows = len(transport.sizes) if transport.sizes is not None else 0
    for key in keys:
        if not 0 <= key < windows:
            window_bytes(transport, transport.rank, key)  # raises
        before = published.get(key, 0)
        if epoch != before + 1:
            raise ValueError(f"publish(key {key}, epoch {epoch}): epochs rise by one and {before} was the last")
    if keys and readers:
        raise TransportError(
            f"publish(key {keys[0]}, epoch {epoch}): {readers} may still read epoch {epoch - 1}; call "
            f"wait_finished({epoch - 1}) before writing the segment"
        )


def window_bytes(transport: Transport, owner: int, key: int) -> int:
    """What `owner` publishes under `key`. Raises TransportError before `expose`, ValueError if there is no such window."""
    sizes, world_size = transport.sizes, transport.world_size
    if sizes is None:
        raise TransportError("no windows: call expose(sizes) on all ranks first")
    if not (0 <= key < len(sizes) and 0 <= owner < world_size):
        raise ValueError(f"no window (rank {owner}, key {key}): ranks 0 .. {world_size - 1}, keys 0 .. {len(sizes) - 1}")
    return sizes[key][owner]


def check_pull(transport: Transport, wanted: PullRequest | Part, epoch: int, finished: int) -> None:
    """finished: this rank's last finished epoch.

    Raises ValueError for bytes that are not in the window and for an epoch that is over, and what `window_bytes` does."""
    owner, key, start, nbytes = wanted.owner, wanted.key, wanted.start, wanted.nbytes
    published = window_bytes(transport, owner, key)
    if start < 0 or nbytes < 0 or start + nbytes > published:
        raise ValueError(
            f"pull: bytes [{start}, {start + nbytes}) of key {key} of rank {owner}, which publishes {published} bytes there"
        )
    if epoch <= finished or epoch <= 0:
        raise ValueError(f"pull: epoch {epoch} is over: this rank has finished epoch {finished}")


def check_out(out: torch.Tensor | None, nbytes: int, name: str) -> torch.Tensor:
    """The buffer of a pull of nbytes over transport `name`. Raises ValueError if it is none."""
    if out is None or out.dtype != torch.uint8 or out.dim() != 1 or out.numel() != nbytes or not out.is_contiguous():
        given = "None" if out is None else f"{out.dtype} of shape {tuple(out.shape)}"
        raise ValueError(f"pull: transport {name} needs out = contiguous uint8 of {nbytes} bytes; {given} was given")
    return out


def check_finish(epoch: int, before: int) -> None:
    """Raises ValueError if this rank has finished `epoch` before."""
    if epoch <= before:
        raise ValueError(f"finish({epoch}): epoch {before} is finished already; epochs rise")


def check_peer(peer: int, rank: int, peers: Collection[int], world_size: int) -> None:
    """Raises ValueError if it is none of `peers`, with which `rank` is connected."""
    if peer not in peers:
        raise ValueError(f"rank {peer} is no peer of rank {rank} in a group of {world_size}: peers are {sorted(peers)}")


def check_tag(tag: Tag) -> None:
    """Raises ValueError for integers that are none of a tag."""
    if min(tag) < 0 or max(tag) >= _FIELD_LIMIT:
        raise ValueError(f"{tag}: keys, epochs and tags must be integers in 0 .. 2**31-1")


def check_message(nbytes: int, limit: int, whose: str) -> None:
    """whose: "to rank 1". Raises ValueError if it is too large."""
    if not 0 <= nbytes <= limit:
        raise ValueError(
            f"a message of {nbytes} bytes {whose}: 0 .. {limit} fit; send smaller slices (more slices_per_rank) or raise "
            "inbox_bytes"
        )


def not_reserved(dst: int, tag: Tag) -> ValueError:
    return ValueError(f"send to rank {dst}, {tag}: the buffer was not reserved by reserve([{dst}], ...), or was sent before")


def not_here(src: int, tag: Tag) -> ValueError:
    return ValueError(f"release: no message {tag} of rank {src} is here (released twice, or not yet received)")


def expected_twice(who: Membership, rank: int, src: int, tag: Tag) -> TransportError:
    here, there = who.called(rank), who.called(src)
    return TransportError(
        f"rank {here} expects two messages {tag} of rank {there}: tags must be unique among messages in flight"
    )


def is_closed(name: str, rank: int) -> TransportError:
    return TransportError(f"transport {name} of rank {rank} is closed")


def too_late(rank: int, deadline_s: float, who: str, suspect: str, where: Where, name: str) -> str:
    """who: "rank 1: to send ...", what was waited for; suspect: who may be at fault; name: of the transport."""
    return (
        f"rank {rank} waited {deadline_s:g} s for {who} ({where}; transport {name}). Either {suspect} is stuck or much slower, "
        "or it runs another program: look at its log first. If the step is really that slow, raise deadline_s."
    )


NO_MEMORY = ". Use more ranks, or lower inbox_bytes or prefetch_bytes."


def raise_failures(exchange: ExchangeFn, answers: Iterable[str | None], start: str = "", end: str = "") -> None:
    """answers: of all ranks, by `exchange`; None: no failure. Raises TransportError on all ranks alike."""
    failures = [f"rank {called_in(exchange, rank)}: {text}" for rank, text in enumerate(answers) if text]
    if failures:
        raise TransportError(f"{start}{'; '.join(failures)}{end}")


def all_together(
    exchange: ExchangeFn, steps: Iterable[Callable[[], object]], close: Callable[[], object], *, what: str = "", start: str = ""
) -> None:
    """Collective: every step succeeds on all ranks, or all of them close and raise TransportError. Otherwise the peers would
    meet a failure later, as a rank lost for no reason. what: stands before a rank's own text, start: before all."""
    try:
        for step in steps:
            failure = None
            try:
                step()
            except (OSError, TransportError) as error:
                failure = what + (str(error) or type(error).__name__)
            raise_failures(exchange, exchange(failure), start)
    except BaseException:
        close()
        raise


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
