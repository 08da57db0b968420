"""Executes a program in which every piece goes straight to its owner, over a transport whose messages are told by words.

    current stream   own slices -> stagings | make | word | make | word | ... |slice 1's word: use |slice 2's word: use ...
    transport        own slices leave             |made 1 leaves |made 2 leaves ...

The messages of one number (groups.py) leave, arrive and are released by one call each, however many peers there are: what
grows with the ranks is a word for each slice, and the compute itself. What is made leaves when its word is written, in the
stream; the host hands all of a group over at once, when the last one is enqueued.

A sum waits for all its terms at once. All else, the order of the compute lane included, is streams.py's.
"""

from __future__ import annotations

from typing import Any

import torch

from commfuse_dp.collectives.bound import ALL
from commfuse_dp.collectives.execution import NO_LIMIT, Execution, sending_of, tag_of
from commfuse_dp.device.base import WordLike, as_int32
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, Sending
from commfuse_dp.transport.streams.words import WordTransport


class DirectExecution(Execution):
    """The program is bound for streams, and has groups."""

    _transport: WordTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._bound.groups is not None and self._transport.device is not None
        self._groups, self._on = self._bound.groups, self._transport.device
        self._unsent = list(range(len(self._groups.leaving)))
        self._made: dict[int, list[Sending]] = {}  # of groups that are being made
        self._reserved: dict[int, torch.Tensor] = {}  # piece -> where it is made
        self._arriving: dict[int, tuple[torch.Tensor, WordLike]] = {}  # pieces that are received, but not waited for
        self._inside: set[int] = set()  # pieces in the inbox that have come
        self._needed = [len(group.pieces) for group in self._groups.arriving]  # pieces that are there, or will be

    def run(self) -> None:
        for srcs, number, part, nbytes in self._bound.expected:
            self._transport.expect(srcs, self._tag(number, part), nbytes)
        super().run()

    def _tag(self, number: int, part: int = 0) -> Any:
        return tag_of((CHANNEL_COLLECTIVE, self._call, number, part))

    def _drain(self) -> None:
        assert not self._unsent, "a group has not left"

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _give_out(self) -> None:
        """Send the groups of which every piece is here, and not made where it leaves from."""
        bound, tensors, transport = self._bound, self._tensors, self._transport
        for at in tuple(self._unsent):
            dsts, number, pieces, sizes = self._groups.leaving[at]
            if any(tensors[piece] is None for piece in pieces):
                continue
            self._unsent.remove(at)
            tag, sendings = self._tag(number), []
            for dst, piece, message in zip(dsts, pieces, transport.reserve(dsts, sizes), strict=True):
                tensor = tensors[piece]
                assert tensor is not None
                transport.shaped(message, tensor.dtype, bound.shapes[piece]).copy_(tensor)
                sendings.append(sending_of((dst, tag, message, None, 0)))
            transport.send(sendings)
            self._used(pieces)

    def _reserve_next(self, piece: int, *, patient: bool) -> torch.Tensor | None:
        found = self._reserved.pop(piece, None)
        if found is None:
            dsts, _, pieces, sizes = self._groups.leaving[self._groups.leaves_in[piece]]
            self._reserved.update(zip(pieces, self._transport.reserve(dsts, sizes), strict=True))
            found = self._reserved.pop(piece)
        return found

    def _deliver(self, piece: int, message: torch.Tensor) -> None:
        groups, transport = self._groups, self._transport
        at = groups.leaves_in[piece]
        dsts, number, pieces, _ = groups.leaving[at]
        word = transport.own_words(len(groups.words)), groups.words[piece], as_int32(self._call + 1)
        self._on.write_value(self._on.current_stream(), *word)
        made = self._made.setdefault(at, [])
        made.append(sending_of((dsts[pieces.index(piece)], self._tag(number), message, word, 0)))
        if len(made) == len(pieces):
            transport.send(made)
            self._unsent.remove(at)

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _take(self, lane: int | None, until: int = -1, most: int = NO_LIMIT) -> torch.Tensor | None:
        bound, transport, tensors = self._bound, self._transport, self._tensors
        timing = transport.probe.timing
        start = timing.mark() if timing is not None else None
        found = self._arriving.pop(until, None)
        if found is None:
            sources, number, pieces, summed = self._groups.arriving[self._groups.arrives_in[until]]
            if summed:
                self._inside.update(pieces)
                for piece, message in zip(pieces, transport.receive(sources, self._tag(number)), strict=True):
                    tensors[piece] = transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
            else:
                messages, words = transport.arriving(sources, self._tag(number))
                self._arriving.update(zip(pieces, zip(messages, words, strict=True), strict=True))
                found = self._arriving.pop(until)
        if found is not None:
            message, (pad, place, value) = found
            self._on.wait_value(self._on.current_stream(), pad, place, value, exact=True)
            tensors[until] = self._landed(until, message)
        if timing is not None and start is not None:
            timing.waited(self._name, start)
        return tensors[until]

    def _landed(self, piece: int, message: torch.Tensor) -> torch.Tensor:
        bound = self._bound
        self._inside.add(piece)
        tensor = self._transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
        whole, at = self._bindings[bound.tensor[piece]].target, bound.lands[piece]
        if whole is None or at is None:
            return tensor
        target = whole if at is ALL else whole[at]
        target.view(-1).copy_(tensor.view(-1))
        self._leave(piece)
        return target

    def _used(self, pieces: tuple[int, ...]) -> None:
        uses, inside = self._uses, self._inside
        for piece in pieces:
            left = uses[piece] = uses[piece] - 1
            if not left:
                self._tensors[piece] = None
                if piece in inside:
                    self._leave(piece)

    def _leave(self, piece: int) -> None:
        """It is not needed in the inbox any more. The last one of a group gives the places of all of them back."""
        self._inside.discard(piece)
        at = self._groups.arrives_in[piece]
        left = self._needed[at] = self._needed[at] - 1
        if not left:
            sources, number, *_ = self._groups.arriving[at]
            self._transport.release(sources, self._tag(number), more=True)
