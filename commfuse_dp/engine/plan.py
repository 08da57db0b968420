"""Units and their geometry: which bytes of which parameter travel in which slice.

A *unit* is what is gathered and reduced together: one fused linear (weight and bias) or one small module whose parameters
are gathered whole (a norm, an embedding). Its first part, the *main* part, is cut along dim 0 by FSDP2's chunk rule and each
rank's rows into `slices_per_rank` slices; the other parts, the *heads* (biases), travel with the first slice of their owner:

    segment of one owner:   | head: bias rows | main rows of slice 0 | main rows of slice 1 | ...
    slices:                 |<------------- slice 0 ---------------->|<----- slice 1 ------>|

so that a slice is one contiguous byte range, both of the published parameters and of the partial gradients. Heads and main rows
start on a cache line, whatever the dtype.

Frameworks that cut flattened tensors (DeepSpeed) give `flat_bounds`, the flat range of each rank: units of one part, whose
slices may begin and end in the middle of a row. Their pieces are whole rows or parts of one row. A `replicated` unit
(ZeRO-1/2) has slices of gradients only: every rank keeps the whole parameter, and nothing is published.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.program.layout import FlatLayout, chunk_bounds, cut, rectangles
from commfuse_dp.transport.one_sided.ring import ALIGNMENT, align


class ParamSlot(Protocol):
    """One parameter of a framework, seen from the engine. The shard is dim-0 rows under FSDP2's chunk rule, or a flat range."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    replaced: bool  # the framework's parameter is another one now than the one that was published last

    def local(self) -> torch.Tensor:
        """This rank's rows, [rows, *shape[1:]], or flat range, [elements], in the parameter's own dtype (may be empty)."""
        ...

    def published(self) -> bool:
        """The values that the parameter has now are those of the step: so is its gradient. Whether it is another one than
        before."""
        ...

    def wants(self) -> tuple[bool, torch.dtype]:
        """Whether the parameter wants a gradient now, and in which dtype `deliver` wants it."""
        ...

    @property
    def keeps_delivered(self) -> bool:
        """Whether the tensor given to `deliver` is kept. False: what is needed has been copied, on the current stream."""
        ...

    def deliver(self, grad: torch.Tensor) -> None:
        """Take the reduced gradient of what `local` covers: set or accumulate it, run the parameter's gradient hooks.

        On a device this runs on a stream beside the backward: see [Note: Streams of a step] in ordering.py."""
        ...


class UnitPolicy(Protocol):
    """What the framework wants done with a unit, read anew in every step."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of the gathered parameters; None: the parameter's own."""
        ...

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype that gradients are accumulated in over microbatches; None: that of the computed gradient."""
        ...

    @property
    def keep_after_forward(self) -> bool: ...

    @property
    def reduce_grads(self) -> bool: ...

    @property
    def all_reduce_grads(self) -> bool:
        """With replicas (HSDP): whether to sum over them now."""
        ...

    @property
    def divide_factor(self) -> float | None:
        """None: the number of data-parallel ranks."""
        ...


class Settings(NamedTuple):
    """What a `UnitPolicy` wants done with gradients: read once in a backward, for all units that share the policy."""

    reduce_dtype: torch.dtype | None
    reduce_grads: bool
    all_reduce_grads: bool
    divide_factor: float | None

    @classmethod
    def of(cls, policy: UnitPolicy) -> Settings:
        return cls(policy.reduce_dtype, policy.reduce_grads, policy.all_reduce_grads, policy.divide_factor)


@dataclass(frozen=True)
class UnitSlice:
    """One slice of a unit: rows of its main part and, in an owner's first slice, the heads; or a flat range of elements."""

    owner: int
    index: int
    start: int  # rows of the main part, or flat elements
    stop: int
    offset: int  # bytes from the start of the owner's segment
    nbytes: int
    heads: tuple[tuple[int, int, int, int], ...]  # (part, byte offset in the slice, first row, rows)
    main_offset: int  # byte offset in the slice, -1: the main part is not included
    absent: bool = field(init=False)  # the owner has no such slice: see `absent_slice`

    def __post_init__(self) -> None:
        object.__setattr__(self, "absent", self.main_offset < 0 and not self.heads)

    def __str__(self) -> str:
        return f"{self.owner}.{self.index} ({self.start}:{self.stop})"


def absent_slice(owner: int, index: int) -> UnitSlice:
    """Stands for a slice that other owners have: a step that all ranks of a lockstep transport take."""
    return UnitSlice(owner, index, 0, 0, 0, 0, (), -1)


@dataclass(frozen=True)
class _Part:
    bounds: tuple[tuple[int, int], ...]  # rows of every owner
    slices_per_rank: int
    row_shape: tuple[int, ...]
    row_numel: int


class Geometry(ABC):
    """Byte layout of a unit's segments for one element size and one choice of parts."""

    def __init__(self, dtype: torch.dtype, segments: Sequence[tuple[tuple[UnitSlice, ...], int]]) -> None:
        self.dtype = dtype
        self.slices = tuple(own for own, _ in segments)
        self.segment_bytes = tuple(size for _, size in segments)
        self.largest_slice = max((s.nbytes for own in self.slices for s in own), default=0)
        self.owed = tuple(sum(align(s.nbytes) for s in own) for own in self.slices)
        """Bytes that are sent to each owner, each slice on a cache line."""

    @abstractmethod
    def pieces(self, item: UnitSlice, data: torch.Tensor) -> list[Piece]:
        """Views of one slice's memory, 1-D: uint8, or in the geometry's dtype."""

    @abstractmethod
    def shards(self, own: Sequence[UnitSlice], segment: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        """Where an owner's parameters go in its segment: (view of the segment, part, first index in dim 0 of the shard)."""


class RowGeometry(Geometry):
    """Whole rows: heads first, then the main rows."""

    def __init__(self, parts: Sequence[_Part], world_size: int, dtype: torch.dtype, include: Sequence[bool]) -> None:
        super().__init__(dtype, [self._cut(parts, owner, dtype.itemsize, include) for owner in range(world_size)])
        self._row_shapes = [part.row_shape for part in parts]

    @staticmethod
    def _cut(parts: Sequence[_Part], owner: int, itemsize: int, include: Sequence[bool]) -> tuple[tuple[UnitSlice, ...], int]:
        heads, offset = [], 0
        for number, part in enumerate(parts[1:], start=1):
            start, stop = part.bounds[owner]
            if include[number] and stop > start:
                heads.append((number, offset, start, stop - start))
                offset = align(offset + (stop - start) * part.row_numel * itemsize)
        main = parts[0]
        low, high = main.bounds[owner]
        rows = cut(owner, low, high, main.slices_per_rank) if include[0] else ()
        if not rows:
            return ((UnitSlice(owner, 0, low, low, 0, offset, tuple(heads), -1),) if heads else ()), offset
        row_bytes = main.row_numel * itemsize
        out, at = [], 0
        for number, piece in enumerate(rows):
            begin = offset if number == 0 else 0  # the heads precede the first slice's rows
            size = begin + piece.size * row_bytes
            out.append(UnitSlice(owner, number, piece.start, piece.stop, at, size, tuple(heads) if number == 0 else (), begin))
            at += size
        return tuple(out), at

    def pieces(self, item: UnitSlice, data: torch.Tensor) -> list[Piece]:
        out = []
        numbers = data if data.dtype == self.dtype else data.view(self.dtype)
        for part, offset, row_start, rows in item.heads:
            shape, start = self._row_shapes[part], offset // self.dtype.itemsize
            out.append(Piece(part, row_start, numbers[start : start + rows * prod(shape)].view(rows, *shape)))
        if item.main_offset >= 0:
            main = numbers[item.main_offset // self.dtype.itemsize :] if item.main_offset else numbers
            view = main.view(item.stop - item.start, *self._row_shapes[0])
            out.append(tuple.__new__(Piece, (0, item.start, view, 0)))  # without a frame in every layer
        return out

    def shards(self, own: Sequence[UnitSlice], segment: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        pieces = [piece for item in own for piece in self.pieces(item, segment[item.offset : item.offset + item.nbytes])]
        return [(p.tensor, p.part, p.row_start - own[0].start if p.part == 0 else 0) for p in pieces]


class FlatGeometry(Geometry):
    """One part in flat ranges: a slice is whole rows with at most a partial row before and after them."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, *, empty: bool) -> None:
        segments = []
        for owner, (low, high) in enumerate(layout.bounds):
            size = dtype.itemsize
            own = tuple(
                UnitSlice(owner, s.index, s.start, s.stop, (s.start - low) * size, (s.stop - s.start) * size, (), 0)
                for s in layout.slices(owner)
            )
            segments.append(((), 0) if empty else (own, (high - low) * size))
        super().__init__(dtype, segments)
        self._row_elems = layout.row_elems

    def pieces(self, item: UnitSlice, data: torch.Tensor) -> list[Piece]:
        flat = data if data.dtype == self.dtype else data.view(self.dtype)
        return [
            Piece(
                0,
                r.row_start,
                flat[r.offset : r.offset + r.numel].view(r.row_stop - r.row_start, r.column_stop - r.column_start),
                r.column_start,
            )
            for r in rectangles(item.start, item.stop, self._row_elems)
        ]

    def shards(self, own: Sequence[UnitSlice], segment: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        return [(segment.view(self.dtype), 0, 0)] if own else []


class Unit:
    """Parameters gathered and reduced together, on every rank alike. `slots[0]` is the main part."""

    def __init__(
        self,
        index: int,
        name: str,
        slots: Sequence[ParamSlot],
        policy: UnitPolicy,
        slices_per_rank: int | None,
        *,
        flat_bounds: Sequence[tuple[int, int]] | None = None,
        replicated: bool = False,
    ) -> None:
        if flat_bounds is not None and (len(slots) != 1 or len(slots[0].shape) > 2):
            raise ValueError(f"layer {name!r}: a unit in flat ranges has one parameter of one or two dimensions")
        self.index = index
        self.name = name
        self.slots = tuple(slots)
        self.policy = policy
        self.slices_per_rank = slices_per_rank or 1
        self._automatic = slices_per_rank is None
        self.anchor: torch.Tensor  # see `new_anchor`
        self._sets = 0
        self.operands: weakref.WeakSet[Any] = weakref.WeakSet()  # which have the same anchor
        self.replicated = replicated
        self._flat_bounds = flat_bounds
        self._geometries: dict[tuple[torch.dtype, tuple[bool, ...]], Geometry] = {}
        self._parts: list[_Part] | None = None
        self._flat: FlatLayout | None = None
        # --- state of the running step, kept by the engine
        self.params: Geometry  # layout of the published parameters
        self.expects_backward = False  # the next read is recorded by autograd
        self.pending_backwards = 0  # forward calls whose backward has not come yet
        # Unreduced gradients of earlier microbatches, whole, per part; None for a part that has none.
        self.accumulated: list[torch.Tensor | None] | None = None
        self.accumulated_for: torch.Tensor | None = None  # the anchor of the parameters that these are of
        self.replica_partial: torch.Tensor | None = None  # reduced over the shard group but not over the replicas
        self.scatters = 0  # reduce-scatters begun so far: sequence number of the next one

    def new_anchor(self, device: torch.device) -> None:
        """For parameters that are not those of before: see [Note: Anchors] in ops/linear.py."""
        self._sets = (self._sets + 1) % (1 << 24)  # exact in float32
        self.anchor = torch.full((1,), float(self._sets), device=device, requires_grad=True)
        for operand in self.operands:
            operand.anchor = self.anchor

    def bind(self, world_size: int, comfortable: int) -> Geometry:
        """Lay out the published parameters, for good once the compute dtype is. Called again, it forgets the layout before.

        comfortable: bytes above which a slice is cut further, if the number of slices was left to us.
        """
        self._geometries.clear()
        if self._automatic:
            rows, per_row = -(-self.slots[0].shape[0] // world_size), prod(self.slots[0].shape[1:])
            if self._flat_bounds is not None:
                rows = max(1, -(-max(stop - start for start, stop in self._flat_bounds) // max(1, per_row)))
            wide = max(dtype.itemsize for dtype in (self.slots[0].local().dtype, self.policy.reduce_dtype) if dtype is not None)
            self.slices_per_rank = max(1, min(rows, -(-rows * per_row * wide // comfortable)))
        if self._flat_bounds is not None:
            self._flat = FlatLayout(self._flat_bounds, prod(self.slots[0].shape[1:]), self.slices_per_rank)
        self._parts = []
        for slot in self.slots:
            row_shape = tuple(slot.shape[1:])
            bounds = chunk_bounds(slot.shape[0], world_size)
            self._parts.append(_Part(bounds, self.slices_per_rank, row_shape, prod(row_shape)))
        self._world_size = world_size
        dtypes = {self.policy.compute_dtype or slot.local().dtype for slot in self.slots}
        if len(dtypes) != 1:
            raise ConfigError(
                f"layer {self.name!r} has parameters of several dtypes ({dtypes}): use one dtype for all of them."
            )
        self.params = self.geometry(dtypes.pop(), (not self.replicated,) * len(self.slots))
        return self.params

    def largest_slice(self, dtype: torch.dtype) -> int:
        """Bytes of the largest slice of gradients (and of parameters) that travel in `dtype`."""
        return self.geometry(dtype, (True,) * len(self.slots)).largest_slice

    def least_slice(self, world_size: int) -> int:
        """At least the bytes of the largest slice, before layouts are fixed, cut as finely as it may be."""
        dtypes = (self.slots[0].local().dtype, self.policy.compute_dtype, self.policy.reduce_dtype)
        wide = max(dtype.itemsize for dtype in dtypes if dtype is not None)
        per_row = max(1, prod(self.slots[0].shape[1:]))
        if self._flat_bounds is not None:
            longest = max(stop - start for start, stop in self._flat_bounds)
            cut = 0 if self._automatic else longest // self.slices_per_rank
            return (cut + 2 * per_row) * wide + ALIGNMENT  # cuts lie between rows, as far as they can
        own = -(-self.slots[0].shape[0] // world_size)
        rows = 1 if self._automatic else -(-own // self.slices_per_rank)
        heads = sum(-(-slot.shape[0] // world_size) * prod(slot.shape[1:]) * wide + ALIGNMENT for slot in self.slots[1:])
        return rows * per_row * wide + heads + ALIGNMENT

    def owed_bytes(self, world_size: int) -> int:
        """At least the largest of `Geometry.owed` in the compute dtype, before layouts are fixed."""
        gaps = ALIGNMENT * (max(64, self.slices_per_rank) + len(self.slots))  # more slices than 64 only if asked for
        if self._flat_bounds is not None:
            return max(stop - start for start, stop in self._flat_bounds) * self.dtype.itemsize + gaps
        shapes = self.whole_shapes()
        return sum(-(-shape[0] // world_size) * prod(shape[1:]) for shape in shapes) * self.dtype.itemsize + gaps

    @property
    def accumulated_dtype(self) -> torch.dtype | None:
        """Of what earlier microbatches have left; None: nothing."""
        return next((kept.dtype for kept in self.accumulated or () if kept is not None), None)

    @property
    def by_rows(self) -> bool:
        """Shards are whole rows, also where they were given as flat ranges."""
        row = max(1, prod(self.slots[0].shape[1:]))
        return self._flat_bounds is None or all(start % row == 0 and stop % row == 0 for start, stop in self._flat_bounds)

    @property
    def split_rows(self) -> tuple[int, ...]:
        """Rows that come in several pieces."""
        return self._flat.split_rows if self._flat is not None else ()

    def geometry(self, dtype: torch.dtype, include: tuple[bool, ...]) -> Geometry:
        key = (dtype, include)
        found = self._geometries.get(key)
        if found is None:
            assert self._parts is not None, "bind() first"
            if self._flat is not None:
                found = FlatGeometry(self._flat, dtype, empty=not include[0])
            else:
                found = RowGeometry(self._parts, self._world_size, dtype, include)
            self._geometries[key] = found
        return found

    def whole_shapes(self) -> list[tuple[int, ...]]:
        return [slot.shape for slot in self.slots]

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the gathered parameters: final once they have been bound, in the first step."""
        return self.params.dtype if self._parts is not None else self.policy.compute_dtype or self.slots[0].local().dtype
