"""The slices of one unit as the kernels see them: where each lies, which rows it is, and which word says that it has come.

A table has one line per slice that is not empty, in the order in which a kernel turns to them: for a gather the own slice
first and then the others as they arrive, for a scatter the others' first and the own last. The caller gives the order.

    field        forward, dgrad                                wgrad
    DATA         address of W_slice [rows, columns]            address of dW_slice, the destination
    FIRST_ROW    first row within the unit = first column of y and dy
    ROWS
    STRIDE       elements from one row of the slice to the next
    WORD         address of the int32 to wait for, or 0        address of the int32 to write, or 0
    VALUE        what to wait for, or to write, at epoch 0; the launch adds its epoch (modulo 2**32)
    BIAS         address of the slice's bias [rows], or 0      0
    EXACT        1: the word must equal VALUE, no epoch added  ignored

[Note: Addresses change, the table does not]
Slices live in pooled windows, so their addresses change from step to step. `repoint` sends the new lines by one small copy on
the *current* stream, behind the kernels that read the old ones there:

    current stream   kernel (reads table) | copy -> table | kernel (reads table)
    host             launch               | repoint       | launch

A table must therefore be used from one stream, or from streams that are ordered by events. The lines leave from pinned memory
that torch's host allocator keeps until the copy is done; nothing waits for it.

[Note: Counters]
`counters` (int32, one per line, zero between launches) count the finished tiles of a slice in wgrad. The last tile of a slice
resets its counter, so launches of one table may follow each other but must not overlap.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from commfuse_dp.device.base import Word, as_int32

DATA, FIRST_ROW, ROWS, STRIDE, WORD, VALUE, BIAS, EXACT = range(8)
FIELDS = 8  # one line is 64 bytes

_VECTOR = 16  # bytes of the widest load
_GONE = torch.empty(0, 0, device="cpu")


@dataclass(eq=False, slots=True)
class SliceEntry:
    """One slice. data: [rows, columns], rows any distance apart, columns dense; bias: [rows], dense, in data's dtype.

    pad, index, value: the int32 word and the value (cyclic) it has to reach before data and bias are read (forward, dgrad), or
    that is written to it when data is complete (wgrad). None: nothing to wait for, nobody to tell. A slice's word speaks for
    everything of its owner that comes before it, so a bias that came with the owner's first slice needs no word of its own.
    exact: the word that is waited for must equal the value, whatever the launch's epoch: it names a message, it does not count.
    """

    data: torch.Tensor
    first_row: int
    bias: torch.Tensor | None = None
    pad: torch.Tensor | None = None
    index: int = 0
    value: int = 0
    exact: bool = False

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    def line(self) -> list[int]:
        """The fields, as int64."""
        word = 0 if self.pad is None else self.pad.data_ptr() + 4 * self.index
        bias = 0 if self.bias is None else self.bias.data_ptr()
        stride = self.data.stride(0)
        return [self.data.data_ptr(), self.first_row, self.rows, stride, word, as_int32(self.value), bias, int(self.exact)]


class Alignments(NamedTuple):
    """Powers of two up to 16 that divide what belongs to every slice."""

    pointer: int  # addresses, in bytes
    stride: int  # distances of rows, in elements
    column: int  # first rows
    rows: int  # numbers of rows


def _word_fields(word: Word | None) -> tuple[int, int]:
    """The fields WORD and VALUE of a line."""
    return (0, 0) if word is None else (word.pad.data_ptr() + 4 * word.place, as_int32(word.value))


def _check(number: int, entry: SliceEntry, first: SliceEntry) -> None:
    data = entry.data
    where = f"slice {number} (rows from {entry.first_row})"
    if data.dim() != 2 or (data.shape[1] > 1 and data.stride(1) != 1):
        raise ValueError(
            f"{where}: data of shape {tuple(data.shape)}, strides {data.stride()}: give [rows, columns] with dense columns"
        )
    if (data.shape[1], data.dtype, data.device) != (first.data.shape[1], first.data.dtype, first.data.device):
        raise ValueError(
            f"{where}: {data.shape[1]} columns of {data.dtype} on {data.device}, but the first slice has "
            f"{first.data.shape[1]} of {first.data.dtype} on {first.data.device}: all slices of a unit must agree"
        )
    if entry.first_row < 0:
        raise ValueError(f"{where}: first_row must be at least 0")
    bias = entry.bias
    if (bias is None) != (first.bias is None):
        raise ValueError(f"{where}: a unit has a bias in all slices or in none")
    if bias is not None and (bias.shape != (entry.rows,) or bias.dtype != data.dtype or not bias.is_contiguous()):
        raise ValueError(f"{where}: bias {tuple(bias.shape)} of {bias.dtype}: give {entry.rows} dense elements of {data.dtype}")
    pad = entry.pad
    if pad is not None and (pad.dtype != torch.int32 or pad.dim() != 1 or not 0 <= entry.index < pad.shape[0]):
        raise ValueError(
            f"{where}: word {entry.index} of a pad {tuple(pad.shape)} of {pad.dtype}: give an int32 pad that has it"
        )


def _form(data: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return data.shape, data.stride(), data.dtype


def _common_power(values: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides all values."""
    bits = most
    for value in values:
        bits |= value
    return bits & -bits


class SliceTable:
    """Lines on the device, and the host's knowledge of them. Empty slices are left out: nothing to read, nobody to tell.

    entries: in the order in which kernels turn to them; their rows must not overlap. Raises ValueError on slices that do not
    agree with each other.
    """

    def __init__(self, entries: Sequence[SliceEntry]) -> None:
        self._kept = [number for number, entry in enumerate(entries) if entry.rows]
        self._given = len(entries)
        kept = tuple(entries[number] for number in self._kept)
        for number, entry in zip(self._kept, kept, strict=True):
            _check(number, entry, kept[0])
        at = 0
        for entry in sorted(kept, key=lambda entry: entry.first_row):
            if entry.first_row < at:
                raise ValueError(f"rows {entry.first_row} to {at - 1} are in two slices")
            at = entry.first_row + entry.rows
        self.entries = kept
        self._forms = [_form(entry.data) for entry in kept]
        self.end_row = at  # the last row + 1
        self.rows = tuple(entry.rows for entry in kept)
        self.total_rows = sum(self.rows)
        example = kept[0].data if kept else (entries[0].data if entries else torch.empty(0, 0, device="cpu"))
        self.columns = int(example.shape[-1])
        self.dtype = example.dtype
        self.device = example.device
        self.has_bias = bool(kept) and kept[0].bias is not None
        self.has_exact = any(entry.exact for entry in kept)
        self._host = array("q", itertools.chain.from_iterable(entry.line() for entry in kept))
        self.lines = torch.tensor(self._host, dtype=torch.int64, device=self.device)
        self.counters = torch.zeros(len(kept), dtype=torch.int32, device=self.device)
        self._measure()

    def __len__(self) -> int:
        return len(self.entries)

    def repoint(
        self,
        data: Sequence[torch.Tensor],
        bias: Sequence[torch.Tensor] | None = None,
        words: Sequence[Word | None] | None = None,
    ) -> None:
        """New places of all slices (as many as given at first, of the same shapes and strides), from here on in the stream.
        Words stay exact, or not.

        Does nothing if they are where they were. `bias` may be left out only if there is none, `words` if they are the same.
        """
        if len(data) != self._given or (bias is None) == self.has_bias:
            raise ValueError(
                f"{len(data)} slices {'without' if bias is None else 'with'} biases for a table of {self._given} "
                f"{'with' if self.has_bias else 'without'}: give all of them, also empty ones, in the table's order"
            )
        host = self._host
        moved = False
        for at, number in enumerate(self._kept):
            place = data[number].data_ptr()
            bias_place = 0 if bias is None else bias[number].data_ptr()
            moved = moved or host[at * FIELDS + DATA] != place or host[at * FIELDS + BIAS] != bias_place
            if words is not None and not moved:
                moved = host[at * FIELDS + WORD : at * FIELDS + VALUE + 1].tolist() != list(_word_fields(words[number]))
        if not moved:
            for number, entry in zip(self._kept, self.entries, strict=True):  # they may have been forgotten
                entry.data = data[number]
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the slices of a fused layer moved while a CUDA graph is captured: the graph would always read them where they "
                "are now; capture the parts of the model that are not fused, or none"
            )
        entries = []
        for number, old, form in zip(self._kept, self.entries, self._forms, strict=True):
            new = data[number]
            if _form(new) != form:
                raise ValueError(f"slice {number} has changed from {tuple(form[0])} to {tuple(new.shape)}: make a new table")
            pad, index, value = (old.pad, old.index, old.value) if words is None else words[number] or (None, 0, 0)
            new_bias = None if bias is None else bias[number]
            entries.append(SliceEntry(new, old.first_row, new_bias, pad, index, value, old.exact))
        self.entries = tuple(entries)
        for at, entry in enumerate(entries):
            host[at * FIELDS : (at + 1) * FIELDS] = array("q", entry.line())
        source = torch.frombuffer(host, dtype=torch.int64)
        self.lines.copy_(source.pin_memory() if self.device.type == "cuda" else source, non_blocking=True)
        self._measure()

    def forget(self) -> None:
        """Let go of the tensors behind a launch: `repoint` gives new ones before the next. For slices that are somebody's
        activations, which a table that is kept would keep, too."""
        for entry in self.entries:
            entry.data = _GONE

    def _measure(self) -> None:
        def field(name: int) -> array[int]:
            return self._host[name::FIELDS]

        self.alignments = Alignments(
            _common_power(field(DATA), _VECTOR),
            _common_power(field(STRIDE), 16),
            _common_power(field(FIRST_ROW), 16),
            _common_power(self.rows, 16),
        )
        # Every row of every slice begins at a multiple of 16 bytes: what TMA needs, and the widest loads.
        self.vectored = self.alignments.pointer == _VECTOR and self.alignments.stride * self.dtype.itemsize >= _VECTOR


def check_row_bias(bias: torch.Tensor, x: torch.Tensor, table: SliceTable) -> None:
    """One dense element for each row of x. Raises ValueError."""
    if (bias.shape, bias.dtype, bias.device) != (x.shape[:1], x.dtype, x.device) or not bias.is_contiguous():
        raise ValueError(
            f"row_bias {tuple(bias.shape)} of {bias.dtype} on {bias.device}: give {len(x)} dense elements of {x.dtype} beside x"
        )
    if table.has_bias:
        raise ValueError("row_bias and slices with biases: give one of them")
