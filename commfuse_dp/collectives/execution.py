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

[Note: When to look]
Between two operations of the compute lane this rank looks for what has come only where that moves something on: pieces that are
passed on or put together from several messages, sums beside the lane once their own terms are made, what had no room, and
transports that move bytes only while they are called. Else a message is looked for when its turn has come, for each look is a
call of the system.

[Note: Other streams]
Two ranks that wait here for each other may each be what a rank of another group waits for (data parallelism over tensor
parallelism). So whoever waits here also does what other communication of this process has to do for its peers: see progress.py.

[Note: Copies]
pairwise all-gather: shard -> peer's inbox -> consume (in place), or -> the rows of the result.
pairwise reduce-scatter: produce writes straight into the owner's inbox if there is room; the owner sums from there.
A piece that is larger than half a channel is cut into messages of a quarter, which are put together on arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.bound import ALL, BoundProgram, Owner, Step
from commfuse_dp.collectives.steps import steps_of
from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.device.base import WordLike
from commfuse_dp.errors import MismatchError, Where
from commfuse_dp.probe import now_ns
from commfuse_dp.program.operations import TOTAL
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Sending, Tag, Transport
from commfuse_dp.transport.waiting import wait_until

# Produced pieces kept in memory of this rank because their channels are full; with more, production waits for credit.
BACKLOG_PIECES = 2
NO_LIMIT = 1 << 62  # of messages, in a world of one rank: there are none
_NO_CREDIT = "to take in what was sent to it (no credit)"

ConsumeFn = Callable[[Owner, torch.Tensor], object]
ProduceFn = Callable[[Owner, torch.Tensor], object]

# Of all their fields in a row. A named tuple's own constructor is a frame of Python, of which every message would cost two.
tag_of: Callable[[tuple[int, int, int, int]], Tag] = partial(tuple.__new__, Tag)
sending_of: Callable[[tuple[int, Tag, torch.Tensor, Sequence[WordLike], int]], Sending] = partial(tuple.__new__, Sending)


class Coming(NamedTuple):
    """A piece that is gathered. word: when it is here (its value, exactly); None: it is."""

    owner: Owner
    rows: torch.Tensor
    word: WordLike | None


class Leaving(NamedTuple):
    """A piece to be made. sent: to another rank, once its words are written."""

    owner: Owner
    out: torch.Tensor
    sent: bool


# Uses all of them, behind their words: waits by itself, in kernels, and returns True; or by the function that it is given,
# which has the current stream wait.
ConsumeAll = Callable[[Sequence[Coming], Callable[[WordLike], None]], bool]
# Makes all of them in their order; those that are sent each with words, which are to hold `value` (at least: cyclic) behind it.
# Returns the words of each piece; () stands for what is in the current stream.
ProduceAll = Callable[[Sequence[Leaving], int], Sequence[Sequence[WordLike]]]


class Bindings(NamedTuple):
    """What the pieces of one problem's tensor are made of in one run.

    given: the own shard of what is gathered; else all rows that this rank sends or that are summed up, in place of `produce`.
    target: contiguous, where pieces end up: all rows of what is gathered, or summed up for all ranks; the own rows of sums; the
        blocks that all ranks send to this one. None: they only pass through.
    divisor: of sums over all ranks.
    consume_all, produce_all: in place of `consume` and `produce`, where messages are told by words (direct.py); what is made
        comes before what is used.
    """

    given: torch.Tensor | None = None
    target: torch.Tensor | None = None
    produce: ProduceFn | None = None
    consume: ConsumeFn | None = None
    divisor: float | None = None
    consume_all: ConsumeAll | None = None
    produce_all: ProduceAll | None = None


class Execution:
    """One run of a program on one rank. `transport` may be None in a world of one rank.

    name: what it is, in errors and measurements. bindings: of every problem's tensor, in the order of the rows that the program
    is bound to. call: number of this run among those over the transport, the same on all ranks."""

    def __init__(
        self,
        name: str,
        bound: BoundProgram,
        bindings: Sequence[Bindings],
        device: torch.device,
        transport: Transport | None,
        call: int,
    ) -> None:
        self._name = name
        self._bound = bound
        self._bindings = bindings
        self._device = device
        self._transport: Transport = transport  # type: ignore[assignment]  # of a world of one rank it is not asked
        self._call = call
        self._uses = bound.uses.copy()
        self._tensors: list[torch.Tensor | None] = [None] * bound.count
        self._held: dict[int, tuple[int, Tag]] = {}  # pieces that lie in the inbox
        self._backlog: set[int] = set()
        # By lane: passages that are over, messages of the next one that are, and what it is put together in.
        outgoing, incoming, sums = bound.lanes
        self._sent, self._sent_parts = [0] * outgoing, [0] * outgoing
        self._received, self._received_parts = [0] * incoming, [0] * incoming
        self._targets: list[torch.Tensor | None] = [None] * incoming
        self._summed = [0] * sums
        self._stuck = False  # something is ready for which there was no room

    def run(self) -> None:
        """Raises DeadlineError or PeerLostError (naming the peer and the slice), MismatchError, or what a callback raises."""
        bound, transport, tensors, uses = self._bound, self._transport, self._tensors, self._uses
        for piece in bound.own:
            shard, at = self._bindings[bound.tensor[piece]].given, bound.given[piece]
            assert shard is not None and at is not None
            tensors[piece] = shard if at is ALL else shard[at]
        looks_from = bound.looks_from  # see [Note: When to look]
        if transport is None or not (transport.in_place or bound.streams) or transport.hosts is not None:
            looks_from = 0
        if looks_from and bound.own:
            self._give_out()
        for number, step in enumerate(self._steps()):
            if number >= looks_from or self._stuck:
                self._pump()
                if bound.sums:
                    self._advance()
            if not step.consumes:
                self._make(step)
                continue
            piece = step.piece
            tensor = tensors[piece]
            if tensor is None:
                tensor = self._take(bound.lane_of.get(piece), piece)
                assert tensor is not None
            consume = self._bindings[bound.tensor[piece]].consume
            if consume is not None:
                assert step.owner is not None
                consume(step.owner, tensor)
            tensor = None  # its memory is free for the next operation
            if uses[piece] > 1:
                uses[piece] -= 1
            else:
                self._used(step.terms)
        if self._sent != bound.passages_out or self._summed != bound.sums_of:
            self._drain()

    def _steps(self) -> Sequence[Step]:
        """What is computed, in order."""
        return self._bound.compute

    # ---- compute lane ------------------------------------------------------------------------------------------------
    def _make(self, step: Step, *, patient: bool = True) -> None:
        """Produce a piece, or sum it up. patient: it may wait, for its terms and for room where it goes."""
        piece, _, owner, terms, own, wide = step
        bound, tensors, transport = self._bound, self._tensors, self._transport
        given, target, produce, _, divisor, *_ = self._bindings[bound.tensor[piece]]
        at, buffer, inbox = bound.given[piece], None, None
        if owner is not None and given is not None:
            assert at is not None
            buffer = given[at].to(bound.dtypes[piece])
        else:
            for term in terms:
                if tensors[term] is None:
                    self._take(bound.lane_of.get(term), term)
            at = bound.lands[piece]
            if target is not None and at is not None:
                buffer = target if at is ALL else target[at]
            elif piece in bound.only_to:
                inbox = self._reserve_next(piece, patient=patient)
                if inbox is not None:
                    buffer = transport.shaped(inbox, bound.dtypes[piece], bound.shapes[piece])
            if buffer is None:
                buffer = self._scratch(piece)
            if owner is not None:
                assert produce is not None
                produce(owner, buffer)
            else:
                partials: list[torch.Tensor] = [*map(tensors.__getitem__, terms)]  # type: ignore[list-item]
                out = buffer
                if given is not None:  # by the user, who may have given anything
                    wide = None
                elif wide is not None:  # this rank's own, or in the inbox; those of others are flat: see `BoundProgram.shapes`
                    out, partials[own] = buffer.view(-1), partials[own].view(-1)
                divisor = divisor if bound.pieces[piece].origin == TOTAL else None
                sum_in_rank_order(out, partials, own_rank=own, scale_divisor=divisor, wide=wide)
                self._used(terms)
        if inbox is not None:
            self._deliver(piece, inbox)
        elif self._uses[piece]:
            tensors[piece] = buffer
            if piece in bound.sent:
                self._give_out()

    def _deliver(self, piece: int, message: torch.Tensor) -> None:
        """Send a piece that is made in the peer's inbox."""
        transport, lane = self._transport, self._bound.only_to[piece]
        peer, passages = self._bound.outgoing[lane]
        tag = tag_of((CHANNEL_COLLECTIVE, self._call, passages[self._sent[lane]].number, 0))
        transport.send((sending_of((peer, tag, message, (), 0)),))
        self._sent[lane] += 1
        if self._backlog:  # the lane's next piece may have waited for this one
            self._stuck = True

    def _advance(self) -> None:
        """Make the sums beside the compute lane whose terms are all here. Never blocks."""
        bound, summed = self._bound, self._summed
        for number, lane in enumerate(bound.sums):
            while (at := summed[number]) < bound.sums_of[number] and self._missing(lane[at]) < 0:
                summed[number] = at + 1
                self._make(lane[at], patient=False)

    def _missing(self, step: Step) -> int:
        """A term of a sum that is not here; -1: all are."""
        for term in step.terms:
            if self._tensors[term] is None:
                return term
        return -1

    # ---- pieces ------------------------------------------------------------------------------------------------------
    def _next_to(self, lane: int) -> int:
        """The piece that a lane sends next."""
        return self._bound.outgoing[lane].passages[self._sent[lane]].piece

    def _reserve_next(self, piece: int, *, patient: bool) -> torch.Tensor | None:
        """Room in the peer's inbox if the piece is the next to be sent there; None: it is in the backlog now."""
        transport, lane, backlog = self._transport, self._bound.only_to[piece], self._backlog
        peer, passages = self._bound.outgoing[lane]
        while True:
            if passages[self._sent[lane]].piece != piece:
                self._pump()
            if passages[self._sent[lane]].piece == piece:
                found = transport.reserve((peer,), (self._bound.nbytes[piece],))
                if found:
                    return found[0]
            if not patient or len(backlog) < BACKLOG_PIECES:
                break
            self._wait(lambda: len(backlog) < BACKLOG_PIECES, peer, piece, _NO_CREDIT)
            patient = False
        backlog.add(piece)
        return None

    def _used(self, pieces: tuple[int, ...]) -> None:
        for piece in pieces:
            left = self._uses[piece] = self._uses[piece] - 1
            if left:
                continue
            self._tensors[piece] = None
            if piece in self._held:
                source, tag = self._held.pop(piece)
                self._transport.release((source,), tag, more=True)
            elif self._backlog:
                self._backlog.discard(piece)

    def _scratch(self, piece: int) -> torch.Tensor:
        return torch.empty(self._bound.shapes[piece], dtype=self._bound.dtypes[piece], device=self._device)

    # ---- send and receive lanes --------------------------------------------------------------------------------------
    def _pump(self) -> None:
        """Take in what has arrived and send what is ready, as far as it goes without waiting."""
        for lane, count in enumerate(self._bound.passages_in):
            if self._received[lane] < count:
                self._take(lane)
        self._stuck = False
        if self._sent != self._bound.passages_out:
            self._give_out()

    def _take(self, lane: int | None, until: int = -1, most: int = NO_LIMIT) -> torch.Tensor | None:
        """Receive messages of a lane for as long as there are some, at most so many. until: or until this piece is complete,
        which is waited for (lane None: until it is made). Other lanes are looked at only in the wait: a look costs a call."""
        bound, transport, received = self._bound, self._transport, self._received
        if lane is None:
            return self._await(until)
        (source, passages), count = bound.incoming[lane], bound.passages_in[lane]
        while (at := received[lane]) < count and most:
            most -= 1
            piece, number, cuts, sizes = passages[at]
            part = self._received_parts[lane]
            tag = tag_of((CHANNEL_COLLECTIVE, self._call, number, part))
            came = transport.receive((source,), tag, wait=False)
            if not came:
                break
            message = came[0]
            if message.numel() != sizes[part]:
                here, there = map(transport.membership.called, (bound.rank, source))
                raise MismatchError(
                    f"rank {here}, {self._name}: {self._where(piece).slice} came from rank {there} in a message "
                    f"of {message.numel()} bytes instead of {sizes[part]}. All ranks must call the same collective "
                    "with the same sizes, row shape, dtypes, order and slices_per_rank."
                )
            target = self._targets[lane]
            if target is None:
                whole, lands = self._bindings[bound.tensor[piece]].target, bound.lands[piece]
                if whole is not None and lands is not None:
                    target = whole if lands is ALL else whole[lands]
                elif cuts is not None:
                    target = self._scratch(piece)
            if target is None:
                self._held[piece] = (source, tag)
                target = transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
            else:
                flat = target.view(-1)
                (flat if cuts is None else flat[slice(*cuts[part])]).copy_(message.view(target.dtype))
                transport.release((source,), tag)
                complete = part + 1 == len(sizes)
                self._targets[lane], self._received_parts[lane] = (None, 0) if complete else (target, part + 1)
                if not complete:
                    continue
            self._tensors[piece] = target
            received[lane] = at + 1
            if piece == until:
                return target
        return self._await(until) if until >= 0 else None

    def _give_out(self) -> None:
        """Send what is ready."""
        bound, transport, sent = self._bound, self._transport, self._sent
        self._stuck = False
        for lane, (peer, passages) in enumerate(bound.outgoing):
            while (at := sent[lane]) < bound.passages_out[lane]:
                piece, number, cuts, sizes = passages[at]
                tensor, part = self._tensors[piece], self._sent_parts[lane]
                if tensor is None:
                    break
                found = transport.reserve((peer,), (sizes[part],))
                if not found:
                    self._stuck = True
                    break
                message = found[0]
                if cuts is None:
                    transport.shaped(message, tensor.dtype, bound.shapes[piece]).copy_(tensor)
                else:
                    message.view(tensor.dtype).copy_(tensor.reshape(-1)[slice(*cuts[part])])
                tag = tag_of((CHANNEL_COLLECTIVE, self._call, number, part))
                transport.send((sending_of((peer, tag, message, (), 0)),))
                if cuts is not None and part + 1 < len(cuts):
                    self._sent_parts[lane] = part + 1
                    continue
                sent[lane], self._sent_parts[lane] = at + 1, 0
                if self._uses[piece] > 1:
                    self._uses[piece] -= 1
                else:
                    self._used((piece,))

    def _evict(self) -> None:
        """Give credit back to senders that have more to send: see the note on deadlocks."""
        if not self._held:
            return
        lanes = enumerate(self._bound.incoming)
        more = {lane.peer for number, lane in lanes if self._received[number] < len(lane.passages)}
        self._move_out(more)

    def _move_out(self, sources: set[int]) -> None:
        """Of the inbox: what has come from these ranks and is still needed."""
        for piece, (source, tag) in list(self._held.items()):
            tensor = self._tensors[piece]
            if source in sources and tensor is not None:
                self._tensors[piece] = tensor.clone()
                del self._held[piece]
                self._transport.release((source,), tag)

    # ---- waiting -----------------------------------------------------------------------------------------------------
    def _await(self, piece: int) -> torch.Tensor:
        tensors, source = self._tensors, self._bound.source
        while (tensor := tensors[piece]) is None:
            term = self._term_for(piece)
            if term < 0:
                self._advance()
                continue

            def come(term: int = term) -> bool:
                return tensors[term] is not None or tensors[piece] is not None

            self._wait(come, source.get(term, -1), term)
        return tensor

    def _term_for(self, piece: int) -> int:
        """The piece that must come first for this one; -1: none, it can be made."""
        for number, lane in enumerate(self._bound.sums):
            if any(step.piece == piece for step in lane[self._summed[number] :]):
                return self._missing(lane[self._summed[number]])
        return piece

    def _drain(self) -> None:
        """Until all sums are made, and everything owed to others has left. What comes from others has been consumed before."""
        self._pump()
        self._advance()
        for number, lane in enumerate(self._bound.sums):
            while (at := self._summed[number]) < len(lane):
                missing = self._missing(lane[at])
                if missing < 0:  # another lane's sum was the last of its terms
                    self._advance()
                    continue

                def made(number: int = number, at: int = at) -> bool:
                    return self._summed[number] > at

                self._wait(made, self._bound.source.get(missing, -1), missing)
        for number, (peer, passages) in enumerate(self._bound.outgoing):
            if self._sent[number] < len(passages):

                def left(number: int = number, count: int = len(passages)) -> bool:
                    return self._sent[number] == count

                self._wait(left, peer, self._next_to(number), _NO_CREDIT)

    def _wait(self, ready: Callable[[], bool], peer: int, piece: int, doing: str = "") -> None:
        """doing: what the peer has to do; "": to send the piece."""
        transport, where = self._transport, self._where(piece)
        doing = doing or f"to send {where.slice}"
        others, steps = progress.callbacks(), steps_of(transport)

        def pumped() -> bool:
            self._evict()
            self._pump()
            self._advance()
            if ready():
                return True
            if steps is not None:
                steps.heed(peer, where, doing, come)
            for make_progress in others:
                make_progress()
            return False

        def come() -> bool:
            self._pump()
            self._advance()
            return ready()

        start = now_ns()
        with progress.looking_often(transport, others):
            wait_until(transport, pumped, peer=peer, where=where, doing=doing)
        transport.probe.exposed(self._name, start, now_ns())

    def _where(self, piece: int) -> Where:
        name = self._bound.pieces[piece].told(self._transport.membership.called)
        return Where(self._name, self._call, name, self._bound.nbytes[piece])
