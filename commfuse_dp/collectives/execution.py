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

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from commfuse_dp.collectives import progress
from commfuse_dp.collectives.bound import Owner, Passage, Rows, Step, Types, bind
from commfuse_dp.collectives.steps import steps_of
from commfuse_dp.collectives.summation import sum_in_rank_order
from commfuse_dp.errors import MismatchError, Where
from commfuse_dp.probe import now_ns
from commfuse_dp.program.layout import Tensor
from commfuse_dp.program.operations import TOTAL, Piece, Program
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Sending, Tag, Transport
from commfuse_dp.transport.waiting import wait_until

# Produced pieces kept in memory of this rank because their channels are full; with more, production waits for credit.
BACKLOG_PIECES = 2
_NO_LIMIT = 1 << 62  # of messages, in a world of one rank: there are none
_NO_CREDIT = "to take in what was sent to it (no credit)"

ConsumeFn = Callable[[Owner, torch.Tensor], object]
ProduceFn = Callable[[Owner, torch.Tensor], object]


def nothing_yet(_piece: Piece) -> torch.Tensor | None:
    """`data` of what a callback makes; `landing` of what only passes through."""
    return None


class Bindings(NamedTuple):
    """What the pieces of one problem's tensor are made of.

    row_shape: shape of one row.
    data: a piece's tensor where it exists already (own shard, produced tensors), else None.
    landing: where a piece is to end up, of the piece's shape, contiguous; None: it only passes through.
    """

    row_shape: tuple[int, ...]
    types: Types
    data: Callable[[Piece], torch.Tensor | None] = nothing_yet
    landing: Callable[[Piece], torch.Tensor | None] = nothing_yet
    produce: ProduceFn | None = None
    consume: ConsumeFn | None = None
    divisor: float | None = None


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
        self._device = device
        self._transport = transport
        self._call = call
        rows = tuple([Rows(tensor, binding.row_shape, binding.types) for tensor, binding in bindings.items()])
        bound = self._bound = bind(program, rows, transport.message_limit if transport is not None else _NO_LIMIT)
        made_of = tuple(bindings.values())
        self._bindings = [made_of[tensor] for tensor in bound.tensor]  # by piece
        self._tensors: list[torch.Tensor | None] = [None] * len(bound.pieces)
        self._uses = list(bound.uses)
        self._held: dict[int, tuple[int, Tag]] = {}  # pieces that lie in the inbox
        self._backlog: set[int] = set()
        # By lane: passages that are over, messages of the next one that are, and what it is put together in.
        self._sent, self._received = [0] * len(bound.outgoing), [0] * len(bound.incoming)
        self._sent_parts, self._received_parts = self._sent.copy(), self._received.copy()
        self._targets: list[torch.Tensor | None] = [None] * len(bound.incoming)
        self._summed = [0] * len(bound.sums)
        self._stuck = False  # something is ready for which there was no room

    def run(self) -> None:
        """Raises DeadlineError or PeerLostError (naming the peer and the slice), MismatchError, or what a callback raises."""
        bound, transport = self._bound, self._transport
        for piece in bound.own:
            self._tensors[piece] = self._bindings[piece].data(bound.pieces[piece])
        if transport is not None and transport.device is not None:
            self._announce(transport)
        looks_from = bound.looks_from  # see [Note: When to look]
        if transport is None or not transport.in_place or transport.hosts is not None:
            looks_from = 0
        if looks_from:
            self._give_out()
        for number, step in enumerate(bound.compute):
            if number >= looks_from or self._stuck:
                self._pump()
                if bound.sums:
                    self._advance()
            if step.consumes:
                self._consume(step)
            elif step.owner is not None:
                self._produce(step, step.owner)
            else:
                self._reduce(step)
        self._drain()

    # ---- compute lane ------------------------------------------------------------------------------------------------
    def _produce(self, step: Step, owner: Owner) -> None:
        piece = step.piece
        bindings = self._bindings[piece]
        if bindings.data is not nothing_yet:
            ready = bindings.data(self._bound.pieces[piece])
            if ready is not None:
                self._tensors[piece] = ready
                self._give_out()
                return
        assert bindings.produce is not None
        buffer, inbox = self._room(piece)
        bindings.produce(owner, buffer)
        self._made(piece, buffer, inbox)

    def _reduce(self, step: Step, *, patient: bool = True) -> None:
        """patient: it may wait, for its terms and for room where the sum goes."""
        tensors, piece = self._tensors, step.piece
        for term in step.terms:
            if tensors[term] is None:
                self._await(term)
        buffer, inbox = self._room(piece, patient=patient)
        divisor = self._bindings[piece].divisor if self._bound.pieces[piece].origin == TOTAL else None
        terms = [self._here(term) for term in step.terms]  # only now: a wait may have moved them
        sum_in_rank_order(buffer, terms, own_rank=step.own, scale_divisor=divisor)
        for term in step.terms:
            self._used(term)
        self._made(piece, buffer, inbox)

    def _advance(self) -> None:
        """Make the sums beside the compute lane whose terms are all here. Never blocks."""
        for number, lane in enumerate(self._bound.sums):
            while self._summed[number] < len(lane) and not self._missing(lane[self._summed[number]]):
                self._summed[number] += 1
                self._reduce(lane[self._summed[number] - 1], patient=False)

    def _missing(self, step: Step) -> list[int]:
        """Terms of a sum that are not here."""
        return [piece for piece in step.terms if self._tensors[piece] is None]

    def _consume(self, step: Step) -> None:
        piece = step.piece
        tensor, consume = self._tensors[piece], self._bindings[piece].consume
        if tensor is None:
            tensor = self._await(piece)
        if consume is not None:
            assert step.owner is not None
            consume(step.owner, tensor)
        self._used(piece)

    # ---- pieces ------------------------------------------------------------------------------------------------------
    def _room(self, piece: int, *, patient: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(buffer to compute the piece into, the inbox message it is or None)."""
        bound, transport = self._bound, self._transport
        landing = self._bindings[piece].landing(bound.pieces[piece])
        if landing is not None:
            return landing, None
        lane = bound.only_to.get(piece)
        if lane is not None:
            inbox = self._reserve_next(lane, piece)
            if inbox is None and patient and len(self._backlog) >= BACKLOG_PIECES:
                peer = bound.outgoing[lane].peer
                self._wait(lambda: len(self._backlog) < BACKLOG_PIECES, peer, piece, _NO_CREDIT)
                inbox = self._reserve_next(lane, piece)
            if inbox is not None:
                assert transport is not None
                return transport.shaped(inbox, bound.dtypes[piece], bound.shapes[piece]), inbox
            self._backlog.add(piece)
        return self._scratch(piece), None

    def _next_to(self, lane: int) -> int:
        """The piece that a lane sends next."""
        return self._bound.outgoing[lane].passages[self._sent[lane]].piece

    def _reserve_next(self, lane: int, piece: int) -> torch.Tensor | None:
        """Room in the peer's inbox if the piece is the next to be sent there."""
        peer, passages = self._bound.outgoing[lane]
        if passages[self._sent[lane]].piece != piece:
            self._pump()
            if self._next_to(lane) != piece:
                return None
        assert self._transport is not None
        found = self._transport.reserve((peer,), (self._bound.nbytes[piece],))
        return found[0] if found else None

    def _made(self, piece: int, buffer: torch.Tensor, inbox: torch.Tensor | None) -> None:
        if inbox is not None:
            assert self._transport is not None
            lane = self._bound.only_to[piece]
            peer, passages = self._bound.outgoing[lane]
            tag = Tag(CHANNEL_COLLECTIVE, self._call, passages[self._sent[lane]].number)
            self._transport.send((Sending(peer, tag, inbox),))
            self._sent[lane] += 1
            if self._backlog:  # the lane's next piece may have waited for this one
                self._stuck = True
        elif self._uses[piece]:
            self._tensors[piece] = buffer
            self._give_out()

    def _used(self, piece: int) -> None:
        left = self._uses[piece] = self._uses[piece] - 1
        if left:
            return
        self._tensors[piece] = None
        self._backlog.discard(piece)
        held = self._held.pop(piece, None)
        if held is not None:
            assert self._transport is not None
            source, tag = held
            self._transport.release((source,), tag, more=True)

    def _scratch(self, piece: int) -> torch.Tensor:
        return torch.empty(self._bound.shapes[piece], dtype=self._bound.dtypes[piece], device=self._device)

    # ---- send and receive lanes --------------------------------------------------------------------------------------
    def _announce(self, transport: Transport) -> None:
        """Stream-ordered transports find messages by that."""
        for peer, passages in self._bound.incoming:
            for passage in passages:
                for part, nbytes in enumerate(passage.sizes):
                    transport.expect((peer,), Tag(CHANNEL_COLLECTIVE, self._call, passage.number, part), nbytes)

    def _pump(self) -> None:
        """Take in what has arrived and send what is ready, as far as it goes without waiting."""
        for lane, (_, passages) in enumerate(self._bound.incoming):
            while self._received[lane] < len(passages) and self._take(lane):
                pass
        self._give_out()

    def _take(self, lane: int) -> bool:
        """Receive messages of a lane's next piece; True once it is complete."""
        source, passages = self._bound.incoming[lane]
        at, transport = self._received[lane], self._transport
        assert transport is not None
        piece, number, cuts, sizes = passages[at]
        target = self._targets[lane]
        while (part := self._received_parts[lane]) < len(cuts):
            tag = Tag(CHANNEL_COLLECTIVE, self._call, number, part)
            came = transport.receive((source,), tag, wait=False)
            if not came:
                return False
            message = came[0]
            if message.numel() != sizes[part]:
                here, there = map(transport.membership.called, (self._bound.rank, source))
                raise MismatchError(
                    f"rank {here}, {self._name}: {self._where(piece).slice} came from rank {there} in a message "
                    f"of {message.numel()} bytes instead of {sizes[part]}. All ranks must call the same collective "
                    "with the same sizes, row shape, dtypes, order and slices_per_rank."
                )
            if target is None and (landing := self._bindings[piece].landing) is not nothing_yet:
                target = landing(self._bound.pieces[piece])
            if target is None and len(cuts) == 1:
                self._held[piece] = (source, tag)
                target = transport.shaped(message, self._bound.dtypes[piece], self._bound.shapes[piece])
                break
            if target is None:
                target = self._scratch(piece)
            self._targets[lane] = target
            start, stop = cuts[part]
            target.view(-1)[start:stop].copy_(message.view(target.dtype))
            transport.release((source,), tag)
            self._received_parts[lane] += 1
        self._tensors[piece] = target
        self._received[lane], self._received_parts[lane], self._targets[lane] = at + 1, 0, None
        return True

    def _give_out(self) -> None:
        """Send what is ready."""
        self._stuck = False
        for lane, (peer, passages) in enumerate(self._bound.outgoing):
            while (at := self._sent[lane]) < len(passages):
                passage = passages[at]
                tensor = self._tensors[passage.piece]
                if tensor is None:
                    break
                if not self._give(lane, peer, passage, tensor):
                    self._stuck = True
                    break
                self._sent[lane], self._sent_parts[lane] = at + 1, 0
                self._used(passage.piece)

    def _give(self, lane: int, to: int, passage: Passage, tensor: torch.Tensor) -> bool:
        """Send messages of a piece; True once it has left."""
        transport = self._transport
        assert transport is not None
        if len(passage.cuts) == 1:
            found = transport.reserve((to,), passage.sizes)
            if found:
                transport.shaped(found[0], tensor.dtype, self._bound.shapes[passage.piece]).copy_(tensor)
                transport.send((Sending(to, Tag(CHANNEL_COLLECTIVE, self._call, passage.number), found[0]),))
            return bool(found)
        flat = tensor.reshape(-1)
        while (part := self._sent_parts[lane]) < len(passage.cuts):
            found = transport.reserve((to,), (passage.sizes[part],))
            if not found:
                return False
            start, stop = passage.cuts[part]
            found[0].view(flat.dtype).copy_(flat[start:stop])
            transport.send((Sending(to, Tag(CHANNEL_COLLECTIVE, self._call, passage.number, part), found[0]),))
            self._sent_parts[lane] += 1
        return True

    def _evict(self) -> None:
        """Give credit back to senders that have more to send: see the note on deadlocks."""
        if not self._held:
            return
        lanes = enumerate(self._bound.incoming)
        more = {lane.peer for number, lane in lanes if self._received[number] < len(lane.passages)}
        for piece, (source, tag) in list(self._held.items()):
            tensor = self._tensors[piece]
            if source in more and tensor is not None:
                assert self._transport is not None
                self._tensors[piece] = tensor.clone()
                del self._held[piece]
                self._transport.release((source,), tag)

    # ---- waiting -----------------------------------------------------------------------------------------------------
    def _await(self, piece: int) -> torch.Tensor:
        lane = self._bound.lane_of.get(piece)
        if lane is not None:  # not all lanes: to ask what has not come costs more than to ask for it when it is needed
            while self._tensors[piece] is None and self._take(lane):
                pass
        if self._tensors[piece] is None:
            self._wait(lambda: self._tensors[piece] is not None, self._bound.source[piece], piece)
        return self._here(piece)

    def _here(self, piece: int) -> torch.Tensor:
        tensor = self._tensors[piece]
        assert tensor is not None
        return tensor

    def _drain(self) -> None:
        """Until all sums are made, and everything owed to others has left. What comes from others has been consumed before."""
        bound = self._bound
        if self._sent == bound.passages_out and not bound.sums:
            return
        self._pump()
        self._advance()
        for number, lane in enumerate(self._bound.sums):
            while (at := self._summed[number]) < len(lane):
                missing = self._missing(lane[at])
                if not missing:  # another lane's sum was the last of its terms
                    self._advance()
                    continue

                def made(number: int = number, at: int = at) -> bool:
                    return self._summed[number] > at

                self._wait(made, self._bound.source.get(missing[0], -1), missing[0])
        for number, (peer, passages) in enumerate(self._bound.outgoing):
            if self._sent[number] < len(passages):

                def left(number: int = number, count: int = len(passages)) -> bool:
                    return self._sent[number] == count

                self._wait(left, peer, self._next_to(number), _NO_CREDIT)

    def _wait(self, ready: Callable[[], bool], peer: int, piece: int, doing: str = "") -> None:
        """doing: what the peer has to do; "": to send the piece."""
        transport, where = self._transport, self._where(piece)
        assert transport is not None
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
        assert self._transport is not None
        name = self._bound.pieces[piece].told(self._transport.membership.called)
        return Where(self._name, self._call, name, self._bound.nbytes[piece])
