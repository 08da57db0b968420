"""Executes one rank's program over a stream-ordered transport: everything is enqueued in one order, and nothing waits here.

    current stream   own slice -> stagings   own: GEMM   |slice 1 is here: GEMM   |slice 2 is here: GEMM
    transport        slice 1 comes, own slices leave ...  slice 2 comes ...

Messages move in exchanges (exchanges.py), in an order that all ranks share. An exchange is enqueued as soon as what it sends is
made, at the latest before what it brings is needed; own slices leave at once, so transfers run ahead of compute.

[Note: Room on streams]
The host cannot see what has left a ring, so it bounds what it enqueues: of one call at most half a ring to a peer, which always
fits (PlaceRing). Where a call has more for a peer (`BoundProgram.tight`), what has come from the other side is moved out of its
ring first, as the peers do at the same exchange: all ranks go on in step, and none fills a ring that its peer cannot empty.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from commfuse_dp.collectives.exchanges import Exchange
from commfuse_dp.collectives.execution import NO_LIMIT, Execution, sending_of, tag_of
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class StreamExecution(Execution):
    """`transport` has a device, and the program is bound for streams. Where groups.py finds groups, and the transport has
    words, direct.py has fewer calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._next = 0  # number of the exchange that is enqueued next
        self._coming = [0] * len(self._bound.incoming)  # messages of each lane whose exchange is enqueued
        self._filled: Counter[int] = Counter()  # bytes of exchanges with tight peers since their ring was emptied

    def run(self) -> None:
        bound, transport = self._bound, self._transport
        for srcs, number, part, nbytes in bound.expected:
            transport.expect(srcs, tag_of((CHANNEL_COLLECTIVE, self._call, number, part)), nbytes)
        super().run()
        self._drain()

    def _drain(self) -> None:
        self._give_out(len(self._bound.exchanges))

    # ---- sending -----------------------------------------------------------------------------------------------------
    def _give_out(self, upto: int = 0) -> None:
        """Enqueue exchanges for as long as what they send is made, and there is room. upto: the first so many at any rate."""
        bound, transport, tensors = self._bound, self._transport, self._tensors
        while self._next < len(bound.exchanges):
            exchange, piece = bound.exchanges[self._next], bound.leaving[self._next]
            needed = self._next < upto
            if piece >= 0 and tensors[piece] is None:
                if not needed:
                    break
                self._take(bound.lane_of.get(piece), piece)  # it is passed on
                continue
            if not self._fits(exchange):
                if not needed:
                    break
                self._empty(exchange)
            self._pass(exchange)
            if piece >= 0 or transport.lockstep:
                self._send(exchange, piece)

    def _send(self, exchange: Exchange, piece: int) -> None:
        bound, transport = self._bound, self._transport
        dst, _, number, part, *_ = exchange
        message = _NOTHING
        if piece >= 0:
            tensor, (cuts, sizes) = self._tensors[piece], bound.messages[piece]
            assert tensor is not None
            if cuts is not None:
                tensor = tensor.reshape(-1)[slice(*cuts[part])]
            (message,) = transport.reserve((dst,), (sizes[part],))
            transport.shaped(message, tensor.dtype, tensor.shape).copy_(tensor)
        transport.send((sending_of((dst, tag_of((CHANNEL_COLLECTIVE, self._call, number, part)), message, (), 0)),))
        if exchange.out is not None and part + 1 == len(bound.messages[piece][1]):
            self._sent[exchange.out[0]] += 1
            self._used((piece,))

    def _pass(self, exchange: Exchange) -> None:
        """It is enqueued."""
        self._next += 1
        if exchange.into is not None:
            self._coming[exchange.into[0]] += 1
        if exchange.dst in self._bound.tight:
            self._filled[exchange.dst] += exchange.room

    def _reserve_next(self, piece: int, *, patient: bool) -> torch.Tensor | None:
        bound, transport = self._bound, self._transport
        number = bound.leaves_at[piece]
        self._give_out(number)
        exchange = bound.exchanges[number]
        if not self._fits(exchange):
            self._empty(exchange)
        self._pass(exchange)  # nothing is enqueued before the piece is made and sent
        return transport.reserve((exchange.dst,), (bound.nbytes[piece],))[0]

    # ---- room --------------------------------------------------------------------------------------------------------
    def _fits(self, exchange: Exchange) -> bool:
        filled = self._filled[exchange.dst]
        return not filled or filled + exchange.room <= self._bound.room

    def _empty(self, exchange: Exchange) -> None:
        """Move what has come from the peer out of its ring: see [Note: Room on streams]."""
        bound, src = self._bound, exchange.src
        for number, lane in enumerate(bound.incoming):
            if lane.peer == src:
                taken = bound.messages_before[number][self._received[number]] + self._received_parts[number]
                super()._take(number, most=self._coming[number] - taken)
        self._move_out({src})
        self._filled[exchange.dst] = 0

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def _take(self, lane: int | None, until: int = -1, most: int = NO_LIMIT) -> torch.Tensor | None:
        bound, transport = self._bound, self._transport
        assert transport is not None and lane is not None and until >= 0, "a piece is used before it is made"
        self._give_out(bound.here_after[until])
        found = self._tensors[until]
        if found is None:
            mark = transport.probe.mark()
            found = super()._take(lane, until)
            transport.probe.waited(self._name, mark)
        if until in bound.sent:
            self._give_out()
        return found
