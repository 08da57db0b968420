"""Ulysses: attention over a sequence sharded by positions, with the heads sharded meanwhile. Flash-All-to-All.

    o = ulysses_attention(q, k, v, causal=True)      # q, k, v, o: own positions, all heads

R ranks; rank r has its s_r positions of q [B, s_r, H, d] and of k, v [B, s_r, G, d]. Two all-to-alls, each of which runs while
blocks of attention are computed (`block_order.py` says which when). A slice is one message between each pair of ranks:

| pass | produced (own last) | moves | consumed (own first) |
| --- | --- | --- | --- |
| forward 1 | q, k, v of head group g | [s, B, (H + 2 G) / R, d] | rows of q, k, v; blocks of what is here |
| forward 2 | o of query slice j, its missing blocks | [s, B, H / R, d] | rows of o |
| backward 1 | dO of head group g | [s, B, H / R, d] | rows of dO; blocks of these queries |
| backward 2 | dq, dk, dv of slice j, its missing blocks | [s, B, (H + 2 G) / R, d] | rows of dq, dk, dv |

Saved: q, k, v, o of the own heads over the whole sequence, and the log-sum-exp; nothing is moved twice. With fewer key heads
than ranks (R a multiple of G) each key head goes to the R / G ranks that need it, and their gradients are summed in rank order,
in the wide type, where they came from.

Source: arXiv 2604.24013, Algorithm 5, which hides the second all-to-all of the forward; the rest is its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_dp.collectives import Owner, all_to_all
from commfuse_dp.collectives.summation import fold, wide_dtype
from commfuse_dp.ops.attention.arguments import ATTENTION_CALL, AttentionCall, Lines, call_of, check_heads, refuse, sizes_of
from commfuse_dp.ops.attention.block import Attended, Gradients, add_gradients
from commfuse_dp.ops.attention.block_order import BackwardBlocks, ForwardBlocks, Span, arrivals
from commfuse_dp.ops.attention.places import place_of, rank_at, world_size_at
from commfuse_dp.ops.linear import autocast
from commfuse_dp.program.layout import cut
from commfuse_dp.program.orders import check_order
from commfuse_dp.transport.base import Transport

NAME = "ulysses_attention"

# Layout -> the dimensions (positions, batch, heads, width) in it.
LAYOUTS = {"bshd": (1, 0, 2, 3), "bhsd": (2, 0, 1, 3), "sbhd": (0, 1, 2, 3)}


class Heads(NamedTuple):
    """How query heads and key heads are divided among the ranks."""

    queries: int
    keys: int
    ranks: int

    @property
    def own_queries(self) -> int:
        return self.queries // self.ranks

    @property
    def own_keys(self) -> int:
        return max(self.keys // self.ranks, 1)

    @property
    def copies(self) -> int:
        """Ranks that need the same key head."""
        return max(self.ranks // self.keys, 1)

    def queries_of(self, rank: int) -> slice:
        return slice(rank * self.own_queries, (rank + 1) * self.own_queries)

    def keys_of(self, rank: int) -> slice:
        first = rank * self.keys // self.ranks
        return slice(first, first + self.own_keys)


def default_slices(world_size: int) -> int:
    """Two ranks need two slices to have something to compute while the last one moves; more ranks have it with one."""
    return 2 if world_size == 2 else 1


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    layout: str = "bshd",
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
    **refused: object,
) -> torch.Tensor:
    """Attention of this rank's positions with those of all ranks.

    Args:
        q: [B, s, H, d], this rank's positions; k, v: [B, s, G, d]. Rank r's positions come right after those of rank r-1. H
            must be a multiple of R and of G, and of G and R one a multiple of the other.
        causal: whether a query sees only the keys up to its own position.
        scale: of the scores; default 1 / sqrt(d).
        layout: of q, k, v and the result: 'bshd' as above, 'bhsd' or 'sbhd'.
        sizes: positions of every rank, any numbers >= 0; default: as many on all ranks as on this one.
        slices_per_rank: slices into which each rank's positions are cut; default 2 for two ranks, else 1.
        group, order, transport: as in `commfuse_dp.collectives`.

    Returns o, of q's shape, contiguous. Differentiable in q, k and v; cast under autocast.

    Raises ValueError for arguments that do not fit; MismatchError, on all ranks and before data moves, if the ranks' calls do
    not fit together (whether they record gradients, too); and what the collectives raise.
    """
    refuse(NAME, refused)
    q, k, v = autocast(q), autocast(k), autocast(v)
    lines = prepare(NAME, q, k, v, layout, sizes, group, slices_per_rank, order, transport)
    check_divisible(q, k, layout, len(lines.sizes))
    call = call_of(lines, q, q.requires_grad or k.requires_grad or v.requires_grad, causal, scale)
    o: torch.Tensor = torch.ops.commfuse.ulysses(q, k, v, layout, *call)[0]
    return o


def prepare(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup | None,
    slices_per_rank: int | None,
    order: str,
    transport: Transport | None,
) -> Lines:
    """Check what this rank can see by itself."""
    check_order(order)
    if layout not in LAYOUTS:
        raise ValueError(f"{name}: layout={layout!r}: must be one of {', '.join(map(repr, LAYOUTS))}")
    positions, _, heads, _ = LAYOUTS[layout]
    check_heads(name, q, k, v, heads=heads, positions=positions)
    place = place_of(group, transport)
    n, rank = world_size_at(place), rank_at(place)
    found = sizes_of(sizes, (q.shape[positions],) * n, place)
    if found[rank] != q.shape[positions]:
        raise ValueError(f"{name}: sizes[{rank}]={found[rank]}, but q of rank {rank} has {q.shape[positions]} positions")
    if slices_per_rank is None:
        slices_per_rank = default_slices(n)
    if slices_per_rank < 1:
        raise ValueError(f"{name}: slices_per_rank={slices_per_rank}: must be at least 1")
    return Lines(found, slices_per_rank, order, place)


def check_divisible(q: torch.Tensor, k: torch.Tensor, layout: str, ranks: int) -> None:
    dim = LAYOUTS[layout][2]
    queries, keys = q.shape[dim], k.shape[dim]
    if queries % ranks:
        raise ValueError(
            f"{NAME}: {queries} query heads cannot be divided among {ranks} ranks: use a number of ranks that divides them, or "
            "ring_attention, which does not divide heads"
        )
    if keys % ranks and ranks % keys:
        raise ValueError(
            f"{NAME}: {keys} key heads on {ranks} ranks: one must be a multiple of the other; use another number of ranks, or "
            "ring_attention, which does not divide heads"
        )


# ---- one rank's part -------------------------------------------------------------------------------------------------
def rows_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A view [s, B, heads, d]."""
    return tensor.permute(LAYOUTS[layout])


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """[s, B, heads, d] in `layout`, contiguous."""
    places = LAYOUTS[layout]
    return rows.permute([places.index(dim) for dim in range(4)]).contiguous()


def heads_first(rows: torch.Tensor) -> torch.Tensor:
    """A view [B, heads, s, d] of [s, B, heads, d]."""
    return rows.permute(1, 2, 0, 3)


class _Exchange:
    """The two all-to-alls of a pass: what leaves with heads and comes with positions, and the other way round."""

    def __init__(self, lines: Lines, heads: Heads, like: torch.Tensor, batch: int) -> None:
        self.lines = lines
        self.heads = heads
        self._batch = batch
        self._like = like
        n = len(lines.sizes)
        self._to_heads = tuple((size,) * n for size in lines.sizes)
        self._to_positions = (lines.sizes,) * n

    def span(self, source: Owner) -> Span:
        """Where in the sequence a slice lies that comes with `to_heads`."""
        start = self.lines.start(int(source)) + source.offset
        return Span(start, start + source.stop - source.start)

    def run(self, produce: Any, consume: Any, width: int, *, to_heads: bool) -> None:
        """width: heads in a row of a message [rows, B, width, d]."""
        all_to_all(
            produce,
            consume,
            sizes=self._to_heads if to_heads else self._to_positions,
            row_shape=(self._batch, width, self._like.shape[3]),
            dtype=self._like.dtype,
            device=self._like.device,
            **self.lines.calls(),
        )


def _own_part(owner: Owner) -> slice:
    """Rows of this rank's positions."""
    return slice(owner.offset, owner.offset + owner.stop - owner.start)


def describe(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, layout: str, keep: bool) -> dict[str, object]:
    _, batch, heads, width = (q.shape[dim] for dim in LAYOUTS[layout])
    return {
        "dtype": q.dtype,
        "batch": batch,
        "query heads": heads,
        "key heads": k.shape[LAYOUTS[layout][2]],
        "head width": width,
        "causal": causal,
        "scale": scale,
        "gradients": keep,
    }


# ---- the registered ops ----------------------------------------------------------------------------------------------
_FORWARD = f"(Tensor q, Tensor k, Tensor v, str layout, {ATTENTION_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
_SAVED = "Tensor packed, Tensor out, Tensor lse"
_BACKWARD = f"(Tensor grad, {_SAVED}, SymInt key_heads, str layout, {ATTENTION_CALL}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("commfuse::ulysses", mutates_args=(), schema=_FORWARD)
def ulysses_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o; if `keep`: q, k, v [S, B, heads, d] and o [S, B, heads, d] of the own heads, log-sum-exp [B, heads, S])"""
    call = AttentionCall(*how)
    causal, scale, lines, keep = call.causal, call.scale, call.lines, call.keep
    lines.agree(NAME, q.device, describe(q, k, causal, scale, layout, keep))
    q_rows, k_rows, v_rows = (rows_first(tensor, layout) for tensor in (q, k, v))
    batch, heads = q_rows.shape[1], Heads(q_rows.shape[2], k_rows.shape[2], len(lines.sizes))
    mine, shared = heads.own_queries, heads.own_keys
    exchange = _Exchange(lines, heads, q, batch)
    packed = q.new_empty(lines.length, batch, mine + 2 * shared, q.shape[3])
    queries, keys, values = (heads_first(rows) for rows in packed.split([mine, shared, shared], dim=2))
    order_of_arrival = arrivals(lines.sizes, lines.slices_per_rank, lines.rank)
    attended = {
        span: Attended(queries[:, :, span.start : span.stop], q_start=span.start, causal=causal, scale=scale)
        for span in order_of_arrival
    }

    def compute(query: Span, key: Span) -> None:
        rows = slice(key.start, key.stop)
        attended[query].take(keys[:, :, rows], values[:, :, rows], key.start)

    blocks = ForwardBlocks(order_of_arrival, compute)
    out, lse = _saved(q, batch, lines.length if keep else 0, mine)

    def pack(to: Owner, message: torch.Tensor) -> None:
        part, group = _own_part(to), heads.keys_of(to)
        message[:, :, :mine] = q_rows[part, :, heads.queries_of(to)]
        message[:, :, mine : mine + shared] = k_rows[part, :, group]
        message[:, :, mine + shared :] = v_rows[part, :, group]

    def arrive(source: Owner, message: torch.Tensor) -> None:
        span = exchange.span(source)
        packed[span.start : span.stop] = message
        blocks.arrived(span)

    exchange.run(pack, arrive, mine + 2 * shared, to_heads=True)

    def finish(to: Owner, message: torch.Tensor) -> None:
        span = Span(to.start, to.stop)
        blocks.finished(span)
        o, o_lse = attended.pop(span).result()
        message.copy_(o.permute(2, 0, 1, 3))
        if keep:
            out[span.start : span.stop] = message
            lse[:, :, span.start : span.stop] = o_lse

    result = q.new_empty(lines.own, batch, heads.queries, q.shape[3])

    def take(source: Owner, message: torch.Tensor) -> None:
        result[_own_part(source), :, heads.queries_of(source)] = message

    exchange.run(finish, take, mine, to_heads=False)
    return laid_out(result, layout), packed if keep else packed.new_empty(0, *packed.shape[1:]), out, lse


def _saved(q: torch.Tensor, batch: int, length: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(length, batch, heads, q.shape[3]), q.new_empty((batch, heads, length), dtype=wide_dtype(q.dtype))


@ulysses_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = AttentionCall(*how)
    _, batch_dim, head_dim, _ = LAYOUTS[layout]
    heads, batch = Heads(q.shape[head_dim], k.shape[head_dim], len(call.sizes)), q.shape[batch_dim]
    length = sum(call.sizes) if call.keep else 0
    packed = q.new_empty(length, batch, heads.own_queries + 2 * heads.own_keys, q.shape[3])
    return q.new_empty(q.shape), packed, *_saved(q, batch, length, heads.own_queries)


@torch.library.custom_op("commfuse::ulysses_backward", mutates_args=(), schema=_BACKWARD)
def ulysses_backward_op(
    grad: torch.Tensor, packed: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, key_heads: int, layout: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv"""
    call = AttentionCall(*how)
    causal, scale, lines = call.causal, call.scale, call.lines
    d_rows = rows_first(grad, layout)
    batch, heads = d_rows.shape[1], Heads(d_rows.shape[2], key_heads, len(lines.sizes))
    mine, shared, wide = heads.own_queries, heads.own_keys, wide_dtype(out.dtype)
    exchange = _Exchange(lines, heads, out, batch)
    q, k, v = (heads_first(rows) for rows in packed.split([mine, shared, shared], dim=2))
    d_out_rows = torch.empty_like(out)
    o, d_out = heads_first(out), heads_first(d_out_rows)
    grads = Gradients(*(torch.zeros(tensor.shape, dtype=wide, device=out.device) for tensor in (q, k, v)))

    def compute(query: Span, key: Span) -> None:
        rows, seen = slice(query.start, query.stop), slice(key.start, key.stop)
        add_gradients(
            Gradients(grads.q[:, :, rows], grads.k[:, :, seen], grads.v[:, :, seen]),
            *(d_out[:, :, rows], q[:, :, rows], k[:, :, seen], v[:, :, seen], o[:, :, rows], lse[:, :, rows]),
            q_start=query.start,
            k_start=key.start,
            causal=causal,
            scale=scale,
        )

    own = len(cut(0, 0, lines.own, lines.slices_per_rank))
    blocks = BackwardBlocks(arrivals(lines.sizes, lines.slices_per_rank, lines.rank), own, compute)

    def pack(to: Owner, message: torch.Tensor) -> None:
        message.copy_(d_rows[_own_part(to), :, heads.queries_of(to)])

    def arrive(source: Owner, message: torch.Tensor) -> None:
        span = exchange.span(source)
        d_out_rows[span.start : span.stop] = message
        blocks.arrived(span)

    exchange.run(pack, arrive, mine, to_heads=True)

    def finish(to: Owner, message: torch.Tensor) -> None:
        blocks.finished(Span(to.start, to.stop))
        for part, gradient in zip(message.split([mine, shared, shared], dim=2), grads, strict=True):
            part.copy_(gradient[:, :, to.start : to.stop].permute(2, 0, 1, 3))

    dq = out.new_empty(lines.own, batch, heads.queries, out.shape[3])
    # dk and dv of the own positions, as they come: of each key head from the ranks that need it, in rank order.
    shares = [out.new_empty(lines.own, batch, heads.keys, heads.copies, out.shape[3]) for _ in range(2)]

    def take(source: Owner, message: torch.Tensor) -> None:
        part = _own_part(source)
        dq[part, :, heads.queries_of(source)] = message[:, :, :mine]
        copy = int(source) % heads.copies
        for share, gradient in zip(shares, message[:, :, mine:].split(shared, dim=2), strict=True):
            share[part, :, heads.keys_of(source), copy] = gradient

    exchange.run(finish, take, mine + 2 * shared, to_heads=False)
    dk, dv = (fold(share.unbind(3), share.dtype) for share in shares)
    return laid_out(dq, layout), laid_out(dk, layout), laid_out(dv, layout)


@ulysses_backward_op.register_fake
def _(
    grad: torch.Tensor, packed: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, key_heads: int, layout: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = list(grad.shape)
    shape[LAYOUTS[layout][2]] = key_heads
    return grad.new_empty(grad.shape), grad.new_empty(shape), grad.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, layout, *how = inputs
    ctx.how = k.shape[LAYOUTS[layout][2]], layout, *how
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *torch.ops.commfuse.ulysses_backward(grad, *ctx.saved_tensors, *ctx.how), *(None,) * 9


ulysses_op.register_autograd(_backward, setup_context=_setup_context)
