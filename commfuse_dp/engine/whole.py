"""A fused layer's products in one kernel each, which turn to the slices as these arrive: the device's way through a layer.

    by slices (engine.py)   take slice | wait | GEMM | take slice | wait | GEMM ...            the stream waits between GEMMs
    whole (here)            take all slices, one table | kernel: tile | tile, slice has come? | tile ...

The kernel waits inside itself, tile by tile, so a late slice holds up only what needs it. What it needs for that:

* all slices of the layer are in the window at once (their copies are enqueued, or it would wait for ever), and
* the partials that are owed to one rank fit into its staging ring together, as one launch writes them all.

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

from commfuse_dp.device.base import Device, Word
from commfuse_dp.engine.gradients import Scatter
from commfuse_dp.engine.plan import Unit, UnitSlice
from commfuse_dp.engine.window import Held
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.ops.pieces import Piece

if TYPE_CHECKING:
    from commfuse_dp.engine.engine import Consume, Engine, Produce


class Whole(NamedTuple):
    """A backward's two products, bound to their operands. Each returns False if it has to go by slices."""

    wgrad: Callable[[Scatter, list[UnitSlice]], bool]
    dgrad: Callable[[], bool]


class WholeProducts:
    """Of one unit: a linear, with or without bias, whose shards are whole rows. Called by ops/linear.py."""

    def __init__(self, engine: Engine, unit: Unit, gemms: Gemms, device: Device) -> None:
        self._engine = engine
        self._unit = unit
        self._gemms = gemms
        self._device = device
        self._forward = _ReadTable(engine, unit)
        self._dgrad_table = _ReadTable(engine, unit)
        self._write: SliceTable | None = None  # of partial gradients
        self._write_key: tuple[torch.dtype, tuple[bool, ...]] | None = None
        self._pad: torch.Tensor | None = None  # the words that wgrad writes

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
        *,
        dtype: torch.dtype,
        include: tuple[bool, ...],
    ) -> None:
        """dx = grad @ W, and the partial gradients. grad: [tokens, out] with dense columns, x and dx: [tokens, in].

        consume, produce, dtype, include: as in Engine.exchange, for what has to go by slices."""
        whole = Whole(partial(self._wgrad, grad, x), partial(self._dgrad, grad, dx))
        self._engine.exchange(self._unit, consume, produce, dtype=dtype, include=include, whole=whole)

    def _dgrad(self, grad: torch.Tensor, dx: torch.Tensor | None) -> bool:
        return dx is not None and self._product(grad, dx, forward=False)

    def _product(self, operand: torch.Tensor, out: torch.Tensor, *, forward: bool) -> bool:
        if operand.dtype != self._unit.dtype or not operand.numel():
            return False
        engine = self._engine
        parameters = engine.parameters
        engine.ensure_step()
        held = parameters.take_whole(self._unit)
        if held is None:
            return False
        start = engine.probe.mark()
        if forward:
            table, epoch = self._forward.of(held)
            self._gemms.forward(operand, table, out, epoch=epoch)
        else:
            table, epoch = self._dgrad_table.of(held)
            self._gemms.dgrad(operand, table, out, epoch=epoch)
        if engine.probe.timing is not None and start is not None:
            awaited = [item.transfer.landed for item in held if item.transfer.arrival is not None]
            engine.probe.timing.kernel((self._unit.index, forward, operand.shape), self._unit.name, start, awaited)
        parameters.done_whole(self._unit, keep=forward and engine.keeps(self._unit))
        return True

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def _wgrad(self, grad: torch.Tensor, x: torch.Tensor, scatter: Scatter, order: list[UnitSlice]) -> bool:
        """All partial gradients, each sent as soon as it is complete. order: slices owed to others first."""
        room = self._engine.transport.message_limit // 2  # half of a ring may be lost to a gap at its end
        owed: dict[int, int] = {}
        for item in order:
            box = self._engine.transport.box_of(item.owner)
            owed[box] = owed.get(box, 0) + item.nbytes
        steps, order = order, [item for item in order if not item.absent]
        if (
            grad.dtype != x.dtype
            or not scatter.include[0]
            or any(n > room for n in owed.values())  # the own part, too: all ranks of a mirrored transport decide alike
        ):
            return False
        gradients = self._engine.gradients
        key = (scatter.geometry.dtype, scatter.include)
        if self._pad is None:
            self._pad = torch.zeros(len(order), dtype=torch.int32, device=grad.device)
            device = self._device  # the stream that sends must see the zeros, not what was there before
            device.wait_event(device.side_stream("scatter"), device.record(device.current_stream()))
        buffers = [gradients.reserve(scatter, item) for item in order]
        value = scatter.seq + 1
        entries: list[SliceEntry] = []
        for place, (item, buffer) in enumerate(zip(order, buffers, strict=True)):
            for piece in scatter.geometry.pieces(item, buffer):
                if piece.part == 1:  # first, so that the slice's word speaks for it, too
                    span = grad.narrow(1, piece.row_start, piece.tensor.shape[0])
                    torch.sum(span, 0, dtype=piece.tensor.dtype, out=piece.tensor)
                else:
                    remote = item.owner != self._engine.rank
                    entries.append(SliceEntry(piece.tensor, piece.row_start, None, self._pad if remote else None, place))
        if self._write is None or self._write_key != key:
            self._write, self._write_key = SliceTable(entries), key
        else:
            self._write.repoint([entry.data for entry in entries])
        self._gemms.wgrad(grad, x, self._write, epoch=value)
        complete = {entry.index for entry in entries if entry.pad is not None}
        places = iter(enumerate(buffers))
        for item in steps:
            if item.absent:
                gradients.send_nothing(scatter, item)
                continue
            place, buffer = next(places)
            when = Word(self._pad, place, value) if place in complete else None
            gradients.send(scatter, item, buffer, 0, when=when)
        return True


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
        self._at = []
        others = iter(held)
        for visit in self._engine.parameters.visits_forward(unit):
            item, word, pieces = visit.item, None, visit.pieces
            if item.owner != rank:
                here = next(others)
                assert here.buffer is not None
                pieces = unit.params.pieces(item, here.buffer)
                arrival = here.transfer.arrival
                word = arrival._replace(value=arrival.value - epoch) if arrival is not None else None
                self._at.append((here.buffer, word))
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
