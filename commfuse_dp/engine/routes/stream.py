"""A unit's steps in streams: all are enqueued once its partials are computed, in an order that cannot lock, and streams wait.

    compute   partials of the unit ... | next unit ...
    scatter        send what is handed on as it is
    reduce                |compute  |terms  sums, handed on ...                  | next unit's ...  |event  sums over hosts
    across                                       { exchange of sums }  (event)                          through hosts only

[Note: Two layers of partials]
In a chain, compute does not write into the staging, as it does where gradients go straight to their owners: it could come to
wait for messages of its own layer. Partials are in pooled buffers, two layers' worth; then compute waits for the layer
before. Why the steps cannot lock: [Note: Order of a chain] in steps.py.

[Note: One unit behind]
The sums over hosts of a unit are enqueued behind the sums inside the host of the next one: the stream "reduce" would otherwise
wait for the exchange of every unit before it could make the sums that the next exchange needs, and the link between hosts would
idle meanwhile. `flush` says that no unit follows.

[Note: What must fit]
Through hosts, sums are enqueued once the unit's own partials are all computed, so until then nothing leaves the inboxes: all
that a unit owes to one gateway (its rows and those of its rail) must fit into `inbox_bytes`, twice, as slots are contiguous.
The engine checks it in the first step (parameters.py).

[Note: Sums cross together]
On a host each sum is a message to another host like any other. Here what crosses is an exchange in which both ends take part at
once, and each is a launch: so all sums of a unit are one exchange with each other host. `Crossing` stands for the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_dp.device.base import Event
from commfuse_dp.engine.plan import Geometry
from commfuse_dp.engine.routes.outbox import Outbox
from commfuse_dp.engine.routes.route import Means, Route
from commfuse_dp.errors import Where
from commfuse_dp.transport.base import NOWHERE, Sending, Tag, Transport
from commfuse_dp.transport.hierarchical.transport import HierarchicalTransport

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Crossing:
    """Messages of one unit between the ranks of a rail, which cross together. All on the stream "reduce".

    Messages to one rank lie one behind the other, in the order in which that rank has announced them (`expect`)."""

    def __init__(self, means: Means, sizes: Sequence[int]) -> None:
        """sizes: bytes of the sums for each rank; this rank's: of those that every other one of the rail has for it."""
        transport = means.transport
        assert isinstance(transport, HierarchicalTransport) and transport.rail is not None
        self._transport, self._rail, self._pool, self._ordering = transport, transport.rail, means.pool, means.ordering
        self._sizes, self._own = sizes, sizes[transport.rank]
        self._others = [rank for rank in transport.hosts.rail(transport.rank) if rank != transport.rank]
        self._given: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor] = {}
        self._at = dict.fromkeys(self._others, 0)  # bytes reserved
        self._announced = dict.fromkeys(self._others, 0)  # bytes
        self._spans: dict[tuple[int, Tag], slice] = {}
        self._crossed: Event | None = None

    def open(self) -> None:
        """Sums are about to be made."""
        self._given = {rank: self._pool.take(self._sizes[rank]) for rank in self._others}

    def expect(self, srcs: Sequence[int], tag: Tag, nbytes: int) -> None:
        for src in srcs:
            start = self._announced[src]
            self._announced[src] = start + nbytes
            self._spans[src, tag] = slice(start, start + nbytes)

    def try_reserve(self, dst: int, nbytes: int) -> torch.Tensor:
        start = self._at[dst]
        self._at[dst] = start + nbytes
        return self._given[dst][start : start + nbytes]

    def send(self, sendings: Sequence[Sending]) -> None:
        """They leave with the others: `cross`."""

    def cross(self, where: Where) -> None:
        """All messages have been sent."""
        self._transport.progress()
        self._taken = {rank: self._pool.take(self._own) for rank in self._others}
        self._crossed = self._rail.cross(where, self._given, self._taken)

    def wait(self) -> None:
        """The current stream waits for what comes."""
        self._ordering.after(self._crossed)

    def receive(self, srcs: Sequence[int], tag: Tag, where: Where = NOWHERE) -> list[torch.Tensor]:
        return [self._taken[src][self._spans[src, tag]] for src in srcs]

    def release(self, srcs: Sequence[int], tag: Tag, *, more: bool = False) -> None:
        """Memory goes back at once: `close`."""

    def close(self) -> None:
        """The current stream has been given the last that reads it."""
        for buffer in (*self._given.values(), *self._taken.values()):
            self._pool.give(buffer)


class StreamRoute(Route):
    """One unit's gradient on this rank, on a stream-ordered transport. The stream "reduce" makes the sums."""

    _crossing: Crossing | None = None
    _enqueued = False
    _may_finish = False

    def _between_hosts(self, geometry: Geometry) -> tuple[Transport | Crossing, Outbox]:
        if self._way.chained:
            return super()._between_hosts(geometry)
        self._crossing = Crossing(self._means, list(map(self._bytes, geometry.segment_bytes)))
        return self._crossing, Outbox(self._crossing, self._crossing, self._pool)

    def advance(self) -> bool:
        """Enqueue all steps, once all partials are produced."""
        if self._enqueued or self._uncomputed:
            return False
        self._enqueued = True
        timing = self._transport.probe.timing
        if timing is not None:
            timing.layer = ""
        with self._means.ordering.reducing():
            if self._crossing is not None:
                self._crossing.open()
            for step in self._way.steps.values():
                if step.item.absent:
                    assert step.to is not None
                    self._transport.send((Sending(step.to, Tag(*self._name, step.goes), _NOTHING),))
                elif step.key in self._own:  # else it was handed on when it was computed
                    self._run(step)
            if self._crossing is not None:
                self._crossing.cross(Where(self._unit.name, self._number, "sums of hosts", self._own_bytes))
        if self._crossing is not None:
            if self._means.held_back is not None:
                self._means.held_back.flush()
            self._means.held_back = self
        return True

    @property
    def holds_up(self) -> bool:
        return not self._enqueued

    def flush(self) -> None:
        self._may_finish = True

    @property
    def done(self) -> bool:
        return self._enqueued and (self._may_finish or self._crossing is None)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """On the stream "reduce"."""
        if self._crossing is not None:
            self._crossing.wait()
            for step in self._way.totals:
                self._run(step)
            self._crossing.close()
        total = super().total(own)
        self._means.ordering.hold(total)
        return total
