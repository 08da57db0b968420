"""A fused layer's products in one kernel each, which turn to the slices as these arrive: the device's way through a layer.

    by slices (engine.py)   take slice | wait | GEMM | take slice | wait | GEMM ...            the stream waits between GEMMs
    whole (here)            take all slices, one table | kernel: tile | tile, slice has come? | tile ...

The kernel waits inside itself, tile by tile, so a late slice holds up only what needs it. What it needs for that:

* all slices of the layer are in the window at once (their copies are enqueued, or it would wait for ever), and
* the partials that are owed to one rank fit into its staging ring together, as one launch writes them all (those of a chain
  are in buffers of their own).

Where one of them does not hold, or there is nothing to compute, or the operands are of other dtypes than the parameters, the
layer goes by slices: both give the same sums up to the tiling of a GEMM. Which kernel computes a product (Triton, or BLAS by
slices behind the same words) is kernels/choice.py's affair.

[Note: Tables that stay]
What a kernel is told about its slices (kernels/table.py) is addresses and words. In a model of a steady order both come again:
the pool gives out its buffers in the same order in every step, and a slice has a word of its own, whose value is the number of
its pulls. The table holds the differences between these values; what they have in common goes with the launch. So a table is
written once for forward, once for dgrad, where slices lie in other buffers, and once for wgrad; a step only compares.

[Note: Orders]
forward and dgrad turn to the own slice first, then to the others in the order in which they are fetched. wgrad computes what is
owed to others first and the own slice last; a slice's word, written by the kernel when its last tile is stored, lets the stream
"scatter" send it while the kernel goes on. dgrad follows in a launch of its own: meanwhile its parameters arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from commfuse_dp.device.base import Device, Word, WordLike
from commfuse_dp.engine.plan import Geometry, Unit, UnitSlice
from commfuse_dp.engine.room import box_of, in_chain
from commfuse_dp.engine.scatter import Scatter
from commfuse_dp.engine.window import Held
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.ops.pieces import Piece

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Engine
    from commfuse_dp.engine.parameters import Consume
    from commfuse_dp.engine.partials import Produce


class Whole(NamedTuple):
    """A backward's two products, bound to their operands. Each returns False if it has to go by slices."""

    wgrad: Callable[[Scatter, list[UnitSlice]], bool]
    dgrad: Callable[[], bool]


def _nothing() -> bool:
    return False


class WholeProducts:
    """Of one unit: a linear, with or without bias, whose shards are whole rows. Called by ops/linear.py."""

    def __init__(self, engine: Engine, unit: Unit, gemms: Gemms, device: Device) -> None:
        self._engine = engine
        self._unit = unit
        self._gemms = gemms
        self._device = device
        self._forward = _ReadTable(engine, unit)
        self._dgrad_table = _ReadTable(engine, unit)
        self._write = _WriteTable(engine, device)  # of partial gradients
        self._dtype: torch.dtype | None = None  # of the unit, which is final from the first product on
        self._fitting: tuple[Geometry | None, bool] = (None, False)

    # ---- parameters --------------------------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """y = x @ W.T + b. x: [tokens, in], y: [tokens, out]. False: nothing was done, go by slices."""
        return self._product(x, y, forward=True)

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        dx: torch.Tensor | None,
        consume: Consume | None,
        produce: Produce | None,
    ) -> None:
        """dx = grad @ W, and the partial gradients. grad: [tokens, out] with dense columns, x and dx: [tokens, in].

        consume, produce: as in Engine.exchange, for what has to go by slices."""
        wgrad = partial(self._wgrad, grad, x)
        dgrad = partial(self._product, grad, dx, forward=False) if dx is not None else _nothing
        whole: Whole = tuple.__new__(Whole, (wgrad, dgrad))  # without a frame
        self._engine.exchange(self._unit, consume, produce, whole=whole)

    def _product(self, operand: torch.Tensor, out: torch.Tensor, *, forward: bool) -> bool:
        if operand.dtype != (self._dtype or self._unit.dtype) or not operand.numel():
            return False
        engine = self._engine
        parameters = engine.parameters
        if forward:
            engine.ready(self._unit)
        held = parameters.take_whole(self._unit)
        if held is None:
            return False
        timing = engine.probe.timing
        start = timing.mark() if timing is not None else None
        self._dtype = operand.dtype
        if forward:
            table, epoch = self._forward.of(held)
            self._gemms.forward(operand, table, out, epoch=epoch)
        else:
            table, epoch = self._dgrad_table.of(held)
            self._gemms.dgrad(operand, table, out, epoch=epoch)
        if timing is not None and start is not None:
            awaited = [item.transfer.landed for item in held if item.transfer.arrival is not None]
            timing.kernel((self._unit.index, forward, operand.shape), self._unit.name, start, awaited)
        parameters.done_whole(self._unit, keep=forward and engine.keeps(self._unit))
        return True

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def _wgrad(self, grad: torch.Tensor, x: torch.Tensor, scatter: Scatter, order: list[UnitSlice]) -> bool:
        """All partial gradients, each sent as soon as it is complete. order: slices owed to others first."""
        geometry = scatter.bound.geometry
        if geometry is not self._fitting[0]:
            self._fitting = geometry, self._fits(geometry)
        if grad.dtype != x.dtype or not scatter.bound.record.include[0] or not self._fitting[1]:
            return False
        present = []
        for item in order:
            if not item.absent:
                present.append(item)
        gradients, write = self._engine.gradients, self._write
        buffers = gradients.reserve_all(scatter, present)
        table = write.of(scatter, present, buffers)
        for row, rows, out in write.sums:  # first, so that the slice's word speaks for it, too
            torch.sum(grad.narrow(1, row, rows), 0, dtype=out.dtype, out=out)
        value = scatter.seq + 1
        self._gemms.wgrad(grad, x, table, epoch=value)
        pad, written = write.pad, write.written
        when: list[Sequence[WordLike]] = []
        for place in range(len(present)):
            when.append(((pad, place, value),) if place in written else ())
        gradients.send(scatter, order, buffers, when=when)
        return True

    def _fits(self, geometry: Geometry) -> bool:
        """What goes to one inbox fits into its staging together, or takes no room there."""
        if in_chain(self._unit, self._engine.world_size):
            return True
        transport = self._engine.transport
        room = transport.message_limit // 2  # half of a ring may be lost to a gap at its end
        owed: dict[int, int] = {}
        for owner, own in enumerate(geometry.slices):
            box = box_of(transport, owner)
            owed[box] = owed.get(box, 0) + sum(item.nbytes for item in own)
        return max(owed.values()) <= room  # the own part, too: all ranks of a lockstep transport decide alike


class _ReadTable:
    """Where a unit's parameters are read, own slices first; see [Note: Tables that stay]."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self._engine = engine
        self._unit = unit
        self._table: SliceTable | None = None
        self._at: list[tuple[torch.Tensor | None, Word | None]] = []  # of others' slices: buffer, and word less its epoch

    def of(self, held: Sequence[Held]) -> tuple[SliceTable, int]:
        """The table for slices in the window, and the epoch to launch with."""
        first = held[0].transfer.arrival if held else None
        epoch = first.value if first is not None else 0
        at = self._at
        if self._table is None or len(at) != len(held):
            return self._point(held, epoch), epoch
        for item, (buffer, word) in zip(held, at, strict=True):
            arrival = item.transfer.arrival
            if item.buffer is not buffer or (arrival is None) != (word is None):
                break
            if arrival is not None and (
                arrival.pad is not word.pad  # type: ignore[union-attr]
                or arrival.place != word.place  # type: ignore[union-attr]
                or arrival.value - epoch != word.value  # type: ignore[union-attr]
            ):
                break
        else:
            return self._table, epoch
        return self._point(held, epoch), epoch

    def _point(self, held: Sequence[Held], epoch: int) -> SliceTable:
        weights: list[torch.Tensor] = []
        firsts: list[int] = []
        biases: list[torch.Tensor] = []
        words: list[Word | None] = []
        bias: dict[int, Piece] = {}
        unit, rank = self._unit, self._engine.rank
        arrivals = [here.transfer.arrival for here in held]
        less = [arrival._replace(value=arrival.value - epoch) if arrival is not None else None for arrival in arrivals]
        self._at = [(here.buffer, word) for here, word in zip(held, less, strict=True)]
        visits, keys = self._engine.parameters.coming(unit)
        at_of = dict(zip(keys, self._at, strict=False))  # none of them in place
        for visit in visits:
            item, word, pieces = visit.item, None, visit.pieces
            if item.owner != rank:
                buffer, word = at_of[visit.group.key]
                assert buffer is not None
                pieces = unit.params.pieces(item, buffer[visit.at : visit.at + item.nbytes])
            for piece in pieces:
                if piece.part == 1:  # comes with the owner's first slice and serves all of them
                    bias[item.owner] = piece
                    continue
                rows = piece.tensor.shape[0]
                weights.append(piece.tensor)
                firsts.append(piece.row_start)
                words.append(word)
                if len(unit.slots) > 1:
                    biases.append(bias[item.owner].tensor.narrow(0, piece.row_start - bias[item.owner].row_start, rows))
        if self._table is not None:
            self._table.repoint(weights, biases or None, words)
            return self._table
        self._table = SliceTable(
            [
                SliceEntry(weight, first, biases[n] if biases else None, *(word or (None, 0, 0)))
                for n, (weight, first, word) in enumerate(zip(weights, firsts, words, strict=True))
            ]
        )
        return self._table


class _WriteTable:
    """Where a unit's partial gradients are written, those of others first; see [Note: Tables that stay]."""

    def __init__(self, engine: Engine, device: Device) -> None:
        self._rank = engine.rank
        self._device = device
        self._table: SliceTable | None = None
        self._geometry: Geometry | None = None
        self._at: list[tuple[torch.Tensor, int]] = []  # buffers, and their addresses
        self._own: torch.Tensor | None = None
        self._pads: dict[Geometry, torch.Tensor] = {}  # kept: the stream that sends may still wait for an earlier one's words
        self.pad: torch.Tensor  # the words that are written, by places in the order
        self.written: frozenset[int] = frozenset()
        self.sums: list[tuple[int, int, torch.Tensor]] = []  # of biases: first row, rows, where the sum goes

    def of(self, scatter: Scatter, order: Sequence[UnitSlice], buffers: Sequence[torch.Tensor]) -> SliceTable:
        if (
            self._table is not None
            and scatter.own is self._own
            and scatter.bound.geometry is self._geometry
            and len(buffers) == len(self._at)
        ):
            for buffer, (known, address) in zip(buffers, self._at, strict=True):
                if buffer is not known and buffer.data_ptr() != address:
                    break
            else:
                return self._table
        if scatter.bound.geometry is not self._geometry:
            self._table, self.pad = None, self._pad_of(scatter.bound.geometry, len(order))
        self._at = [(buffer, buffer.data_ptr()) for buffer in buffers]
        self._own, self._geometry = scatter.own, scatter.bound.geometry
        self.sums = []
        entries: list[SliceEntry] = []
        for place, (item, buffer) in enumerate(zip(order, buffers, strict=True)):
            for piece in scatter.bound.geometry.pieces(item, buffer):
                if piece.part == 1:
                    self.sums.append((piece.row_start, piece.tensor.shape[0], piece.tensor))
                else:
                    word = self.pad if item.owner != self._rank else None
                    entries.append(SliceEntry(piece.tensor, piece.row_start, None, word, place))
        if self._table is None:
            self._table = SliceTable(entries)
            self.written = frozenset(entry.index for entry in entries if entry.pad is not None)
        else:
            self._table.repoint([entry.data for entry in entries])
        return self._table

    def _pad_of(self, geometry: Geometry, words: int) -> torch.Tensor:
        pad = self._pads.get(geometry)
        if pad is None:
            device = self._device
            pad = self._pads[geometry] = torch.zeros(words, dtype=torch.int32, device=device.torch_device)
            # The stream that sends must see the zeros, not what was there before.
            device.wait_event(device.side_stream("scatter"), device.record(device.current_stream()))
        return pad
