"""The same four functions, unfused, built on torch.distributed's own collectives only: oracle of tests, and for comparison.

Each gathers or reduces everything first and computes then (or the other way round), as a framework without overlap does.
`order`, `slices_per_rank` and `transport` are accepted so that the functions can be exchanged: order and slices_per_rank say
in which pieces the callbacks get the data, nothing else; transport is not used. Sums are added up in the order of the
backend, so they agree with the fused ones within rounding, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commfuse_dp.collectives import arguments as args
from commfuse_dp.collectives.arguments import Op
from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import ConsumeFn, ProduceFn
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.program.build import build
from commfuse_dp.program.layout import slices_of_sizes
from commfuse_dp.program.operations import Consume, Problem, Produce
from commfuse_dp.program.orders import check_order, gather_owners, scatter_owners
from commfuse_dp.transport.base import Transport


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _gather_objects(item: list[int], group: dist.ProcessGroup | None, n: int) -> list[list[int]]:
    if n == 1:
        return [item]
    everyone: list[list[int]] = [[]] * n
    dist.all_gather_object(everyone, item, group=group)
    return everyone


def _gather_rows(shard: torch.Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Shards padded to the longest, gathered by one all_gather, then stripped of the padding."""
    longest = max(sizes)
    if len(sizes) == 1:
        return shard.clone()
    padded = shard.new_zeros((longest, *shard.shape[1:]))
    padded[: shard.shape[0]].copy_(shard)
    gathered = shard.new_empty((longest * len(sizes), *shard.shape[1:]))
    if gathered.numel():
        dist.all_gather(list(gathered.chunk(len(sizes))), padded, group=group)
    return torch.cat([gathered[r * longest : r * longest + rows] for r, rows in enumerate(sizes)])


def _filled(produce: ProduceFn, rank: int, n: int, sizes: tuple[int, ...], m: int, order: str, whole: torch.Tensor) -> None:
    """Call `produce` for every slice of `whole` in the order of a reduce-scatter."""
    slices = slices_of_sizes(sizes, m)
    for owner in scatter_owners(rank, n, order):
        for part in slices[owner]:
            produce(Owner(owner, part, part.start - slices[owner][0].start), whole[part.start : part.stop])


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
    """Gather everything, then consume: see functions.all_gather."""
    check_order(order)
    args.check_rows("shard", shard)
    rank, n = _rank_and_size(group)
    shard = shard.detach().contiguous()
    if sizes is None:
        sizes = [rows for (rows,) in _gather_objects([int(shard.shape[0])], group, n)]
    found = args.check_sizes(sizes, n)
    whole = _gather_rows(shard, found, group)
    if consume is None:
        return whole
    slices = slices_of_sizes(found, slices_per_rank)
    for owner in gather_owners(rank, n, order):
        for part in slices[owner]:
            consume(Owner(owner, part, part.start - slices[owner][0].start), whole[part.start : part.stop])
    return None


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
    """Produce everything, then reduce (an all_reduce of the whole, in the wide type): see functions.reduce_scatter."""
    rows, row_shape, out_dtype, device = args.scatter_shapes(produce, out, shape, dtype)
    partial_dtype = args.check_reduction(order, op, "dtype of the result", out_dtype, reduce_dtype)
    rank, n = _rank_and_size(group)
    own = [len(out)] if out is not None else []
    found = args.kept_rows(sizes, rows, n, lambda: tuple(size for (size,) in _gather_objects(own, group, n)))
    if isinstance(produce, torch.Tensor):
        partials = produce.detach().to(partial_dtype)
    else:
        partials = torch.empty((sum(found), *row_shape), dtype=partial_dtype, device=device)
        _filled(produce, rank, n, found, slices_per_rank, order, partials)
    total = _reduced(partials, wide_dtype(out_dtype, partial_dtype), op, group, n)
    start = sum(found[:rank])
    summed = total[start : start + found[rank]].to(out_dtype)
    if out is None:
        return summed.contiguous()
    args.check_out(out, (found[rank], *row_shape), "reduce_scatter")
    return out.copy_(summed)


def _reduced(partials: torch.Tensor, wide: torch.dtype, op: str, group: dist.ProcessGroup | None, n: int) -> torch.Tensor:
    total = partials.to(wide, copy=True).contiguous()
    if n > 1 and total.numel():
        dist.all_reduce(total, group=group)
    return total.div_(float(n)) if op == "mean" else total


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
    """One all_reduce in the wide type: see functions.all_reduce."""
    partial_dtype = args.check_reduction(order, op, "tensor", tensor.dtype, reduce_dtype)
    wide = wide_dtype(tensor.dtype, partial_dtype)
    total = _reduced(tensor.detach().to(partial_dtype), wide, op, group, _rank_and_size(group)[1]).to(tensor.dtype)
    return total if out is None else out.copy_(total)


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
    """Produce everything, gather everything, keep the blocks for this rank, then consume.

    Moves N/2 times the bytes of an all-to-all, for not every backend has one (gloo has none for uneven blocks on all devices).
    """
    check_order(order)
    rank, n = _rank_and_size(group)
    line, _ = args.line_of(sizes, rank, produce if isinstance(produce, torch.Tensor) else None, n)
    table = tuple(tuple(row) for row in _gather_objects(list(line), group, n))
    problem = Problem("all_to_all", table, order, slices_per_rank)
    program = build(problem, rank).operations
    if isinstance(produce, torch.Tensor):
        blocks = produce.detach().contiguous()
    else:
        kind = dtype if dtype is not None else torch.get_default_dtype()
        blocks = torch.empty((sum(table[rank]), *(row_shape or ())), dtype=kind, device=device)
        for op in program:
            if isinstance(op, Produce):
                first = problem.slices(op.slice.owner, rank)[0].start
                produce(Owner(op.slice.owner, op.slice, op.slice.start - first), blocks[op.slice.start : op.slice.stop])
    totals = tuple(sum(row) for row in table)
    everything = _gather_rows(blocks, totals, group)
    base = [sum(totals[:source]) for source in range(n)]
    if consume is None:
        return torch.cat(
            [everything[(b := base[s] + sum(table[s][:rank])) : b + table[s][rank]] for s in range(n)],
        )
    for op in program:
        if isinstance(op, Consume):
            source, part = op.piece.origin, op.piece.slice
            first = problem.slices(rank, source)[0].start
            consume(Owner(source, part, part.start - first), everything[base[source] + part.start : base[source] + part.stop])
    return None
