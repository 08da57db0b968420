"""Executes one rank's program over a transport: the lanes of program/operations.py, driven by one thread.

[Note: Never a deadlock]
The proof in program/network.py holds as long as no lane is kept waiting for reasons of its own. So every wait here, for
data or for credit, goes on taking in what others send and sending what is ready (`_pump`). A message may stay in the inbox
until it is used, which saves a copy but keeps its sender's credit; whenever this rank has to wait, messages of senders that
have more to send are moved out of the inbox (`_evict`), so that credit always comes back without waiting for compute.

[Note: Copies]
pairwise all-gather: shard -> peer's inbox -> consume (in place), or -> the rows of the result.
pairwise reduce-scatter: produce writes straight into the owner's inbox if there is room; the owner sums from there.
A piece that is larger than half a channel is cut into messages of a quarter, which are put together on arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.errors import MismatchError, Where
from commfuse_dp.probe import now_ns
from commfuse_dp.program.layout import Slice
from commfuse_dp.program.operations import TOTAL, Consume, Piece, Produce, Program, Reduce, Send
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Tag, Transport

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


def _nothing(_piece: Piece) -> torch.Tensor | None:
    return None


@dataclass(frozen=True)
class Bindings:
    """What the pieces of a program are made of.

    row_shape: shape of one row. dtype: of each kind of piece, on the wire and in memory.
    data: a piece's tensor where it exists already (own shard, produced tensors), else None.
    landing: where a piece is to end up, of the piece's shape, contiguous; None: it only passes through.
    """

    name: str
    device: torch.device
    row_shape: tuple[int, ...]
    dtype: Callable[[Piece], torch.dtype]
    data: Callable[[Piece], torch.Tensor | None] = _nothing
    landing: Callable[[Piece], torch.Tensor | None] = _nothing
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
    number: int  # among the pieces of this channel
    cuts: list[tuple[int, int]]
    at: int = 0  # next message
    target: torch.Tensor | None = field(default=None, repr=False)

    def tag(self, call: int) -> Tag:
        return Tag(CHANNEL_COLLECTIVE, call, self.number, self.at)


class Execution:
    """One call of a collective on one rank. `transport` may be None in a world of one rank."""

    def __init__(self, program: Program, bindings: Bindings, transport: Transport | None, call: int) -> None:
        self._program = program
        self._bindings = bindings
        self._transport = transport
        self._call = call
        self._rank = program.rank
        self._problem = program.problem
        self._pieces: dict[Piece, torch.Tensor] = {}
        self._held: dict[Piece, tuple[int, Tag]] = {}  # pieces that lie in the inbox
        self._uses: Counter[Piece] = Counter()
        self._backlog: set[Piece] = set()
        self._source: dict[Piece, int] = {}
        self._only_to: dict[Piece, int] = {}  # pieces used by nothing but one send: they may be made in the peer's inbox
        for op in program.operations:
            if isinstance(op, (Send, Consume)):
                self._uses[op.piece] += 1
            elif isinstance(op, Reduce):
                self._uses.update(Piece(origin, op.slice) for origin in op.inputs)
        self._outgoing = {link.peer: self._passages([op.piece for op in lane]) for link, lane in program.send_lanes.items()}
        self._incoming = {link.peer: self._passages([op.piece for op in lane]) for link, lane in program.receive_lanes.items()}
        for peer, lane in self._outgoing.items():
            self._only_to.update({p.piece: peer for p in lane if self._uses[p.piece] == 1 and len(p.cuts) == 1})
        for peer, lane in self._incoming.items():
            self._source.update({p.piece: peer for p in lane})

    def run(self) -> None:
        """Raises DeadlineError or PeerLostError (naming the peer and the slice), MismatchError, or what a callback raises."""
        for owner_part in self._problem.slices(self._rank, self._rank):
            piece = Piece(self._rank, owner_part)
            if self._problem.collective == "all_gather" and (own := self._bindings.data(piece)) is not None:
                self._pieces[piece] = own
        self._announce()
        for op in self._program.compute_lane:
            self._pump()
            if isinstance(op, Produce):
                self._produce(op)
            elif isinstance(op, Reduce):
                self._reduce(op)
            else:
                self._consume(op)
        self._drain()

    # ---- compute lane ------------------------------------------------------------------------------------------------
    def _produce(self, op: Produce) -> None:
        piece = Piece(self._rank, op.slice)
        ready = self._bindings.data(piece)
        if ready is not None:
            self._pieces[piece] = ready
            return
        assert self._bindings.produce is not None
        buffer, inbox = self._room(piece)
        self._bindings.produce(self._owner(op.slice.owner, self._rank, op.slice), buffer)
        self._made(piece, buffer, inbox)

    def _reduce(self, op: Reduce) -> None:
        pieces = [Piece(origin, op.slice) for origin in op.inputs]
        for piece in pieces:
            self._await(piece)
        output = Piece(op.output, op.slice)
        buffer, inbox = self._room(output)
        sum_in_rank_order(
            buffer,
            [self._pieces[piece] for piece in pieces],
            own_rank=op.inputs.index(self._rank) if self._rank in op.inputs else 0,
            scale_divisor=self._bindings.divisor if op.output == TOTAL else None,
        )
        for piece in pieces:
            self._used(piece)
        self._made(output, buffer, inbox)

    def _consume(self, op: Consume) -> None:
        self._await(op.piece)
        if self._bindings.consume is not None:
            source = op.piece.origin if self._problem.collective == "all_to_all" else op.piece.slice.owner
            owner = self._owner(source, op.piece.origin, op.piece.slice)
            self._bindings.consume(owner, self._pieces[op.piece])
        self._used(op.piece)

    def _owner(self, shown: int, source: int, part: Slice) -> Owner:
        return Owner(shown, part, part.start - self._problem.slices(part.owner, max(source, 0))[0].start)

    # ---- pieces ------------------------------------------------------------------------------------------------------
    def _room(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(buffer to compute the piece into, the inbox message it is or None)."""
        landing = self._bindings.landing(piece)
        if landing is not None:
            return landing, None
        to = self._only_to.get(piece)
        if to is not None:
            inbox = self._reserve_next(to, piece)
            if inbox is None and len(self._backlog) >= BACKLOG_PIECES:
                self._wait(lambda: len(self._backlog) < BACKLOG_PIECES, to, piece, "to take in what was sent to it (no credit)")
                inbox = self._reserve_next(to, piece)
            if inbox is not None:
                return self._typed(inbox, piece), inbox
            self._backlog.add(piece)
        return self._scratch(piece), None

    def _reserve_next(self, to: int, piece: Piece) -> torch.Tensor | None:
        """Room in `to`'s inbox if the piece is the next to be sent there."""
        assert self._transport is not None
        if self._outgoing[to][0].piece != piece:
            self._pump()
            if self._outgoing[to][0].piece != piece:
                return None
        return self._transport.try_reserve(to, self._nbytes(piece))

    def _made(self, piece: Piece, buffer: torch.Tensor, inbox: torch.Tensor | None) -> None:
        if inbox is not None:
            assert self._transport is not None
            to = self._only_to[piece]
            self._transport.send(to, self._outgoing[to].popleft().tag(self._call), inbox)
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
                self._transport.release(*held)

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        return (piece.slice.size, *self._bindings.row_shape)

    def _nbytes(self, piece: Piece) -> int:
        elements = piece.slice.size
        for extent in self._bindings.row_shape:
            elements *= extent
        return elements * self._bindings.dtype(piece).itemsize

    def _typed(self, message: torch.Tensor, piece: Piece) -> torch.Tensor:
        return message.view(self._bindings.dtype(piece)).view(self._shape(piece))

    def _scratch(self, piece: Piece) -> torch.Tensor:
        return torch.empty(self._shape(piece), dtype=self._bindings.dtype(piece), device=self._bindings.device)

    # ---- send and receive lanes --------------------------------------------------------------------------------------
    def _passages(self, pieces: Sequence[Piece]) -> deque[_Passage]:
        assert self._transport is not None, "a world of more than one rank needs a transport"
        limit = self._transport.message_limit
        lane: deque[_Passage] = deque()
        for number, piece in enumerate(pieces):
            itemsize = self._bindings.dtype(piece).itemsize
            lane.append(_Passage(piece, number, message_cuts(self._nbytes(piece) // itemsize, itemsize, limit)))
        return lane

    def _announce(self) -> None:
        for source, lane in self._incoming.items():
            assert self._transport is not None
            for passage in lane:
                itemsize = self._bindings.dtype(passage.piece).itemsize
                for part, (start, stop) in enumerate(passage.cuts):
                    tag = Tag(CHANNEL_COLLECTIVE, self._call, passage.number, part)
                    self._transport.expect(source, tag, (stop - start) * itemsize)

    def _pump(self) -> None:
        """Take in what has arrived and send what is ready, as far as it goes without waiting."""
        for source, lane in self._incoming.items():
            while lane and self._take(source, lane[0]):
                lane.popleft()
        for to, lane in self._outgoing.items():
            while lane and self._give(to, lane[0]):
                piece = lane.popleft().piece
                self._used(piece)

    def _take(self, source: int, passage: _Passage) -> bool:
        """Receive messages of a piece; True once it is complete."""
        transport, piece = self._transport, passage.piece
        assert transport is not None
        itemsize = self._bindings.dtype(piece).itemsize
        while passage.at < len(passage.cuts):
            tag = passage.tag(self._call)
            if not transport.arrived(source, tag):
                return False
            message = transport.receive(source, tag, self._where(piece))
            start, stop = passage.cuts[passage.at]
            if message.numel() != (stop - start) * itemsize:
                raise MismatchError(
                    f"rank {self._rank}, {self._bindings.name}: {piece} came from rank {source} in a message of "
                    f"{message.numel()} bytes instead of {(stop - start) * itemsize}. All ranks must call the same collective "
                    "with the same sizes, row shape, dtypes, order and slices_per_rank."
                )
            if passage.target is None:
                passage.target = self._bindings.landing(piece)
            if passage.target is None and len(passage.cuts) == 1:
                self._held[piece] = (source, tag)
                passage.target = self._typed(message, piece)
                break
            if passage.target is None:
                passage.target = self._scratch(piece)
            passage.target.view(-1)[start:stop].copy_(message.view(passage.target.dtype))
            transport.release(source, tag)
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
            room = self._transport.try_reserve(to, (stop - start) * flat.element_size())
            if room is None:
                return False
            room.view(flat.dtype).copy_(flat[start:stop])
            self._transport.send(to, passage.tag(self._call), room)
            passage.at += 1
        return True

    def _evict(self) -> None:
        """Give credit back to senders that have more to send: see the note on deadlocks."""
        for piece, (source, tag) in list(self._held.items()):
            if self._incoming[source]:
                assert self._transport is not None
                self._pieces[piece] = self._pieces[piece].clone()
                del self._held[piece]
                self._transport.release(source, tag)

    # ---- waiting -----------------------------------------------------------------------------------------------------
    def _await(self, piece: Piece) -> None:
        if piece not in self._pieces:
            self._pump()
        if piece not in self._pieces:
            self._wait(lambda: piece in self._pieces, self._source[piece], piece, f"to send {piece}")

    def _drain(self) -> None:
        """Until everything owed to others has left. What comes from others has been consumed before."""
        self._pump()
        for to, lane in self._outgoing.items():
            if lane:
                self._wait(lambda lane=lane: not lane, to, lane[0].piece, "to take in what was sent to it (no credit)")  # type: ignore[misc]

    def _wait(self, ready: Callable[[], bool], peer: int, piece: Piece, doing: str) -> None:
        def pumped() -> bool:
            self._evict()
            self._pump()
            return ready()

        assert self._transport is not None
        start = now_ns()
        self._transport.wait_until(pumped, peer=peer, where=self._where(piece), doing=doing)
        self._transport.probe.exposed(self._bindings.name, start, now_ns())

    def _where(self, piece: Piece) -> Where:
        return Where(self._bindings.name, self._call, str(piece), self._nbytes(piece))
