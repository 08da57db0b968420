"""What the one-sided protocol is built on: a control channel and a memory. Each native transport supplies both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch

from commfuse_dp.errors import MismatchError, TransportError
from commfuse_dp.probe import Probe, now_ns
from commfuse_dp.transport.base import ExchangeFn
from commfuse_dp.transport.checks import NO_MEMORY, raise_failures
from commfuse_dp.transport.membership import called_in
from commfuse_dp.transport.one_sided import messages as msg
from commfuse_dp.transport.one_sided.ring import align


class Receiver(ABC):
    """The side of the protocol that a channel delivers to."""

    @abstractmethod
    def handle(self, src: int, *messages: bytes) -> None:
        """Messages of `src` have arrived, in their order (header, text of an ABORT; a payload, if any, is in its landing)."""

    @abstractmethod
    def landing(self, src: int, header: bytes) -> torch.Tensor | None:
        """Where the payload that follows `header` must be written, before `handle`; None: read it and throw it away."""

    def room_for(self, src: int, header: bytes) -> torch.Tensor:
        """`landing`, or memory that is thrown away, for channels in which every send must find its receive."""
        landing = self.landing(src, header)
        return landing if landing is not None else torch.empty(msg.payload_bytes(header), dtype=torch.uint8, device="cpu")

    @abstractmethod
    def lost(self, src: int, reason: str) -> None:
        """The connection to `src` has ended. Harmless if `src` has said goodbye before."""


class Channel(ABC):
    """Control messages to all peers."""

    answers_goodbyes: ClassVar[bool] = False  # `close` waits for those of the peers, which therefore come at once

    @abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Deliver to `receiver` from now on."""

    @abstractmethod
    def post(self, dst: int, message: bytes, payload: torch.Tensor | None = None, *, hold: bool = False) -> None:
        """Queue a message, and the uint8 payload that follows it; never blocks, never raises for a peer that is gone.

        hold: it may be kept back, to travel with others, until the next message that is not held, `push`, `flush`, or a `poll`
        that waits.
        """

    def push(self) -> None:
        """Send what was held back; never blocks."""
        return

    @abstractmethod
    def poll(self, timeout_s: float) -> None:
        """Deliver what has come; wait at most timeout_s for the first. Sends what is still queued."""

    def wake(self) -> None:
        """Let a `poll` that waits return soon; from any thread. Channels whose `poll` waits for 50 ms at most need not."""
        return

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Send what is queued, for at most timeout_s. True if nothing is left."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""

    def describe(self, peer: int, called: int) -> str:
        """Its number, as the user knows it, and how to find the peer, for errors: a process id or an address."""
        return f"rank {called}"


def payload_span(probe: Probe, track: str, message: bytes, peer: int, start_ns: int) -> None:
    """The payload that follows a message has moved, from start_ns until now: recorded while somebody watches."""
    if probe.sink is not None:
        kind, _, key, seq, part, _, nbytes = msg.HEADER.unpack_from(message)
        name, place = ("message", {"key": key, "seq": seq, "part": part}) if kind == msg.DEPOSIT else ("slice", {})
        probe.span(track, name, start_ns, now_ns(), nbytes=nbytes, peer=peer, **place)


class Memory(ABC):
    """The bytes behind windows and inboxes. All tensors are uint8, 1-D, contiguous and start 64-byte aligned.

    Attributes:
        segments: whole, by owner and key, once exposed; peers' only if in_place.
        outgoing: by peer, the ring that this rank fills for it: the inbox itself if in_place, else its staging.
        incoming: by peer, the inbox ring of this rank that it fills.
    """

    in_place: ClassVar[bool]
    segments: Mapping[int, Sequence[torch.Tensor]]
    outgoing: Mapping[int, torch.Tensor]
    incoming: Mapping[int, torch.Tensor]

    @abstractmethod
    def expose(self, sizes: Sequence[Sequence[int]]) -> None:
        """Collective: make the segments. sizes[key][rank] in bytes. Raises TransportError on all ranks if one cannot."""

    def close(self) -> None:
        """Let go of everything; what tensors still alias stays mapped until they die. Safe to call twice."""
        self.outgoing = self.incoming = self.segments = Closed()  # type: ignore[assignment]


class Closed(Sequence[Any]):
    """What a closed transport has in place of its tensors."""

    def __getitem__(self, _: Any) -> Any:
        raise TransportError("the transport is closed: its windows and inboxes are gone")

    def __len__(self) -> int:
        return 0

    def clear(self) -> None:
        return


def cut(block: torch.Tensor, sizes: Sequence[int], start: int = 0) -> list[torch.Tensor]:
    """Segments that lie one behind the other from byte `start` of a block on, each aligned."""
    starts = accumulate(map(align, sizes), initial=start)
    return [block.narrow(0, at, nbytes) for at, nbytes in zip(starts, sizes, strict=False)]


def own_segments(
    sizes: Sequence[Sequence[int]], rank: int, exchange: ExchangeFn, take: Callable[[int], torch.Tensor], place: str = ""
) -> list[torch.Tensor]:
    """Collective: what a rank publishes, by key, in one block that `take` gives. place: where that is, for errors.

    Raises TransportError on all ranks if one of them has no memory, MismatchError if they do not expose the same."""
    mine, failure = [row[rank] for row in sizes], None
    try:
        block = take(sum(map(align, mine)))
    except RuntimeError as error:  # of torch, or a TransportError
        failure = f"no memory{place} for {sum(mine)} published bytes ({error})"
    answers = exchange(([tuple(row) for row in sizes], failure))
    check_same_sizes(sizes, [theirs for theirs, _ in answers], exchange)
    raise_failures(exchange, (text for _, text in answers), end=NO_MEMORY)
    return cut(block, mine)


def check_same_sizes(sizes: Sequence[Sequence[int]], everyone: Sequence[Sequence[Sequence[int]]], exchange: ExchangeFn) -> None:
    """Raise MismatchError if some rank exposes other windows than this one. For `Memory.expose`. everyone: by `exchange`."""
    mine = [tuple(row) for row in sizes]
    for rank, theirs in enumerate(everyone):
        other = [tuple(row) for row in theirs]
        if other != mine:
            keys = [k for k in range(max(len(mine), len(other))) if mine[k : k + 1] != other[k : k + 1]]
            k = keys[0]
            there = called_in(exchange, rank)
            raise MismatchError(
                f"ranks expose different windows: key {k} has sizes {mine[k : k + 1]} here and {other[k : k + 1]} on rank "
                f"{there} ({len(mine)} and {len(other)} keys). All ranks must wrap the same model with the same configuration."
            )
