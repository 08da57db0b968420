"""Executes a program in which every piece goes straight to its owner, over a transport whose messages are told by words.

    current stream   own slices -> stagings | make | word | make | word | ... |slice 1's word: use |slice 2's word: use ...
    transport        own slices leave             |made 1 leaves |made 2 leaves ...

The messages of one number (groups.py) leave, arrive and are released by one call each, however many peers there are: what
grows with the ranks is a word for each slice, and the compute itself. What is made leaves when its word is written, in the
stream; the host hands all of a group over at once, when the last one is enqueued.

A sum waits for all its terms at once. All else, the order of the compute lane included, is streams.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from commfuse_dp.collectives.bound import ALL, Step
from commfuse_dp.collectives.execution import (
    NO_LIMIT,
    Coming,
    ConsumeAll,
    Execution,
    Leaving,
    ProduceAll,
    sending_of,
    tag_of,
)
from commfuse_dp.collectives.groups import Arriving
from commfuse_dp.device.base import WordLike, as_int32
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE
from commfuse_dp.transport.streams.words import WordTransport

_AT_ONCE: Sequence[WordLike] = ()


class DirectExecution(Execution):
    """The program is bound for streams, and has groups."""

    _transport: WordTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._bound.groups is not None and self._transport.device is not None
        self._groups, self._on = self._bound.groups, self._transport.device
        self._sent_groups = 0
        self._pad: torch.Tensor | None = None  # words of what is made where it leaves from
        self._value = 0  # of each of them
        self._reserved: dict[int, torch.Tensor] = {}  # piece -> where it will be made
        self._made: dict[int, dict[int, tuple[torch.Tensor, Sequence[WordLike]]]] = {}  # by group and piece: what is made there
        self._arriving: dict[int, tuple[torch.Tensor, WordLike]] = {}  # pieces that are received, but not waited for
        self._inside: set[int] = set()  # pieces in the inbox that have come
        self._needed = [len(group.pieces) for group in self._groups.arriving]  # pieces that are there, or will be

    def run(self) -> None:
        for srcs, number, part, nbytes in self._bound.expected:
            self._transport.expect(srcs, tag_of((CHANNEL_COLLECTIVE, self._call, number, part)), nbytes)
        super().run()

    def _drain(self) -> None:
        assert self._sent_groups == len(self._groups.leaving), "a group has not left"

    # ---- all pieces by one call ----------------------------------------------------------------------------------------
    def _steps(self) -> Sequence[Step]:
        steps, tensor = self._bound.compute, self._bound.tensor
        by_calls: set[Step] = set()
        for number, binding in enumerate(self._bindings):
            if binding.produce_all is not None:
                made = [step for step in steps if tensor[step.piece] == number and step.owner is not None and not step.consumes]
                if made:
                    self._produce_all(made, binding.produce_all)
                by_calls.update(made)
        for number, binding in enumerate(self._bindings):
            if binding.consume_all is not None:
                used = [step for step in steps if tensor[step.piece] == number and step.consumes]
                if used:
                    self._consume_all(used, binding.consume_all)
                by_calls.update(used)
        return steps if not by_calls else [step for step in steps if step not in by_calls]

    def _produce_all(self, steps: Sequence[Step], produce_all: ProduceAll) -> None:
        bound, transport, leaves_in = self._bound, self._transport, self._groups.leaves_in
        leaving, messages = [], dict[int, torch.Tensor]()
        for piece, _, owner, *_ in steps:
            assert owner is not None
            target, at = self._bindings[bound.tensor[piece]].target, bound.lands[piece]
            if piece in leaves_in:
                message = messages[piece] = self._reserve_next(piece, patient=False)
                buffer = transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
            elif target is not None and at is not None:
                buffer = target if at is ALL else target[at]
            else:
                buffer = self._scratch(piece)
            leaving.append(Leaving(owner, buffer, piece in leaves_in))
        words = produce_all(leaving, as_int32(self._call + 1))
        for step, item, when in zip(steps, leaving, words, strict=True):
            if item.sent:
                self._deliver(step.piece, messages[step.piece], when)
            else:
                self._tensors[step.piece] = item.out

    def _consume_all(self, steps: Sequence[Step], consume_all: ConsumeAll) -> None:
        bound, tensors, transport, device = self._bound, self._tensors, self._transport, self._on
        coming, awaited = [], list[WordLike]()
        for piece, _, owner, *_ in steps:
            assert owner is not None
            word, tensor = None, tensors[piece]
            if tensor is None:
                message, word = self._message_of(piece)
                tensor = tensors[piece] = transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
                awaited.append(word)
                self._inside.add(piece)
            coming.append(Coming(owner, tensor, word))
        timing = transport.probe.timing
        if timing is None:
            consume_all(coming, self._wait_for)
        else:  # see [Note: Kernels that wait inside themselves] in device/timing.py
            start, arrivals = timing.mark(), device.side_stream("arrivals")
            for pad, place, value in awaited:
                device.wait_value(arrivals, pad, place, value, exact=True)
            landed = timing.mark(arrivals)
            if consume_all(coming, self._wait_for):
                timing.kernel((self._name, bound), self._name, start, (landed,))
            device.wait_event(device.current_stream(), landed)  # words are used again
        for step in steps:
            self._used(step.terms)

    def _wait_for(self, word: WordLike) -> None:
        start = self._transport.probe.mark()
        self._on.wait_value(self._on.current_stream(), *word, exact=True)
        self._transport.probe.waited(self._name, start)

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _give_out(self) -> None:
        """Hand over what is complete, in the order of the groups, which is that in which their messages are expected: one in
        which some peers get nothing may be complete before an earlier one."""
        bound, tensors, transport = self._bound, self._tensors, self._transport
        while self._sent_groups < len(self._groups.leaving):
            dsts, number, pieces, sizes = self._groups.leaving[self._sent_groups]
            made = self._made.get(self._sent_groups)
            messages: list[tuple[torch.Tensor, Sequence[WordLike]]] = []
            if made is not None:
                if len(made) < len(pieces):
                    return
                messages.extend(map(made.__getitem__, pieces))
            else:
                given = []
                for piece in pieces:
                    tensor = tensors[piece]
                    if tensor is None:
                        return
                    given.append(tensor)
                for piece, tensor, message in zip(pieces, given, transport.reserve(dsts, sizes), strict=True):
                    transport.shaped(message, tensor.dtype, bound.shapes[piece]).copy_(tensor)
                    messages.append((message, _AT_ONCE))
                self._used(pieces)
            self._sent_groups += 1
            tag, sendings = tag_of((CHANNEL_COLLECTIVE, self._call, number, 0)), []
            for dst, (message, when) in zip(dsts, messages, strict=True):
                sendings.append(sending_of((dst, tag, message, when, 0)))
            transport.send(sendings)

    def _reserve_next(self, piece: int, *, patient: bool) -> torch.Tensor:
        if piece not in self._reserved:
            dsts, _, pieces, sizes = self._groups.leaving[self._groups.leaves_in[piece]]
            self._reserved.update(zip(pieces, self._transport.reserve(dsts, sizes), strict=True))
        return self._reserved.pop(piece)

    def _deliver(self, piece: int, message: torch.Tensor, when: Sequence[WordLike] | None = None) -> None:
        """It leaves when its words are written (None: now); the group is handed over with its last piece."""
        groups, transport, device = self._groups, self._transport, self._on
        if when is None:
            if self._pad is None:
                self._pad = transport.own_words(len(groups.words))
                self._value = as_int32(self._call + 1)
            word = self._pad, groups.words[piece], self._value
            device.write_value(device.current_stream(), *word)
            when = (word,)
        at = groups.leaves_in[piece]
        made = self._made.setdefault(at, {})
        made[piece] = message, when
        if len(made) == len(groups.leaving[at].pieces):
            self._give_out()

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _take(self, lane: int | None, until: int = -1, most: int = NO_LIMIT) -> torch.Tensor | None:
        bound, transport, tensors = self._bound, self._transport, self._tensors
        timing = transport.probe.timing
        start = timing.mark() if timing is not None else None
        group = self._groups.arriving[self._groups.arrives_in[until]]
        if group.summed:
            self._inside.update(group.pieces)
            tag, where = tag_of((CHANNEL_COLLECTIVE, self._call, group.number, 0)), self._place(group)
            for piece, message in zip(group.pieces, transport.receive(group.sources, tag, where), strict=True):
                tensors[piece] = transport.shaped(message, bound.dtypes[piece], bound.shapes[piece])
        else:
            message, (pad, place, value) = self._message_of(until)
            self._on.wait_value(self._on.current_stream(), pad, place, value, exact=True)
            tensor = transport.shaped(message, bound.dtypes[until], bound.shapes[until])
            whole, at = self._bindings[bound.tensor[until]].target, bound.lands[until]
            self._inside.add(until)
            tensors[until] = tensor
            if whole is not None and at is not None:
                target = tensors[until] = whole if at is ALL else whole[at]
                target.view(-1).copy_(tensor.view(-1))
                self._free((until,))
        if timing is not None and start is not None:
            timing.waited(self._name, start)
        return tensors[until]

    def _message_of(self, piece: int) -> tuple[torch.Tensor, WordLike]:
        """And the word that says that it is here. The whole group is received with the first of its pieces."""
        if piece not in self._arriving:
            group = self._groups.arriving[self._groups.arrives_in[piece]]
            tag = tag_of((CHANNEL_COLLECTIVE, self._call, group.number, 0))
            messages, words = self._transport.arriving(group.sources, tag, self._place(group))
            self._arriving.update(zip(group.pieces, zip(messages, words, strict=True), strict=True))
        return self._arriving.pop(piece)

    def _place(self, group: Arriving) -> Where:
        return tuple.__new__(Where, (self._name, self._call, group.told, group.nbytes))  # a frame less

    def _used(self, pieces: tuple[int, ...]) -> None:
        uses, free = self._uses, []
        for piece in pieces:
            left = uses[piece] = uses[piece] - 1
            if not left:
                self._tensors[piece] = None
                if piece in self._inside:
                    free.append(piece)
        if free:
            self._free(free)

    def _free(self, pieces: Iterable[int]) -> None:
        """They are not needed in the inbox any more. The last one of a group gives the places of all of them back."""
        groups, needed = self._groups, self._needed
        for piece in pieces:
            self._inside.discard(piece)
            at = groups.arrives_in[piece]
            left = needed[at] = needed[at] - 1
            if not left:
                sources, number, *_ = groups.arriving[at]
                self._transport.release(sources, tag_of((CHANNEL_COLLECTIVE, self._call, number, 0)), more=True)
