"""Ring attention (context parallelism): queries stay, keys and values are gathered slice by slice and joined by log-sum-exp.

    o = ring_attention(q, k, v, causal=True)         # q, k, v, o: own positions, all heads

R ranks; rank r has its s_r positions of q [B, s_r, H, d] and of k, v [B, s_r, G, d]. No head is divided: any numbers will do.

| pass | for the keys of slice j | moves | order |
| --- | --- | --- | --- |
| forward | o = join(o, attention(q, k_j, v_j)) | k_j, v_j in, one message | own first |
| backward | dq += ; dk_j, dv_j of these queries | k_j, v_j in again; dk_j, dv_j to j, summed by rank | own first; own last |

Saved: q, k, v, o of the own positions and the log-sum-exp. In backward the first half of the slices is computed on as they
come, the other half before its gradients leave, and the last own slice at the very end.

Under a causal mask rank r has the work of r + 1 slices: the last rank has most, and the others wait for it at the next
collective. Source: arXiv 2310.01889 (Ring Attention), as an all-gather and a reduce-scatter in the orders of arXiv 2604.24013,
Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_dp.collectives import Owner, all_gather, reduce_scatter
from commfuse_dp.collectives.summation import wide_dtype
from commfuse_dp.ops.attention.arguments import ATTENTION_CALL, AttentionCall, Lines, call_of, refuse
from commfuse_dp.ops.attention.block import Attended, Gradients, add_gradients
from commfuse_dp.ops.attention.ulysses import LAYOUTS, describe, heads_first, laid_out, prepare, rows_first
from commfuse_dp.ops.linear import autocast
from commfuse_dp.program.layout import slices_of_sizes
from commfuse_dp.program.orders import gather_owners
from commfuse_dp.transport.base import Transport

NAME = "ring_attention"
SLICES_PER_RANK = 2  # the own keys begin and end a backward


def ring_attention(
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
    """Attention of this rank's positions with those of all ranks, heads undivided.

    Args and errors are those of `ulysses_attention`, except that H need only be a multiple of G, and that slices_per_rank is 2
    by default. Partial gradients of k and v travel in their dtype and are summed in the wide type.

    Returns o, of q's shape, contiguous. Differentiable in q, k and v; cast under autocast.
    """
    refuse(NAME, refused)
    q, k, v = autocast(q), autocast(k), autocast(v)
    if slices_per_rank is None:
        slices_per_rank = SLICES_PER_RANK
    lines = prepare(NAME, q, k, v, layout, sizes, group, slices_per_rank, order, transport)
    call = call_of(lines, q, q.requires_grad or k.requires_grad or v.requires_grad, causal, scale)
    o: torch.Tensor = torch.ops.commfuse.ring_attention(q, k, v, layout, *call)[0]
    return o


def _packed(k: torch.Tensor, v: torch.Tensor, layout: str) -> torch.Tensor:
    """[s, B, 2 G, d]"""
    return torch.cat([rows_first(k, layout), rows_first(v, layout)], dim=2)


def _keys_values(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = heads_first(rows).chunk(2, dim=1)
    return k, v


_FORWARD = f"(Tensor q, Tensor k, Tensor v, str layout, {ATTENTION_CALL}) -> (Tensor, Tensor)"
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_BACKWARD = f"(Tensor grad, {_SAVED}, str layout, {ATTENTION_CALL}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("commfuse::ring_attention", mutates_args=(), schema=_FORWARD)
def ring_attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, *how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o; log-sum-exp [B, H, s])"""
    call = AttentionCall(*how)
    causal, scale, lines = call.causal, call.scale, call.lines
    lines.agree(NAME, q.device, describe(q, k, causal, scale, layout, call.keep))
    queries = heads_first(rows_first(q, layout))
    attended = Attended(queries, q_start=lines.start(lines.rank), causal=causal, scale=scale)
    all_gather(
        _packed(k, v, layout),
        lambda owner, rows: attended.take(*_keys_values(rows), owner.start),
        sizes=lines.sizes,
        **lines.calls(),
    )
    o, lse = attended.result()
    return laid_out(o.permute(2, 0, 1, 3).to(q.dtype, copy=True), layout), lse.clone(memory_format=torch.contiguous_format)


@ring_attention_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    positions, batch, heads, _ = (q.shape[dim] for dim in LAYOUTS[layout])
    return q.new_empty(q.shape), q.new_empty((batch, heads, positions), dtype=wide_dtype(q.dtype))


@torch.library.custom_op("commfuse::ring_attention_backward", mutates_args=(), schema=_BACKWARD)
def ring_attention_backward_op(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: str,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv"""
    call = AttentionCall(*how)
    causal, scale, lines = call.causal, call.scale, call.lines
    packed, wide = _packed(k, v, layout), wide_dtype(q.dtype)
    d_out, queries, o = (heads_first(rows_first(tensor, layout)) for tensor in (grad, q, out))
    everything = packed.new_empty(lines.length, *packed.shape[1:])
    d_everything = torch.zeros(everything.shape, dtype=wide, device=q.device)
    dq = torch.zeros(queries.shape, dtype=wide, device=q.device)
    early = _early(lines)

    def compute(start: int, stop: int) -> None:
        (keys, values), (dk, dv) = _keys_values(everything[start:stop]), _keys_values(d_everything[start:stop])
        add_gradients(
            Gradients(dq, dk, dv),
            *(d_out, queries, keys, values, o, lse),
            q_start=lines.start(lines.rank),
            k_start=start,
            causal=causal,
            scale=scale,
        )

    def arrive(owner: Owner, rows: torch.Tensor) -> None:
        everything[owner.start : owner.stop] = rows
        if owner.start in early:
            compute(owner.start, owner.stop)

    def finish(owner: Owner, partial: torch.Tensor) -> None:
        if owner.start not in early:
            compute(owner.start, owner.stop)
        partial.copy_(d_everything[owner.start : owner.stop])

    all_gather(packed, arrive, sizes=lines.sizes, **lines.calls())
    own = torch.empty_like(packed)
    reduce_scatter(finish, own, sizes=lines.sizes, shape=everything.shape, **lines.calls())
    dk, dv = own.chunk(2, dim=2)
    d_keys, d_values = (laid_out(part.clone(), layout) for part in (dk, dv))
    return laid_out(dq.permute(2, 0, 1, 3).to(q.dtype), layout), d_keys, d_values


def _early(lines: Lines) -> set[int]:
    """First positions of the slices that are computed on as they come."""
    slices = slices_of_sizes(lines.sizes, lines.slices_per_rank)
    order = [part.start for owner in gather_owners(lines.rank, len(lines.sizes), lines.order) for part in slices[owner]]
    own = [part.start for part in slices[lines.rank]]
    return set(order[: (len(order) + 1) // 2]) - set(own[1:][-1:])


@ring_attention_backward_op.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *torch.ops.commfuse.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.how), *(None,) * 9


ring_attention_op.register_autograd(_backward, setup_context=_setup_context)
