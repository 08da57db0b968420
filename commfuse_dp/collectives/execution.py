"""Executes one rank's program over a transport: the lanes of program/operations.py, driven by one thread.

A program has one problem (plain collectives) or several (a layer's backward: activations gathered, their gradients reduced).
Each problem's tensor has bindings of its own: rows, types, callbacks.

[Note: Never a deadlock]
The proof in program/network.py holds as long as no lane is kept waiting for reasons of its own. So every wait here, for
data or for credit, goes on taking in what others send and sending what is ready (`_pump`). A message may stay in the inbox
until it is used, which saves a copy but keeps its sender's credit; whenever this rank has to wait, messages of senders that
have more to send are moved out of the inbox (`_evict`), so that credit always comes back without waiting for compute. Channels
of one pair of ranks share the room in its inbox: so all of them are taken in, whichever of them is waited for. Sums beside the
compute lane are made between its operations and while it waits, as soon as their terms are here.

[Note: Other streams]
Two ranks that wait here for each other may each be what a rank of another group waits for (data parallelism over tensor
parallelism). So whoever waits here also does what other communication of this process has to do for its peers: see progress.py.

[Note: Copies]
pairwise all-gather: shard -> peer's inbox -> consume (in place), or -> the rows of the result.
pairwise reduce-scatter: produce writes straight into the owner's inbox if there is room; the owner sums from there.
A piece that is larger than half a channel is cut into messages of a quarter, which are put together on arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.errors import MismatchError, Where
from commfuse_dp.probe import now_ns
from commfuse_dp.program.layout import Slice, Tensor
from commfuse_dp.program.operations import TOTAL, Consume, Link, Piece, Produce, Program, Reduce, Send
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Sending, Tag, Transport
from commfuse_dp.transport.waiting import wait_until

# Produced pieces kept in memory of this rank because their channels are full; with more, production waits for credit.
BACKLOG_PIECES = 2
_ALIGNMENT = 64  # bytes: cuts between the messages of one piece


class Owner(int):
    """First argument of the callbacks: a rank, with the rows that the slice covers.

    The rank is the one that keeps the slice (for `consume` in an all-to-all: the one that sent it). With slices_per_rank > 1
    a rank's shard comes in several slices; these attributes tell them apart.
    """

    index: int  # number of the slice within the shard
    start: int  # rows start .. stop-1 of the whole tensor (all-to-all: of the tensor that the source sends)
    stop: int
    offset: int  # first row counted from the start of the shard (all-to-all: of the block between the two ranks)

    def __new__(cls, rank: int, part: Slice, offset: int) -> Owner:
        self = super().__new__(cls, rank)
        self.index, self.start, self.stop, self.offset = part.index, part.start, part.stop, offset
        return self


ConsumeFn = Callable[[Owner, torch.Tensor], object]
ProduceFn = Callable[[Owner, torch.Tensor], object]


def nothing_yet(_piece: Piece) -> torch.Tensor | None:
    """`data` of what a callback makes; `landing` of what only passes through."""
    return None


@dataclass(frozen=True)
class Bindings:
    """What the pieces of one problem's tensor are made of.

    row_shape: shape of one row. dtype: of each kind of piece, on the wire and in memory.
    data: a piece's tensor where it exists already (own shard, produced tensors), else None.
    landing: where a piece is to end up, of the piece's shape, contiguous; None: it only passes through.
    """

    row_shape: tuple[int, ...]
    dtype: Callable[[Piece], torch.dtype]
    data: Callable[[Piece], torch.Tensor | None] = nothing_yet
    landing: Callable[[Piece], torch.Tensor | None] = nothing_yet
    produce: ProduceFn | None = None
    consume: ConsumeFn | None = None
    divisor: float | None = None


def message_cuts(elements: int, itemsize: int, limit: int) -> list[tuple[int, int]]:
    """Element ranges of the messages that carry one piece over channels with room for `limit` bytes; at least one."""
    if elements * itemsize <= max(limit // 2, min(limit, _ALIGNMENT)):
        return [(0, elements)]
    step = max(limit // 4 // _ALIGNMENT * _ALIGNMENT, min(limit, _ALIGNMENT)) // itemsize
    if step == 0:
        raise ValueError(f"messages of at most {limit} bytes cannot carry elements of {itemsize} bytes: raise inbox_bytes")
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


@dataclass
class _Passage:
    """A piece on its way through one channel."""

    piece: Piece
    number: int  # among the pieces of all channels between the two ranks
    cuts: list[tuple[int, int]]
    at: int = 0  # next message
    target: torch.Tensor | None = field(default=None, repr=False)

    def tag(self, call: int) -> Tag:
        return Tag(CHANNEL_COLLECTIVE, call, self.number, self.at)


class Execution:
    """One run of a program on one rank. `transport` may be None in a world of one rank.

    name: what it is, in errors and measurements. bindings: of every problem's tensor. call: number of this run among those over
    the transport, the same on all ranks."""

    def __init__(
        self,
        name: str,
        program: Program,
        bindings: Mapping[Tensor, Bindings],
        device: torch.device,
        transport: Transport | None,
        call: int,
    ) -> None:
        self._name = name
        self._program = program
        self._bindings = bindings
        self._device = device
        self._transport = transport
        self._call = call
        self._rank = program.rank
        self._problems = {problem.tensor: problem for problem in program.problems}
        self._pieces: dict[Piece, torch.Tensor] = {}
        self._held: dict[Piece, tuple[int, Tag]] = {}  # pieces that lie in the inbox
        self._uses: Counter[Piece] = Counter()
        self._backlog: set[Piece] = set()
        self._source: dict[Piece, int] = {}
        self._only_to: dict[Piece, Link] = {}  # pieces used by nothing but one send: they may be made in the peer's inbox
        for op in program.operations:
            if isinstance(op, (Send, Consume)):
                self._uses[op.piece] += 1
            elif isinstance(op, Reduce):
                self._uses.update(Piece(origin, op.slice) for origin in op.inputs)
        channels = sorted({problem.tensor.channel for problem in program.problems})  # the same at both ends
        self._channels = {channel: number for number, channel in enumerate(channels)}
        self._outgoing = {link: self._passages(link, [op.piece for op in lane]) for link, lane in program.send_lanes.items()}
        self._incoming = {link: self._passages(link, [op.piece for op in lane]) for link, lane in program.receive_lanes.items()}
        self._sums = [deque(lane) for lane in program.reduce_lanes.values()]
        for link, lane in self._outgoing.items():
            self._only_to.update({p.piece: link for p in lane if self._uses[p.piece] == 1 and len(p.cuts) == 1})
        for link, lane in self._incoming.items():
            self._source.update({p.piece: link.peer for p in lane})

    def run(self) -> None:
        """Raises DeadlineError or PeerLostError (naming the peer and the slice), MismatchError, or what a callback raises."""
        for piece in self._program.own_data:
            own = self._of(piece).data(piece)
            if own is not None:
                self._pieces[piece] = own
        self._announce()
        for op in self._program.compute_lane:
            self._pump()
            self._advance()
            if isinstance(op, Produce):
                self._produce(op)
            elif isinstance(op, Reduce):
                self._reduce(op)
            else:
                self._consume(op)
        self._drain()

    def _of(self, piece: Piece) -> Bindings:
        return self._bindings[piece.slice.tensor]

    # ---- compute lane ------------------------------------------------------------------------------------------------
    def _produce(self, op: Produce) -> None:
        piece = Piece(self._rank, op.slice)
        bindings = self._of(piece)
        ready = bindings.data(piece)
        if ready is not None:
            self._pieces[piece] = ready
            return
        assert bindings.produce is not None
        buffer, inbox = self._room(piece)
        bindings.produce(self._owner(op.slice.owner, self._rank, op.slice), buffer)
        self._made(piece, buffer, inbox)

    def _reduce(self, op: Reduce, *, patient: bool = True) -> None:
        """patient: it may wait, for its terms and for room where the sum goes."""
        pieces = _terms(op)
        for piece in pieces:
            self._await(piece)
        output = Piece(op.output, op.slice)
        buffer, inbox = self._room(output, patient=patient)
        sum_in_rank_order(
            buffer,
            [self._pieces[piece] for piece in pieces],
            own_rank=op.inputs.index(self._rank) if self._rank in op.inputs else 0,
            scale_divisor=self._of(output).divisor if op.output == TOTAL else None,
        )
        for piece in pieces:
            self._used(piece)
        self._made(output, buffer, inbox)

    def _advance(self) -> None:
        """Make the sums beside the compute lane whose terms are all here. Never blocks."""
        for lane in self._sums:
            while lane and all(piece in self._pieces for piece in _terms(lane[0])):
                self._reduce(lane.popleft(), patient=False)

    def _consume(self, op: Consume) -> None:
        self._await(op.piece)
        consume = self._of(op.piece).consume
        if consume is not None:
            problem = self._problems[op.piece.slice.tensor]
            source = op.piece.origin if problem.collective == "all_to_all" else op.piece.slice.owner
            consume(self._owner(source, op.piece.origin, op.piece.slice), self._pieces[op.piece])
        self._used(op.piece)

    def _owner(self, shown: int, source: int, part: Slice) -> Owner:
        return Owner(shown, part, part.start - self._problems[part.tensor].slices(part.owner, max(source, 0))[0].start)

    # ---- pieces ------------------------------------------------------------------------------------------------------
    def _room(self, piece: Piece, *, patient: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(buffer to compute the piece into, the inbox message it is or None)."""
        landing = self._of(piece).landing(piece)
        if landing is not None:
            return landing, None
        to = self._only_to.get(piece)
        if to is not None:
            inbox = self._reserve_next(to, piece)
            if inbox is None and patient and len(self._backlog) >= BACKLOG_PIECES:
                self._wait(
                    lambda: len(self._backlog) < BACKLOG_PIECES, to.peer, piece, "to take in what was sent to it (no credit)"
                )
                inbox = self._reserve_next(to, piece)
            if inbox is not None:
                return self._typed(inbox, piece), inbox
            self._backlog.add(piece)
        return self._scratch(piece), None

    def _reserve_next(self, to: Link, piece: Piece) -> torch.Tensor | None:
        """Room in the peer's inbox if the piece is the next to be sent there."""
        assert self._transport is not None
        if self._outgoing[to][0].piece != piece:
            self._pump()
            if self._outgoing[to][0].piece != piece:
                return None
        found = self._transport.reserve((to.peer,), (self._nbytes(piece),))
        return found[0] if found else None

    def _made(self, piece: Piece, buffer: torch.Tensor, inbox: torch.Tensor | None) -> None:
        if inbox is not None:
            assert self._transport is not None
            to = self._only_to[piece]
            self._transport.send((Sending(to.peer, self._outgoing[to].popleft().tag(self._call), inbox),))
        elif self._uses[piece]:
            self._pieces[piece] = buffer
            self._pump()

    def _used(self, piece: Piece) -> None:
        self._uses[piece] -= 1
        if self._uses[piece] == 0:
            del self._pieces[piece]
            self._backlog.discard(piece)
            held = self._held.pop(piece, None)
            if held is not None:
                assert self._transport is not None
                source, tag = held
                self._transport.release((source,), tag)

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        return (piece.slice.size, *self._of(piece).row_shape)

    def _nbytes(self, piece: Piece) -> int:
        elements = piece.slice.size
        for extent in self._of(piece).row_shape:
            elements *= extent
        return elements * self._of(piece).dtype(piece).itemsize

    def _typed(self, message: torch.Tensor, piece: Piece) -> torch.Tensor:
        return message.view(self._of(piece).dtype(piece)).view(self._shape(piece))

    def _scratch(self, piece: Piece) -> torch.Tensor:
        return torch.empty(self._shape(piece), dtype=self._of(piece).dtype(piece), device=self._device)

    # ---- send and receive lanes --------------------------------------------------------------------------------------
    def _passages(self, link: Link, pieces: Sequence[Piece]) -> deque[_Passage]:
        assert self._transport is not None, "a world of more than one rank needs a transport"
        limit = self._transport.message_limit
        channel = self._channels[link.channel]
        lane: deque[_Passage] = deque()
        for number, piece in enumerate(pieces):
            itemsize = self._of(piece).dtype(piece).itemsize
            cuts = message_cuts(self._nbytes(piece) // itemsize, itemsize, limit)
            lane.append(_Passage(piece, number * len(self._channels) + channel, cuts))
        return lane

    def _announce(self) -> None:
        for link, lane in self._incoming.items():
            assert self._transport is not None
            for passage in lane:
                itemsize = self._of(passage.piece).dtype(passage.piece).itemsize
                for part, (start, stop) in enumerate(passage.cuts):
                    tag = Tag(CHANNEL_COLLECTIVE, self._call, passage.number, part)
                    self._transport.expect((link.peer,), tag, (stop - start) * itemsize)

    def _pump(self) -> None:
        """Take in what has arrived and send what is ready, as far as it goes without waiting."""
        for link, lane in self._incoming.items():
            while lane and self._take(link.peer, lane[0]):
                lane.popleft()
        for link, lane in self._outgoing.items():
            while lane and self._give(link.peer, lane[0]):
                piece = lane.popleft().piece
                self._used(piece)

    def _take(self, source: int, passage: _Passage) -> bool:
        """Receive messages of a piece; True once it is complete."""
        transport, piece = self._transport, passage.piece
        assert transport is not None
        itemsize = self._of(piece).dtype(piece).itemsize
        while passage.at < len(passage.cuts):
            tag = passage.tag(self._call)
            came = transport.receive((source,), tag, wait=False)
            if not came:
                return False
            message = came[0]
            start, stop = passage.cuts[passage.at]
            if message.numel() != (stop - start) * itemsize:
                raise MismatchError(
                    f"rank {self._rank}, {self._name}: {piece} came from rank {source} in a message of "
                    f"{message.numel()} bytes instead of {(stop - start) * itemsize}. All ranks must call the same collective "
                    "with the same sizes, row shape, dtypes, order and slices_per_rank."
                )
            if passage.target is None:
                passage.target = self._of(piece).landing(piece)
            if passage.target is None and len(passage.cuts) == 1:
                self._held[piece] = (source, tag)
                passage.target = self._typed(message, piece)
                break
            if passage.target is None:
                passage.target = self._scratch(piece)
            passage.target.view(-1)[start:stop].copy_(message.view(passage.target.dtype))
            transport.release((source,), tag)
            passage.at += 1
        assert passage.target is not None
        self._pieces[piece] = passage.target
        return True

    def _give(self, to: int, passage: _Passage) -> bool:
        """Send messages of a piece; True once it has left."""
        tensor = self._pieces.get(passage.piece)
        if tensor is None:
            return False
        assert self._transport is not None
        flat = tensor.reshape(-1)
        while passage.at < len(passage.cuts):
            start, stop = passage.cuts[passage.at]
            found = self._transport.reserve((to,), ((stop - start) * flat.element_size(),))
            if not found:
                return False
            found[0].view(flat.dtype).copy_(flat[start:stop])
            self._transport.send((Sending(to, passage.tag(self._call), found[0]),))
            passage.at += 1
        return True

    def _evict(self) -> None:
        """Give credit back to senders that have more to send: see the note on deadlocks."""
        if not self._held:
            return
        more = {link.peer for link, lane in self._incoming.items() if lane}
        for piece, (source, tag) in list(self._held.items()):
            if source in more:
                assert self._transport is not None
                self._pieces[piece] = self._pieces[piece].clone()
                del self._held[piece]
                self._transport.release((source,), tag)

    # ---- waiting -----------------------------------------------------------------------------------------------------
    def _await(self, piece: Piece) -> None:
        if piece not in self._pieces:
            self._pump()
        if piece not in self._pieces:
            self._wait(lambda: piece in self._pieces, self._source[piece], piece, f"to send {piece}")

    def _drain(self) -> None:
        """Until all sums are made, and everything owed to others has left. What comes from others has been consumed before."""
        self._pump()
        self._advance()
        for lane in self._sums:
            while lane:
                head = lane[0]
                missing = [piece for piece in _terms(head) if piece not in self._pieces]
                if not missing:  # another lane's sum was the last of its terms
                    self._advance()
                    continue

                def made(lane: deque[Reduce] = lane, head: Reduce = head) -> bool:
                    return not lane or lane[0] is not head

                self._wait(made, self._source.get(missing[0], -1), missing[0], f"to send {missing[0]}")
        for link, passages in self._outgoing.items():
            if passages:

                def left(passages: deque[_Passage] = passages) -> bool:
                    return not passages

                self._wait(left, link.peer, passages[0].piece, "to take in what was sent to it (no credit)")

    def _wait(self, ready: Callable[[], bool], peer: int, piece: Piece, doing: str) -> None:
        transport = self._transport
        assert transport is not None
        others = progress.callbacks()

        def pumped() -> bool:
            self._evict()
            self._pump()
            self._advance()
            if ready():
                return True
            for make_progress in others:
                make_progress()
            return False

        start = now_ns()
        with progress.looking_often(transport) if others else nullcontext():
            wait_until(transport, pumped, peer=peer, where=self._where(piece), doing=doing)
        transport.probe.exposed(self._name, start, now_ns())

    def _where(self, piece: Piece) -> Where:
        return Where(self._name, self._call, str(piece), self._nbytes(piece))


def _terms(op: Reduce) -> list[Piece]:
    return [Piece(origin, op.slice) for origin in op.inputs]
