"""all_gather, reduce_scatter, all_reduce and all_to_all with callbacks, for users of torch.distributed.

The same arguments everywhere:

* group: process group; None: the default one. All ranks of it must make the same calls in the same order.
* order: 'pairwise' (straight between all ranks) or 'ring' (only from r to r+1).
* slices_per_rank: m of the paper; each rank's rows are cut into so many slices, each with a callback of its own.
* transport: an open transport to use instead of the group's own (which is opened on first use, see sessions.py).

Callbacks get an `Owner` (an int: the rank) and one slice of rows. They run in the caller's thread, in a fixed order, without
autograd, and must not call collectives on the same transport. The tensor given to `consume` is valid during the call only
and must not be written to. Every wait has the transport's deadline; its error names the peer and the slice.

`commfuse_dp.collectives.reference` has each function again, unfused, on torch.distributed's own collectives.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.collectives import arguments as args
from commfuse_dp.collectives.arguments import Op
from commfuse_dp.collectives.bound import Rows, Types, binder
from commfuse_dp.collectives.execution import Bindings, ConsumeFn, ProduceFn
from commfuse_dp.collectives.sessions import Session, begin, execute
from commfuse_dp.errors import MismatchError
from commfuse_dp.program.build import build
from commfuse_dp.program.layout import ONLY
from commfuse_dp.program.operations import Collective, Problem, Program
from commfuse_dp.program.orders import check_order
from commfuse_dp.transport.base import Transport


@torch.no_grad()
def all_gather(
    shard: torch.Tensor,
    consume: ConsumeFn | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    sizes: Sequence[int] | None = None,
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor | None:
    """Gather the ranks' shards along dim 0.

    Args:
        shard: [rows of this rank, ...]; any dtype; rows may differ from rank to rank and be 0, the rest must be equal.
        consume: consume(owner, slice) is called as soon as a slice is readable, own slices first, then those of
            r+1, r+2, ... (pairwise) or r-1, r-2, ... (ring), in row order.
        sizes: rows of every rank. If None they are exchanged first, which costs one round trip but also checks that all
            ranks agree on row shape and dtype.

    Returns the concatenation [sum of rows, ...] in rank order, or None if `consume` is given.

    Raises ValueError for arguments that cannot be; MismatchError if the ranks' shards do not fit together; DeadlineError
    or PeerLostError if a peer does not do its part.
    """
    check_order(order)
    args.check_rows("shard", shard)
    shard = shard.detach().contiguous()
    session = begin(group, transport, shard.device)
    found = _exchange_sizes(session, shard) if sizes is None else args.check_sizes(sizes, session.world_size)
    if found[session.rank] != shard.shape[0]:
        raise ValueError(f"sizes[{session.rank}]={found[session.rank]}, but shard has {shard.shape[0]} rows")
    out = None if consume is not None else shard.new_empty((sum(found), *shard.shape[1:]))
    base = sum(found[: session.rank])
    if out is not None:
        out[base : base + shard.shape[0]].copy_(shard)
    rows = Rows(ONLY, tuple(shard.shape[1:]), Types.moved(shard.dtype))
    _run("all_gather", (found, order, slices_per_rank), session, shard.device, rows, Bindings(shard, out, consume=consume))
    return out


@torch.no_grad()
def reduce_scatter(
    produce: ProduceFn | torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    op: Op = "sum",
    sizes: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor:
    """Sum the ranks' tensors; each rank keeps its rows of the sum.

    Args:
        produce: produce(owner, buffer) fills `buffer` [rows of the slice, ...] (reduce_dtype, uninitialised) with this
            rank's partial of the slice; called for r+1, r+2, ... (pairwise) or r-1, r-2, ... (ring), own slices last. Or a
            tensor [sum of sizes, ...] that holds all partials.
        out: receives this rank's rows, contiguous; None: a new tensor. Must not overlap the tensor given as `produce`.
        op: 'sum' or 'mean' (the sum divided by the number of ranks, in the wide type).
        sizes: rows kept by every rank. None: rows / N as torch.chunk does (FSDP2's rule), or, if only `out` is known, the
            rows of every rank's `out`, which are exchanged first.
        shape, dtype: of all rows together and of the result, where neither `out` nor a tensor tells them.
        reduce_dtype: dtype of the partials, in which they travel; default the dtype of the result.

    [Note: Order of the sum]
    The sum is made in float32 for half types (else in the widest dtype involved) and rounded once, as a left fold: pairwise
    in rank order 0, 1, 2, ...; ring in ring order owner+1, ..., owner, its running sums travelling in the wide type. Both are
    bitwise equal from run to run and from transport to transport; they differ from each other by rounding. For half types
    the ring moves twice the bytes: prefer pairwise there.

    Returns [sizes[rank], ...]. Raises as all_gather does.
    """
    rows, row_shape, out_dtype, device = args.scatter_shapes(produce, out, shape, dtype)
    partial_dtype = args.check_reduction(order, op, "dtype of the result", out_dtype, reduce_dtype)
    session = begin(group, transport, device)
    rank = session.rank
    found = args.kept_rows(sizes, rows, session.world_size, lambda: _exchange_sizes(session, out))
    result = torch.empty((found[rank], *row_shape), dtype=out_dtype, device=device) if out is None else out
    args.check_out(result, (found[rank], *row_shape), "reduce_scatter")
    bindings = Bindings(
        given=produce.detach().contiguous() if isinstance(produce, torch.Tensor) else None,
        target=result.detach(),
        produce=None if isinstance(produce, torch.Tensor) else produce,
        divisor=float(session.world_size) if op == "mean" else None,
    )
    kept = Rows(ONLY, tuple(row_shape), Types.summed(partial_dtype, out_dtype))
    _run("reduce_scatter", (found, order, slices_per_rank), session, device, kept, bindings)
    return result if out is None else out


@torch.no_grad()
def all_reduce(
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    op: Op = "sum",
    reduce_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor:
    """Sum (or mean) of the ranks' tensors, on all ranks: a reduce-scatter of the flattened tensor and an all-gather.

    Args:
        tensor: any shape, the same on all ranks.
        out: receives the result, contiguous, of the same shape and dtype; may be `tensor` itself. None: a new tensor.
        reduce_dtype: dtype in which the partials travel; default the tensor's.

    Every element is summed by one rank, so the result is bitwise the same on all; see reduce_scatter for the order.
    """
    partial_dtype = args.check_reduction(order, op, "tensor", tensor.dtype, reduce_dtype)
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
    args.check_out(result, tuple(tensor.shape), "all_reduce")
    if result.dtype != tensor.dtype:
        raise ValueError(f"out is {result.dtype}, tensor is {tensor.dtype}: they must be equal")
    session = begin(group, transport, tensor.device)
    how = args.even_sizes(tensor.numel(), session.world_size), order, slices_per_rank
    bindings = Bindings(
        given=tensor.detach().contiguous().view(-1),
        target=result.detach().view(-1),
        divisor=float(session.world_size) if op == "mean" else None,
    )
    rows = Rows(ONLY, (), Types.summed(partial_dtype, tensor.dtype))
    _run("all_reduce", how, session, tensor.device, rows, bindings)
    return result


@torch.no_grad()
def all_to_all(
    produce: ProduceFn | torch.Tensor,
    consume: ConsumeFn | None = None,
    *,
    sizes: Sequence[Sequence[int]] | Sequence[int] | None = None,
    row_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor | None:
    """Every rank sends a block of rows to every rank.

    Args:
        produce: produce(to, buffer) fills the slice owed to rank `to`: others' first, the own block last. Or a tensor of all
            blocks, one below the other in rank order.
        consume: consume(source, slice) as soon as a slice is readable: the own block first, then those of r-1, r-2, ...
        sizes: sizes[source][destination] in rows, the same table on all ranks; or only this rank's line of it, which is
            exchanged first. None: the rows of the tensor given as `produce`, divided as torch.chunk does, exchanged.
        row_shape, dtype, device: of the rows, if `produce` is a function (default: (), torch.get_default_dtype(), the CPU).

    Returns the blocks received, concatenated in the order of their sources, or None if `consume` is given.
    """
    check_order(order)
    given = produce if isinstance(produce, torch.Tensor) else None
    if given is not None:
        args.check_rows("produce", given)
        row_shape, dtype, device = tuple(given.shape[1:]), given.dtype, given.device
    else:
        row_shape, device = tuple(row_shape or ()), device if device is not None else torch.device("cpu")
        dtype = dtype if dtype is not None else torch.get_default_dtype()
    session = begin(group, transport, device)
    rank = session.rank
    line, table = args.line_of(sizes, rank, given, session.world_size)
    if table is None:
        table = tuple(tuple(row) for row in gather_integers(session, list(line)))
    if given is not None:
        args.check_total("the tensor to send", int(given.shape[0]), table[rank])
    received = sum(row[rank] for row in table)
    out = None if consume is not None else torch.empty((received, *row_shape), dtype=dtype, device=device)
    if given is not None:
        given = given.detach().contiguous()
        if out is not None:  # the own block
            start, at, size = sum(table[rank][:rank]), sum(row[rank] for row in table[:rank]), table[rank][rank]
            out[at : at + size].copy_(given[start : start + size])
    filled = None if isinstance(produce, torch.Tensor) else produce
    rows = Rows(ONLY, tuple(row_shape), Types.moved(dtype))
    _run("all_to_all", (table, order, slices_per_rank), session, device, rows, Bindings(given, out, filled, consume))
    return out


# ---- shared ----------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)  # programs repeat their calls
def _program(collective: Collective, rank: int, sizes: Any, order: str, slices_per_rank: int) -> Program:
    return build(Problem(collective, sizes, order, slices_per_rank), rank)


def _run(
    collective: Collective,
    how: tuple[Any, str, int],
    session: Session,
    device: torch.device,
    rows: Rows,
    bindings: Bindings,
    name: str | None = None,
) -> None:
    """how: sizes, order, slices_per_rank. name: in errors and measurements; None: the collective's."""
    bound = binder(_program(collective, session.rank, *how), (rows,))
    execute(name if name is not None else collective, bound, (bindings,), session, device)


def gather_lines(transport: Transport, line: torch.Tensor, name: str) -> torch.Tensor:
    """Every rank's line, in rank order: [ranks, ...]. name: in errors and measurements."""
    session = begin(None, transport, line.device)
    out = line.new_empty(session.world_size, *line.shape)
    out[session.rank] = line
    how = (1,) * session.world_size, "pairwise", 1
    _run(
        "all_gather",
        how,
        session,
        line.device,
        Rows(ONLY, tuple(line.shape), Types.moved(line.dtype)),
        Bindings(line[None], out),
        name,
    )
    return out


def gather_integers(session: Session, row: list[int]) -> list[list[int]]:
    """Every rank's list (all of one length), in rank order."""
    if session.transport is None:
        return [row]
    line = torch.tensor(row, dtype=torch.int64, device="cpu")
    found: list[list[int]] = gather_lines(session.transport, line, "exchange of sizes").tolist()
    return found


def _exchange_sizes(session: Session, shard: torch.Tensor | None) -> tuple[int, ...]:
    """Rows of every rank's shard. Raises MismatchError unless row shapes and dtypes are equal."""
    assert shard is not None
    kind = zlib.crc32(f"{tuple(shard.shape[1:])} {shard.dtype}".encode())
    everyone = gather_integers(session, [int(shard.shape[0]), kind])
    for rank, (_, other) in enumerate(everyone):
        if other != kind:
            assert session.transport is not None
            here, there = map(session.transport.membership.called, (session.rank, rank))
            raise MismatchError(
                f"rank {here} has rows of shape {tuple(shard.shape[1:])} and {shard.dtype}; rank {there} has others. "
                "All ranks need the same row shape and dtype; only the number of rows may differ."
            )
    return tuple(rows for rows, _ in everyone)
