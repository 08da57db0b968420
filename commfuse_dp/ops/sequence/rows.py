"""What the ops over a sharded sequence share: rows of the ranks' shards, how ranks agree on them, and how they move.

R ranks; rank j keeps s_j positions of a sequence of S = s_0 + s_1 + ... positions. `dim` is the dimension of the sequence:

    shard of rank j      [*outer, s_j, *inner, K], contiguous     =  rows [outer * s_j * inner, K], which travel as they lie
    whole tensor         [*outer, S, *inner, K]                   =  [outer, S * inner, K], where shard j is a block of columns

A slice is a range of rows of one shard. In the whole tensor it is at most three blocks: a part of one batch entry, whole
entries, a part of another. Where `outer` is 1 (one sequence, or dim = 0) it is one block in a row.

[Note: Blocks of several batch entries]
A product over such a block is made entry by entry where it lies, or in one GEMM and copied. Per entry, W is packed anew
(columns x width elements for every GEMM); a copy moves positions x columns elements. So it is entry by entry where they have at
least as many positions as W is wide.

Ranks whose shards do not fit together would wait for each other, or add up what does not belong together. So ranks compare
shapes, dtypes and which gradients are wanted before anything else moves: at every call if `sizes` is not given, for the sizes
are then exchanged with it, else once for each new combination.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.collectives import sessions
from commfuse_dp.collectives.agreement import REMEMBERED, agree, calls_of
from commfuse_dp.collectives.arguments import SUMMABLE, even_sizes
from commfuse_dp.collectives.bound import Binder, Owner, Rows, Types, binder
from commfuse_dp.collectives.execution import Bindings
from commfuse_dp.collectives.sessions import Purpose, begin, execute
from commfuse_dp.ops.compat import hidden, transformed, transforms_active, unseen
from commfuse_dp.program.build import build
from commfuse_dp.program.gather import gather
from commfuse_dp.program.layer import backward, through
from commfuse_dp.program.layout import Tensor, rectangles
from commfuse_dp.program.operations import Collective, Problem, Program
from commfuse_dp.program.orders import check_order
from commfuse_dp.program.scatter import scatter
from commfuse_dp.transport.base import Transport

TENSOR_PARALLEL = Purpose("tensor parallelism")
GATHERED = Tensor("rows", "rows")
SUMMED = Tensor("sums", "sums")
TOTALED = Tensor("totals", "totals")  # sums that all ranks get
TOKENS = Tensor("tokens", "rows")  # gathered, and
RESULTS = Tensor("results", "sums")  # what a function makes of them, summed up
Layout = Literal["sharded", "replicated"]  # of a sequence outside of a layer
# Every product reads its weight anew. On one core with weights of 8 MiB a pass by slices of 64, 128, 256 rows took 1.57,
# 1.35, 1.13 times as long as by one product: benchmarks/results/2026-11-22_tensor-parallel_sweep.md.
THIN_ROWS = 256
MOST_ROUNDS = 4


class Region(NamedTuple):
    """A block of the whole tensor [outer, S * inner, K], and the rows of a slice that it is."""

    entries: slice
    positions: slice
    rows: slice | None  # None: all of the slice
    at: tuple[int, slice] | None  # where it lies, if that is in one batch entry

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.entries, self.positions]

    def rows_of(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.rows is None else part[self.rows]


class Blocks(NamedTuple):
    """Where the rows of a slice lie in the whole tensor.

    pick: of the whole tensor, the rows, [rows, K]: a view where they lie in a row, else a copy."""

    regions: tuple[Region, ...]
    pick: Callable[[torch.Tensor], torch.Tensor]


class Tokens:
    """Which rows the ranks keep.

    Attributes:
        sizes: positions of every rank; `length`: of all of them.
        rows: of every rank's shard. bases: how many rows lie in front of it.
        width: columns of the whole tensor, S * inner.
        blocks: of rows start to stop of all shards, which are of one of them."""

    __slots__ = ("bases", "blocks", "inner", "length", "outer", "rows", "sizes", "width")

    def __init__(self, outer: int, inner: int, sizes: tuple[int, ...]) -> None:
        self.outer, self.inner, self.sizes = outer, inner, sizes
        self.length = sum(sizes)
        self.width = self.length * inner
        self.rows = tuple(outer * size * inner for size in sizes)
        self.bases = tuple(accumulate(self.rows[:-1], initial=0))
        self.blocks = _Blocks(self)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of a contiguous whole tensor as [outer, S * inner, K]."""
        return tensor.view(self.outer, self.width, tensor.shape[-1])

    def blocks_of(self, rank: int) -> Blocks:
        """Of a rank's whole shard."""
        return self.blocks[self.bases[rank], self.bases[rank] + self.rows[rank]]


class _Blocks(dict[tuple[int, int], Blocks]):
    """Worked out once: every product of every call asks for some."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self._sizes, self._inner, self._bases = tokens.sizes, tokens.inner, tokens.bases

    def __missing__(self, place: tuple[int, int]) -> Blocks:
        start, stop = place
        found = []
        if stop > start:
            rank = bisect_right(self._bases, start) - 1  # the last of those that begin there: the others are empty
            ahead, first = sum(self._sizes[:rank]) * self._inner, self._bases[rank]
            for part in rectangles(start - first, stop - first, self._sizes[rank] * self._inner):
                positions = slice(ahead + part.column_start, ahead + part.column_stop)
                rows = slice(part.offset, part.offset + part.numel) if part.numel < stop - start else None
                at = (part.row_start, positions) if part.row_stop - part.row_start == 1 else None
                found.append(Region(slice(part.row_start, part.row_stop), positions, rows, at))
        at = found[0].at if len(found) == 1 else None
        blocks = self[place] = Blocks(tuple(found), itemgetter(at) if at is not None else functools.partial(_pick, found))
        return blocks


@functools.lru_cache(maxsize=1024)
def tokens_of(outer: int, inner: int, sizes: tuple[int, ...]) -> Tokens:
    """For who is asked anew at every call: the blocks of a division are worked out once."""
    return Tokens(outer, inner, sizes)


def tokens_among(x: torch.Tensor, dim: int, sizes: tuple[int, ...], layout: Layout, world_size: int) -> Tokens:
    """As `agree_on` finds them, of what is agreed on."""
    if layout == "replicated":
        return tokens_of(1, 1, summed_by(x, world_size))
    return tokens_of(*map(math.prod, beside(x, dim, layout)), sizes)


def summed_by(x: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """How many rows of a replicated x each rank sums up for all."""
    return even_sizes(math.prod(x.shape[:-1]), world_size)


def beside(x: torch.Tensor, dim: int, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of x before the sequence and after it, but for the last dimension; replicated: all of it is before."""
    if layout == "replicated":
        return tuple(x.shape[:-1]), ()
    return tuple(x.shape[:dim]), tuple(x.shape[dim + 1 : -1])


def shape_with(tensor: torch.Tensor, dim: int, positions: int, width: int) -> tuple[int, ...]:
    """The tensor's shape with another number of positions and another last dimension."""
    return (*tensor.shape[:dim], positions, *tensor.shape[dim + 1 : -1], width)


# ---- products of slices ----------------------------------------------------------------------------------------------
def _pick(regions: Sequence[Region], whole: torch.Tensor) -> torch.Tensor:
    parts = [region.of(whole).flatten(0, -2) for region in regions]
    return whole[:0].flatten(0, -2) if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)


def place(rows: torch.Tensor, whole: torch.Tensor, blocks: Blocks) -> None:
    """Inverse of `Blocks.pick`."""
    for region in blocks.regions:
        block = region.of(whole)
        block.copy_(region.rows_of(rows).view(block.shape))


def product(left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = left @ right (+ added); of another dtype than the operands: converted once, at the end."""
    if out.dtype != left.dtype:
        out.copy_(left @ right if added is None else torch.addmm(added, left, right))
    elif added is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(added, left, right, out=out)


class Terms:
    """out = sum over i and rows of left_i[:, rows] @ W_i[rows], term by term."""

    def __init__(self, lefts: Mapping[int, torch.Tensor], out: torch.Tensor) -> None:
        self._lefts, self._out, self._started = lefts, out, False

    def __call__(self, number: int, rows: slice, weight: torch.Tensor) -> None:
        left = self._lefts[number][:, rows]
        if self._started:
            self._out.addmm_(left, weight)
        else:
            torch.mm(left, weight, out=self._out)
            self._started = True


def product_to(rows: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, whole: torch.Tensor, blocks: Blocks) -> None:
    """Rows of a slice times `right`, to their place in the whole tensor, which is of their dtype."""
    for entries, positions, part, at in blocks.regions:
        left = rows if part is None else rows[part]
        if at is not None:
            if bias is None:
                torch.mm(left, right, out=whole[at])
            else:
                torch.addmm(bias, left, right, out=whole[at])
            continue
        block = whole[entries, positions]
        if block.shape[1] >= right.shape[0]:
            for entry, piece in zip(block, left.split(block.shape[1]), strict=True):
                product(piece, right, bias, entry)
        else:
            made = left @ right if bias is None else torch.addmm(bias, left, right)
            block.copy_(made.view(block.shape))


def product_from(
    whole: torch.Tensor, blocks: Blocks, right: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Rows that lie in the whole tensor, times `right`, to the rows of a slice."""
    for entries, positions, part, at in blocks.regions:
        to = out if part is None else out[part]
        if at is not None:
            if bias is None and out.dtype == whole.dtype:
                torch.mm(whole[at], right, out=to)
            else:
                product(whole[at], right, bias, to)
            continue
        block = whole[entries, positions]
        if block.shape[1] >= right.shape[1]:
            for entry, rows in zip(block, to.split(block.shape[1]), strict=True):
                product(entry, right, bias, rows)
        else:
            product(block.flatten(0, -2), right, bias, to)


# ---- options ---------------------------------------------------------------------------------------------------------
Ranks = tuple[dist.ProcessGroup | None, Transport | None]  # a group, or the transport to use
How = tuple[str, int | None, int]  # order, slices_per_rank, rank


class Place(NamedTuple):
    """Over which ranks an op communicates, and how."""

    group: dist.ProcessGroup | None
    transport: Transport | None
    order: str
    slices_per_rank: int | None
    rank: int
    world_size: int
    name: str  # in errors and measurements

    @property
    def ranks(self) -> Ranks:
        return self.group, self.transport

    @property
    def how(self) -> How:
        return self.order, self.slices_per_rank, self.rank

    def run(self, rows: Rows, sizes: tuple[int, ...], bindings: Bindings, device: torch.device) -> None:
        """Gather rows (of GATHERED), or sum them up (of SUMMED). sizes: rows of every rank."""
        session = begin(self.group, self.transport, device, TENSOR_PARALLEL)
        execute(self.name, moves(self.how, sizes, (rows,)), (bindings,), session, device)


def gathered_rows(width: int, dtype: torch.dtype) -> Rows:
    return Rows(GATHERED, (width,), Types.moved(dtype))


def summed_rows(width: int, partial: torch.dtype, total: torch.dtype) -> Rows:
    """partial, total: dtypes of the partial sums, as they travel, and of the result."""
    return Rows(SUMMED, (width,), Types.summed(partial, total))


def totaled_rows(width: int, partial: torch.dtype, total: torch.dtype) -> Rows:
    """As `summed_rows`."""
    return Rows(TOTALED, (width,), Types.summed(partial, total))


@hidden
def gathered(x: torch.Tensor, dim: int, tokens: Tokens, sited: Place) -> torch.Tensor:
    """All positions of x, [*outer, S, *inner, K]. No autograd."""
    made = x.new_empty(shape_with(x, dim, sum(tokens.sizes), x.shape[-1]))
    whole = tokens.whole(made)

    def consume(owner: Owner, part: torch.Tensor) -> None:
        place(part, whole, tokens.blocks[owner.start, owner.stop])

    shard = Bindings(x.contiguous().flatten(0, -2), consume=consume)
    sited.run(gathered_rows(x.shape[-1], x.dtype), tokens.rows, shard, x.device)
    return made


class GraphPlace(NamedTuple):
    """A `Place`, as a graph knows it: see graph_ops.py."""

    layer: torch.Tensor | None  # number of the served layer that it belongs to
    rank: int
    world_size: int
    call: int = 0  # number of the call that it belongs to; 0: of a layer, whose calls get theirs in the graph


def _default_slices(rows: tuple[int, ...], tensors: Sequence[Tensor]) -> int:
    """As few as leave little exposed, unless they would make products thin (`THIN_ROWS`). At two ranks 2, as one slice would
    leave half of the compute with nothing to hide; at more ranks 1. Of sums that all ranks get the last slice's way back is
    exposed: up to `MOST_ROUNDS`."""
    if TOTALED in tensors:
        return max(1, min(MOST_ROUNDS, max(rows) // THIN_ROWS))
    return 2 if len(rows) == 2 and max(rows) >= 2 * THIN_ROWS else 1


@functools.lru_cache(maxsize=1024)
def moves(how: How, sizes: tuple[int, ...], rows: tuple[Rows, ...]) -> Binder:
    """What gathers rows (of GATHERED), sums them up (of SUMMED), or both in one pass (a layer's backward); sums them up for all
    ranks (of TOTALED); or gathers TOKENS and sums up their RESULTS."""
    order, slices_per_rank, rank = how
    tensors = [entry.tensor for entry in rows]
    m = _default_slices(sizes, tensors) if slices_per_rank is None else slices_per_rank

    def problem(collective: Collective, tensor: Tensor) -> Problem:
        return Problem(collective, sizes, order, m, tensor=tensor)

    there, back = problem("all_gather", GATHERED), problem("reduce_scatter", SUMMED)
    if TOTALED in tensors:
        return binder(build(problem("all_reduce", TOTALED), rank), rows)
    if RESULTS in tensors:
        rows_in, rows_out = problem("all_gather", TOKENS), problem("reduce_scatter", RESULTS)
        return binder(through(rows_in, rows_out, rank), rows)
    if SUMMED not in tensors:
        program = Program((there,), rank, tuple(gather(there, rank)))
    elif GATHERED not in tensors:
        program = Program((back,), rank, tuple(scatter(back, rank)))
    else:
        program = backward(there, back, rank)
    return binder(program, rows)


def place_of(
    group: dist.ProcessGroup | None, transport: Transport | None, order: str, slices_per_rank: int | None, name: str
) -> Place:
    """slices_per_rank None: as many as suit the rows of a call."""
    check_order(order)
    rank, world_size = sessions.rank_and_size(group, transport)
    if slices_per_rank is not None and slices_per_rank < 1:
        raise ValueError(f"{name}: slices_per_rank={slices_per_rank}: must be at least 1, or None")
    return Place(group, transport, order, slices_per_rank, rank, world_size, name)


def check_dim(name: str, x: torch.Tensor, dim: int, sizes: object = None, layout: Layout = "sharded") -> int:
    """The dimension of the sequence, counted from the front; replicated: the first, for it does not matter."""
    if layout == "replicated":
        if sizes is not None:
            raise ValueError(f"{name}: sizes={sizes} with layout='replicated': every rank keeps all positions; leave sizes out")
        if x.dim() < 2:
            raise ValueError(f"{name}: an input of shape {tuple(x.shape)}: [..., D] with at least two dimensions is needed")
        return 0
    if layout != "sharded":
        raise ValueError(f"{name}: layout={layout!r}: must be 'sharded' or 'replicated'")
    if x.dim() < 2 or not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"{name}: dim={dim} of an input of shape {tuple(x.shape)}: the sequence must be one of its "
            "dimensions, and not the last"
        )
    return dim % x.dim()


def check_dtype(name: str, x: torch.Tensor, others: Mapping[str, torch.Tensor | None]) -> None:
    if x.dtype not in SUMMABLE:
        raise ValueError(f"{name}: x is {x.dtype}: only {', '.join(map(str, SUMMABLE))} can be reduced; convert it first")
    for what, tensor in others.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(
                f"{name}: x is {x.dtype}, {what} is {tensor.dtype}: convert one of them, or run under torch.autocast, "
                "which does"
            )


# ---- agreement -------------------------------------------------------------------------------------------------------
def agree_on(
    place: Place,
    x: torch.Tensor,
    dim: int,
    wanted: Sequence[bool],
    sizes: Sequence[int] | None,
    own: int,
    layout: Layout = "sharded",
    **more: object,
) -> Tokens:
    """What the ranks keep, once all of them agree on the rest: see collectives/agreement.py.

    own: positions that this rank keeps. sizes: what the caller says that every rank does; None: nothing. layout "replicated":
    the rows of x are divided evenly, whatever else is said. more: what else must be alike.
    Raises ValueError if `sizes` is not of this group or says something else about this rank; MismatchError if ranks differ."""
    outer, inner, known = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 : -1]), None
    rows: object = "of the ranks' shards"
    if layout == "replicated":
        outer, inner, rows = 1, 1, math.prod(x.shape[:-1])
        known = summed_by(x, place.world_size)
        own = known[place.rank]
    elif sizes is not None:
        known = tuple(int(size) for size in sizes)
        if len(known) != place.world_size or any(size < 0 for size in known):
            raise ValueError(f"{place.name}: sizes={list(known)}: one size >= 0 for each of {place.world_size} ranks is needed")
        if known[place.rank] != own:
            raise ValueError(
                f"{place.name}: sizes[{place.rank}]={known[place.rank]}, but this rank has {own} positions along dim {dim}"
            )
    description: dict[str, object] = {
        "layout": layout,
        "dim": dim,
        "dtype": x.dtype,
        "batch entries": outer,
        "columns a position": inner,
        "rows": rows,
        "gradients wanted": tuple(wanted),
        "slices_per_rank": place.slices_per_rank,
        "order": place.order,
        **more,
    }
    alone = place.world_size == 1
    transport = None if alone else sessions.transport_for(place.group, place.transport, x.device, TENSOR_PARALLEL)
    with unseen():
        return tokens_of(outer, inner, agree(transport, place.name, description, own=own, sizes=known))


def find_call(ranks: Ranks, how: Hashable, x: torch.Tensor, params: Sequence[torch.Tensor | None]) -> tuple[Hashable, Any]:
    """(signature of a call, what it comes to: a Column or Row; None: it is new here).

    The signature is all that this depends on: shapes, dtypes and who requires a gradient, options, the grad mode. Calls are
    forgotten when the ranks forget what they have agreed on. Those whose sizes are exchanged are none of them: what such a
    call comes to depends on other ranks."""
    signature: list[Hashable] = [torch.is_grad_enabled(), how, x.shape, x.dtype, x.requires_grad]
    for tensor in params:
        signature += (None,) if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
    name, (group, transport) = tuple(signature), ranks
    if transport is None:
        transport = sessions.open_transport_for(group, x.device, TENSOR_PARALLEL)
    return name, None if transport is None else calls_of(transport).get(name)


def remember(ranks: Ranks, device: torch.device, signature: Hashable, call: object) -> None:
    """For `find_call`."""
    group, transport = ranks
    if transport is None:
        transport = sessions.open_transport_for(group, device, TENSOR_PARALLEL)
    if transport is None:
        return
    calls = calls_of(transport)
    if len(calls) >= REMEMBERED:
        calls.clear()
    calls[signature] = call


def exchange_lengths(name: str, transport: Transport, shard: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The positions along `dim` of every rank's shard, once all ranks agree on the rest of it. Raises as `agree_on` does."""
    if transforms_active():
        raise transformed(name)
    place = place_of(None, transport, "pairwise", 1, name)
    at = check_dim(name, shard, dim)
    return agree_on(place, shard, at, (shard.requires_grad,), None, int(shard.shape[at]), features=shard.shape[-1]).sizes
