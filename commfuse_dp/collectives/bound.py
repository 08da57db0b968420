"""A program bound to sizes and types: all that its runs have in common, with pieces as numbers.

    Program, rows and dtypes of its tensors  ->  Binder  -- limit of a message -->  BoundProgram  ->  execution.py

A step repeats its calls, so what a call has to work out from the program is worked out here, once: which pieces there are, how
large they are and how often they are used, where they lie in what a call is given and in what it fills, which of them may be
made in a peer's inbox, how they are cut into messages.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from commfuse_dp.collectives.exchanges import Numbering, Side, exchanges_of
from commfuse_dp.collectives.groups import groups_of
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.program.layout import Slice, Tensor
from commfuse_dp.program.operations import TOTAL, Consume, Link, Piece, Problem, Produce, Program, Receive, Reduce, Send
from commfuse_dp.transport.one_sided.ring import ALIGNMENT

ALL = slice(None)  # of a tensor: no view of it is needed


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


class Types(NamedTuple):
    """Of a tensor's pieces, on the wire and in memory."""

    own: torch.dtype  # a rank's own data, or its partial
    total: torch.dtype  # the sum of all partials
    running: torch.dtype  # a sum that is passed on

    def of(self, piece: Piece) -> torch.dtype:
        return self.own if piece.origin >= 0 else self.total if piece.origin == TOTAL else self.running

    @classmethod
    def moved(cls, dtype: torch.dtype) -> Types:
        return cls(dtype, dtype, dtype)

    @classmethod
    def summed(cls, partial: torch.dtype, total: torch.dtype) -> Types:
        return cls(partial, total, wide_dtype(total, partial))


class Rows(NamedTuple):
    """What one of the program's tensors is made of. shape: of one row."""

    tensor: Tensor
    shape: tuple[int, ...]
    types: Types


Cuts = tuple[tuple[int, int], ...] | None  # element ranges of a piece's messages; None: there is one


class Passage(NamedTuple):
    """A piece on its way through one channel."""

    piece: int
    number: int  # of its tag: among the pieces of all channels between the two ranks
    cuts: Cuts
    sizes: tuple[int, ...]  # of its messages, in bytes


class Lane(NamedTuple):
    peer: int
    passages: tuple[Passage, ...]


class Step(NamedTuple):
    """An operation that computes. owner: what its callback is told; None: a sum of `terms`."""

    piece: int  # that it makes, or consumes
    consumes: bool
    owner: Owner | None
    terms: tuple[int, ...] = ()  # pieces that it uses
    own: int = 0  # which term is this rank's own
    wide: torch.dtype | None = None  # of the sum, if its terms have one dtype and all but the own one come from other ranks


class BoundProgram:
    """Raises ValueError if messages are too small for one element."""

    def __init__(self, program: Program, rows: Sequence[Rows], limit: int, *, streams: bool = False) -> None:
        self.rank, self.streams = program.rank, streams
        self._numbers: dict[Piece, int] = {}
        own = [self._number(piece) for piece in program.own_data]
        problems = {problem.tensor: problem for problem in program.problems}
        tensors = [entry.tensor for entry in rows]

        def owner_of(shown: int, source: int, part: Slice) -> Owner:
            return Owner(shown, part, part.start - problems[part.tensor].slices(part.owner, max(source, 0))[0].start)

        def step_of(op: Produce | Consume | Reduce) -> Step:
            if isinstance(op, Produce):
                return Step(self._number(Piece(self.rank, op.slice)), False, owner_of(op.slice.owner, self.rank, op.slice))
            if isinstance(op, Consume):
                origin, part = op.piece
                shown = origin if problems[part.tensor].collective == "all_to_all" else part.owner
                number = self._number(op.piece)
                return Step(number, True, owner_of(shown, origin, part), (number,))
            terms = tuple(self._number(Piece(origin, op.slice)) for origin in op.inputs)
            at = op.inputs.index(self.rank) if self.rank in op.inputs else 0
            types = rows[tensors.index(op.slice.tensor)].types
            kinds, wide = {types.of(Piece(origin, op.slice)) for origin in op.inputs}, None
            if self.rank in op.inputs and len(kinds) == 1:
                wide = wide_dtype(types.of(Piece(op.output, op.slice)), *kinds)
            return Step(self._number(Piece(op.output, op.slice)), False, None, terms, at, wide)

        self.own = tuple(own)
        lane: Sequence[Produce | Consume | Reduce] = program.compute_lane
        sums_beside: Sequence[Sequence[Reduce]] = tuple(program.reduce_lanes.values())
        if streams:  # what is enqueued has one order
            lane, sums_beside = [op for op in program.operations if isinstance(op, (Produce, Consume, Reduce))], ()
        self.compute = tuple(map(step_of, lane))
        self.sums = tuple(tuple(map(step_of, beside)) for beside in sums_beside)
        sums = [step for lane in (self.compute, *self.sums) for step in lane if step.owner is None]
        uses = Counter(self._number(op.piece) for op in program.operations if isinstance(op, (Send, Consume)))
        summed = {term for step in sums for term in step.terms if term not in uses}
        for step in sums:
            uses.update(step.terms)
        for moved in (op for op in program.operations if isinstance(op, (Send, Receive))):
            self._number(moved.piece)
        received = {self._numbers[op.piece] for op in program.operations if isinstance(op, Receive)}

        self.pieces = tuple(self._numbers)
        self.count = len(self.pieces)
        uses.update(self.own)  # the caller's, which stay as they are
        self.uses = [uses[number] for number in range(self.count)]
        self.tensor = tuple(tensors.index(piece.slice.tensor) for piece in self.pieces)  # number of a piece's tensor
        self.dtypes = tuple(rows[at].types.of(piece) for piece, at in zip(self.pieces, self.tensor, strict=True))
        shapes = [torch.Size((piece.slice.size, *rows[at].shape)) for piece, at in zip(self.pieces, self.tensor, strict=True)]
        self.nbytes = tuple(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, self.dtypes, strict=True))
        flat = summed & received  # sums take their terms as they lie
        self.shapes = tuple(torch.Size((shape.numel(),)) if at in flat else shape for at, shape in enumerate(shapes))
        # Where a piece lies in what a call is given, and in what it fills: see `Bindings`.
        where = [(problems[piece.slice.tensor], piece) for piece in self.pieces]
        self.given = tuple(_given(problem, piece, self.rank) for problem, piece in where)
        self.lands = tuple(
            _lands(problem, piece, self.rank, rows[at].types) for (problem, piece), at in zip(where, self.tensor, strict=True)
        )
        # Channels of one pair of ranks share its tags; their order is the same at both ends.
        channels = sorted({problem.tensor.channel for problem in program.problems})
        numbering = Numbering(program) if streams else None

        def lane_of(link: Link, ops: Sequence[Send | Receive]) -> Lane:
            first, step = channels.index(link.channel), len(channels)
            numbers = [numbering.way(op).number for op in ops] if numbering else range(first, first + step * len(ops), step)
            return self._lane(link, ops, numbers, limit)

        self.outgoing = tuple(lane_of(*of_link) for of_link in program.send_lanes.items())
        self.incoming = tuple(lane_of(*of_link) for of_link in program.receive_lanes.items())
        self.passages_out = [len(lane.passages) for lane in self.outgoing]  # by lane
        self.passages_in = [len(lane.passages) for lane in self.incoming]
        self.sums_of = [len(lane) for lane in self.sums]
        self.lanes = len(self.outgoing), len(self.incoming), len(self.sums)
        self.lane_of = {passage.piece: at for at, lane in enumerate(self.incoming) for passage in lane.passages}
        self.source = {piece: self.incoming[at].peer for piece, at in self.lane_of.items()}
        # Number of the operation of the compute lane from which on what comes is of use before it is asked for.
        passes_on = any(passage.piece in self.lane_of for lane in self.outgoing for passage in lane.passages)
        puts_together = any(passage.cuts is not None for lane in self.incoming for passage in lane.passages)
        self.looks_from = 0 if passes_on or puts_together else self._first_sum()
        self.sent = frozenset(passage.piece for lane in self.outgoing for passage in lane.passages)
        # Pieces that nothing uses but one send, in one message: they may be made in the peer's inbox. piece -> lane
        self.only_to = {
            passage.piece: number
            for number, lane in enumerate(self.outgoing)
            for passage in lane.passages
            if self.uses[passage.piece] == 1 and passage.cuts is None
        }

        if numbering is not None:
            self._order_exchanges(program, numbering, limit)
            whole = not (passes_on or puts_together or self.tight)
            self.groups = groups_of(self, summed) if whole else None

    def _order_exchanges(self, program: Program, numbering: Numbering, limit: int) -> None:
        """What streams go by: see exchanges.py and streams.py."""

        def side(program_lanes: Iterable[Sequence[Send | Receive]], lanes: Sequence[Lane]) -> list[Side]:
            pairs = zip(program_lanes, lanes, strict=True)
            return [([numbering.way(op) for op in ops], [passage.sizes for passage in lane.passages]) for ops, lane in pairs]

        out = side(program.send_lanes.values(), self.outgoing)
        into = side(program.receive_lanes.values(), self.incoming)
        self.looks_from = len(self.compute)
        self.exchanges = exchanges_of(self.rank, program.world_size, out, into)
        self.leaves_at: dict[int, int] = {}  # piece -> number of the first exchange with a part of it
        self.here_after: dict[int, int] = {}  # piece that comes -> how many exchanges bring all of it
        self.leaving: list[int] = []  # of each exchange the piece that leaves; -1: none does
        self.messages: dict[int, tuple[Cuts, tuple[int, ...]]] = {}  # piece that leaves -> its cuts, bytes of its messages
        needed: Counter[int] = Counter()
        coming: list[tuple[int, tuple[int, int, int]]] = []
        for number, exchange in enumerate(self.exchanges):
            needed[exchange.dst] += exchange.room
            self.leaving.append(-1)
            if exchange.out is not None:
                lane, at = exchange.out
                piece, _, cuts, sizes = self.outgoing[lane].passages[at]
                self.leaves_at.setdefault(piece, number)
                self.leaving[-1], self.messages[piece] = piece, (cuts, sizes)
            if exchange.into is not None:
                lane, at = exchange.into
                piece, _, _, sizes = self.incoming[lane].passages[at]
                self.here_after[piece] = number + 1
                coming.append((exchange.src, (exchange.number, exchange.part, sizes[exchange.part])))
        self.expected = _together(coming)
        # Of a ring half may be lost to a gap at its end: PlaceRing.
        self.room = limit // 2
        self.tight = frozenset(dst for dst, nbytes in needed.items() if nbytes > self.room)
        self.messages_before = tuple(
            tuple(accumulate((len(passage.sizes) for passage in lane.passages), initial=0)) for lane in self.incoming
        )

    def _first_sum(self) -> int:
        """Number of the operation before which a sum beside the compute lane may be made, if all has come."""
        made = {step.piece: number + 1 for number, step in enumerate(self.compute) if not step.consumes}
        firsts = [max((made.get(term, 0) for term in lane[0].terms), default=0) for lane in self.sums if lane]
        return min(firsts, default=len(self.compute))

    def _number(self, piece: Piece) -> int:
        return self._numbers.setdefault(piece, len(self._numbers))

    def _lane(self, link: Link, lane: Sequence[Send | Receive], numbers: Sequence[int], limit: int) -> Lane:
        passages = []
        for op, told in zip(lane, numbers, strict=True):
            number = self._number(op.piece)
            itemsize = self.dtypes[number].itemsize
            cuts = tuple(message_cuts(self.nbytes[number] // itemsize, itemsize, limit))
            sizes = tuple((stop - start) * itemsize for start, stop in cuts)
            passages.append(Passage(number, told, cuts if len(cuts) > 1 else None, sizes))
        return Lane(link.peer, tuple(passages))


def _together(coming: Sequence[tuple[int, tuple[int, int, int]]]) -> list[tuple[tuple[int, ...], int, int, int]]:
    """(source, message) in the order in which they come -> (sources, number, part, bytes): what is alike of several sources
    together, as far as those of one source stay in their order."""
    groups: list[tuple[list[int], tuple[int, int, int]]] = []
    latest: dict[int, int] = {}  # source -> the last group that it is in
    for src, message in coming:
        at = next((at for at in range(latest.get(src, -1) + 1, len(groups)) if groups[at][1] == message), len(groups))
        if at == len(groups):
            groups.append(([], message))
        groups[at][0].append(src)
        latest[src] = at
    return [(tuple(sources), *message) for sources, message in groups]


def message_cuts(elements: int, itemsize: int, limit: int) -> list[tuple[int, int]]:
    """Element ranges of the messages that carry one piece over channels with room for `limit` bytes; at least one. Cuts are
    aligned."""
    if elements * itemsize <= max(limit // 2, min(limit, ALIGNMENT)):
        return [(0, elements)]
    step = max(limit // 4 // ALIGNMENT * ALIGNMENT, min(limit, ALIGNMENT)) // itemsize
    if step == 0:
        raise ValueError(f"messages of at most {limit} bytes cannot carry elements of {itemsize} bytes: raise inbox_bytes")
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def _rows(start: int, stop: int, of: int) -> slice:
    return ALL if stop - start == of else slice(start, stop)


def _given(problem: Problem, piece: Piece, rank: int) -> slice | None:
    """In the own shard of what is gathered; else in all rows that this rank sends, or sums up."""
    start, stop = piece.slice.start, piece.slice.stop
    if piece.origin != rank:
        return None
    if problem.collective != "all_gather":
        return slice(start, stop)
    base = sum(problem.sizes[:rank])
    return _rows(start - base, stop - base, problem.sizes[rank])


def _lands(problem: Problem, piece: Piece, rank: int, types: Types) -> slice | None:
    """In all rows, of what is gathered or summed up for all; in the own rows of a sum (the own partial, too, if it is of the
    sum's dtype); in the blocks for this rank, in the order of their sources. None: nowhere."""
    (origin, part), sizes = piece, problem.sizes
    start, stop = part.start, part.stop
    own_partial = origin == rank and part.owner == rank and types.own == types.total
    if problem.collective == "all_gather" or (problem.collective == "all_reduce" and (origin == TOTAL or own_partial)):
        return slice(start, stop)
    if problem.collective == "reduce_scatter":
        base = sum(sizes[:rank])
        return _rows(start - base, stop - base, sizes[rank]) if origin == TOTAL or own_partial else None
    if problem.collective == "all_to_all" and part.owner == rank:
        shift = sum(row[rank] for row in sizes[:origin]) - sum(sizes[origin][:rank])
        return slice(start + shift, stop + shift)
    return None


class Binder(dict[int, BoundProgram]):
    """A program over tensors of these rows, bound for every limit of a message that comes."""

    def __init__(self, program: Program, rows: tuple[Rows, ...]) -> None:
        super().__init__()
        self.program, self._rows = program, rows
        self._on_streams: dict[int, BoundProgram] = {}

    @functools.cached_property
    def largest(self) -> int:
        """Bytes of the largest piece that any rank sends; the same on all of them."""
        rows = {entry.tensor: math.prod(entry.shape) * max(dtype.itemsize for dtype in entry.types) for entry in self._rows}
        found = 0
        for problem in self.program.problems:
            sizes = [part.size for by_owner in problem.slices_by_source for parts in by_owner for part in parts]
            found = max(found, rows[problem.tensor] * max(sizes, default=0))
        return found

    def on_streams(self, limit: int) -> BoundProgram:
        """For a stream-ordered transport. Raises ValueError for an order that streams do not exchange in."""
        found = self._on_streams.get(limit)
        if found is None:
            found = self._on_streams[limit] = BoundProgram(self.program, self._rows, limit, streams=True)
        return found

    def __missing__(self, limit: int) -> BoundProgram:
        bound = self[limit] = BoundProgram(self.program, self._rows, limit)
        return bound


binder = functools.lru_cache(maxsize=1024)(Binder)
