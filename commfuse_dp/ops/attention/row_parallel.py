"""Query-split attention with its output projection, tensor parallel: attention of one slice of queries, its part of the
projection, and off it goes to the rank that keeps these rows of the output.

    y = row_parallel_attention(q, k, v, weight, causal=True)     # y: own rows of the output, summed over the ranks' heads

R ranks; rank r has its heads of q [B, h, S, d] and of k, v [B, g, S, d] over the whole sequence, the columns W [D, h d] of the
output projection that belong to them, and keeps s_r rows of the output. For the rows S_j of rank j:

| pass | computed for slice j | shape | moves | order |
| --- | --- | --- | --- | --- |
| forward | O_j = attention(q[S_j], k, v); P_j = O_j W^T | [B s_j, h d] x [h d, D] | P_j to j, summed in rank order | own last |
| dgrad | dO_j = dy_j W | [B s_j, D] x [D, h d] | dy_j in, once for all three | own first |
| attention | dq_j complete; dk += , dv += | | | |
| wgrad | dW += dy_j^T O_j | [D, B s_j] x [B s_j, h d] | | |

Saved: q, k, v, W, O and the log-sum-exp. Source: arXiv 2604.24013, Algorithm 4, forward; its backward is the mirror image.

[Note: Slices under a causal mask]
Slice j needs the keys up to its own end only, so its work grows with j: the ranks' work is equal in sum, but not in order.
Finer slices even it out: simulated at communication / compute = 0.56 with 4 ranks, 22 % stay exposed with one slice per rank,
none with four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.collectives import Owner, all_gather, reduce_scatter
from commfuse_dp.collectives.arguments import check_summable, even_sizes
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.ops.attention.arguments import ATTENTION_CALL, AttentionCall, Lines, call_of, check_heads, refuse, sizes_of
from commfuse_dp.ops.attention.block import Attended, Gradients, add_gradients
from commfuse_dp.ops.attention.places import place_of, rank_at, world_size_at
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.sequence.rows import product
from commfuse_dp.program.orders import check_order
from commfuse_dp.transport.base import Transport

NAME = "row_parallel_attention"


def default_slices(world_size: int, causal: bool) -> int:
    """Slices per rank: see [Note: Slices under a causal mask]; without a mask two ranks need two, more ranks one."""
    return 4 if causal else 2 if world_size == 2 else 1


def row_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
    **refused: object,
) -> torch.Tensor:
    """Attention over this rank's heads and the row-parallel output projection, reduce-scattered over the sequence.

    Args:
        q: [B, h, S, d], this rank's heads over the whole sequence; k, v: [B, g, S, d], h a multiple of g.
        weight: [D, h * d], this rank's columns of the projection (as nn.Linear has them).
        causal: whether a query sees only the keys up to its own position.
        scale: of the scores; default 1 / sqrt(d).
        dim: sequence dimension of the result: 1 for [B, s, D], 0 for [s, B, D].
        sizes: rows of the sequence that every rank keeps; default torch.chunk's division of S: ceil(S / R), the last ones short
            or empty.
        reduce_dtype: dtype in which the partial outputs travel; default q's. They are summed in a wide type, in rank order.
        slices_per_rank: slices that each rank's rows are cut into; default 4 under a causal mask, else 2 for two ranks, else 1.
        group, order, transport: as in `commfuse_dp.collectives`.

    Returns this rank's rows: [B, sizes[rank], D] (dim=1). Differentiable in q, k, v and weight; cast under autocast.

    Raises ValueError for arguments that do not fit; MismatchError, on all ranks and before data moves, if the ranks' calls do
    not fit together (whether they record gradients, too); and what the collectives raise.
    """
    refuse(NAME, refused)
    q, k, v, weight = autocast(q), autocast(k), autocast(v), autocast(weight)
    lines, partial_dtype = prepare(q, k, v, weight, dim, sizes, group, reduce_dtype, slices_per_rank, order, transport, causal)
    call = call_of(lines, q, q.requires_grad or k.requires_grad or v.requires_grad or weight.requires_grad, causal, scale)
    y: torch.Tensor = torch.ops.commfuse.row_attention(q, k, v, weight, dim, partial_dtype, *call)[0]
    return y


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype | None,
    slices_per_rank: int | None,
    order: str,
    transport: Transport | None,
    causal: bool,
) -> tuple[Lines, torch.dtype]:
    """Check what this rank can see by itself."""
    check_order(order)
    check_heads(NAME, q, k, v, heads=1, positions=2)
    heads, length, width = q.shape[1:]
    if weight.dim() != 2 or weight.shape[1] != heads * width:
        raise ValueError(
            f"{NAME}: weight has shape {tuple(weight.shape)}; [D, {heads * width}] is needed, the columns of the output "
            f"projection that belong to these {heads} heads of {width}"
        )
    if weight.dtype != q.dtype or weight.device != q.device:
        raise ValueError(f"{NAME}: weight is {weight.dtype} on {weight.device}, q {q.dtype} on {q.device}: they must be equal")
    if dim not in (0, 1):
        raise ValueError(f"{NAME}: dim={dim}: the sequence dimension of the result is 1 ([B, s, D]) or 0 ([s, B, D])")
    partial_dtype = reduce_dtype if reduce_dtype is not None else q.dtype
    check_summable("reduce_dtype", partial_dtype)
    place = place_of(group, transport)
    n = world_size_at(place)
    found = sizes_of(sizes, even_sizes(length, n), place)
    if sum(found) != length:
        raise ValueError(f"{NAME}: sizes={list(found)} add up to {sum(found)}, but q has {length} positions")
    if slices_per_rank is None:
        slices_per_rank = default_slices(n, causal)
    if slices_per_rank < 1:
        raise ValueError(f"{NAME}: slices_per_rank={slices_per_rank}: must be at least 1")
    return Lines(found, slices_per_rank, order, place), partial_dtype


# ---- the registered ops ----------------------------------------------------------------------------------------------
_HOW = f"SymInt dim, ScalarType partial_dtype, {ATTENTION_CALL}"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor weight, {_HOW}) -> (Tensor, Tensor, Tensor)"
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor saved, Tensor lse"
_BACKWARD = f"(Tensor grad, {_SAVED}, bool trained, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("commfuse::row_attention", mutates_args=(), schema=_FORWARD)
def row_attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, dim: int, partial_dtype: torch.dtype, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(own rows of the result; if `keep`: O [S, B, h, d] and the log-sum-exp [B, h, S])"""
    call = AttentionCall(*how)
    causal, scale, lines, keep = call.causal, call.scale, call.lines, call.keep
    batch, heads, length, width = q.shape
    features = weight.shape[0]
    lines.agree(
        NAME,
        q.device,
        {
            "dtype": q.dtype,
            "partial dtype": partial_dtype,
            "batch": batch,
            "positions": length,
            "output features": features,
            "causal": causal,
            "gradients": keep,
        },
    )
    saved, lse = _saved(q, keep)
    columns = weight.t()

    def produce(owner: Owner, partial: torch.Tensor) -> None:
        rows = slice(owner.start, owner.stop)
        seen = owner.stop if causal else length
        attended = Attended(q[:, :, rows], q_start=owner.start, causal=causal, scale=scale)
        attended.take(k[:, :, :seen], v[:, :, :seen], 0)
        o, o_lse = attended.result()
        by_rows = o.permute(2, 0, 1, 3)
        if keep:
            lse[:, :, rows] = o_lse
            by_rows = saved[rows].copy_(by_rows)
        product(by_rows.reshape(-1, heads * width).to(q.dtype), columns, None, partial.view(-1, features))

    y = q.new_empty(lines.own, batch, features)
    reduce_scatter(produce, y, sizes=lines.sizes, shape=(length, batch, features), reduce_dtype=partial_dtype, **lines.calls())
    return _result(y, dim), saved, lse


def _saved(q: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, width = q.shape if keep else (0, 0, 0, 0)
    lse = q.new_empty((batch, heads, length), dtype=wide_dtype(q.dtype))
    return q.new_empty(length, batch, heads, width), lse


def _result(y: torch.Tensor, dim: int) -> torch.Tensor:
    return y if dim == 0 else y.transpose(0, 1).contiguous()


@row_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, dim: int, partial_dtype: torch.dtype, *how: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = AttentionCall(*how)
    own = call.sizes[rank_at(call.place)]
    y = q.new_empty((own, q.shape[0], weight.shape[0]) if dim == 0 else (q.shape[0], own, weight.shape[0]))
    return y, *_saved(q, call.keep)


@torch.library.custom_op("commfuse::row_attention_backward", mutates_args=(), schema=_BACKWARD)
def row_attention_backward_op(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    lse: torch.Tensor,
    trained: bool,
    dim: int,
    partial_dtype: torch.dtype,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv; dW, if `trained`)"""
    call = AttentionCall(*how)
    causal, scale, lines = call.causal, call.scale, call.lines
    batch, heads, length, width = q.shape
    features, wide = weight.shape[0], wide_dtype(q.dtype)
    grads = Gradients(*(torch.zeros(tensor.shape, dtype=wide, device=q.device) for tensor in (q, k, v)))
    dw = torch.zeros(weight.shape, dtype=wide, device=q.device) if trained else None
    out = saved.permute(1, 2, 0, 3)

    def consume(owner: Owner, dy: torch.Tensor) -> None:
        rows, seen = slice(owner.start, owner.stop), slice(0, owner.stop if causal else length)
        flat = dy.reshape(-1, features)
        if dw is not None:
            _add_product(dw, flat.t(), saved[rows].view(-1, heads * width))
        d_out = (flat @ weight).view(owner.stop - owner.start, batch, heads, width).permute(1, 2, 0, 3)
        add_gradients(
            Gradients(grads.q[:, :, rows], grads.k[:, :, seen], grads.v[:, :, seen]),
            *(d_out, q[:, :, rows], k[:, :, seen], v[:, :, seen], out[:, :, rows], lse[:, :, rows]),
            q_start=owner.start,
            k_start=0,
            causal=causal,
            scale=scale,
        )

    own = grad if dim == 0 else grad.transpose(0, 1)
    all_gather(own, consume, sizes=lines.sizes, **lines.calls())
    dq, dk, dv = (tensor.to(q.dtype) for tensor in grads)
    return dq, dk, dv, q.new_empty(0) if dw is None else dw.to(q.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b; products in half types are rounded once and summed in total's wide type."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


@row_attention_backward_op.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, *more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, trained, *_ = more
    dq, dk, dv = (q.new_empty(tensor.shape) for tensor in (q, k, v))
    return dq, dk, dv, q.new_empty(weight.shape if trained else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, weight, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    trained = ctx.needs_input_grad[3]
    dq, dk, dv, dw = torch.ops.commfuse.row_attention_backward(grad, *ctx.saved_tensors, trained, *ctx.how)
    return dq, dk, dv, dw if trained else None, *(None,) * 10


row_attention_op.register_autograd(_backward, setup_context=_setup_context)
