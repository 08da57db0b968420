"""Column-parallel projections of a sequence that is sharded over the ranks: gather and GEMM, slice by slice.

k weights share one gather. R ranks; x_r [B, s_r, D] is the own shard, W_i [F_i, D] the own rows of weight i; S_j are the
positions of rank j.

| pass | for each rank j | slice GEMM | communicated | order |
| --- | --- | --- | --- | --- |
| forward | y_i[:, S_j] = x_j @ W_i.T + b_i | [B s_j, D] x [D, F_i] | x_j gathered | own first |
| dgrad | P_j = sum over i of dy_i[:, S_j] @ W_i | [B s_j, F_i] x [F_i, D] | P_j to its owner, summed | own last |
| wgrad | dW_i += dy_i[:, S_j].T @ x_j | [F_i, B s_j] x [B s_j, D] | x_j gathered, or saved | beside dgrad |
| bias | db_i = sum over tokens of dy_i | | nothing | |

dgrad and wgrad are one pass, in both directions of the link at once (`program.layer.backward`). Saved for backward: the
weights, and x_r (save="shard") or the gathered x (save="gathered": one gather less in backward, R times the memory). Source:
arXiv 2604.24013, Algorithm 1, with sequence parallelism; the backward is ours.

In bfloat16 and float16 nothing is rounded once a slice, or once a weight: see [Note: Sums in low precision] in products.py.
There the weights' terms of dgrad are one GEMM over all F_i, and wgrad is one GEMM over all tokens, after the last slice has
come.

Below data parallelism W_i are sharded by rows over other ranks (`ShardedWeights`): rows_o lie on rank o of these. The first
product of a pass takes them as they come, y_i[:, S_r, rows_o] = x_r @ W_i[rows_o].T in forward and P_j += dy_i[:, S_j,
rows_o] @ W_i[rows_o] in backward; those after it take W_i whole. The last term of wgrad is the own shard's, dW_i[rows_o] +=
dy_i[:, S_r, rows_o].T @ x_r, and leaves for o as it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import Bindings, Coming, Leaving
from commfuse_dp.collectives.sessions import ALONE, begin, execute
from commfuse_dp.device.base import WordLike
from commfuse_dp.ops import announced
from commfuse_dp.ops.compat import hides_inside, modes_active, saved_tensors_hooks, transformed, transforms_active
from commfuse_dp.ops.gathered import ShardedWeights
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.saved import save, saved
from commfuse_dp.ops.sequence.calls import Column, column_of
from commfuse_dp.ops.sequence.column_gradients import InputGradient, WeightGradients
from commfuse_dp.ops.sequence.reference import gather_sequence, replicated
from commfuse_dp.ops.sequence.rows import (
    TENSOR_PARALLEL,
    GraphPlace,
    Layout,
    Ranks,
    agree_on,
    beside,
    check_dim,
    check_dtype,
    find_call,
    place,
    place_of,
    product_to,
    remember,
)
from commfuse_dp.ops.sequence.whole import Product, kernels_for
from commfuse_dp.transport.base import Transport

Save = Literal["shard", "gathered"]


# ---- without autograd ------------------------------------------------------------------------------------------------
def column_forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    call: Column,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(y_i [*, S, *, F_i], the gathered x [*, S, *, D] if it is saved). x: contiguous. sharded: whose weights these are."""
    tokens = call.forward.tokens
    ys, terms = [], []
    for weight, bias in zip(weights, biases, strict=True):
        y = x.new_empty((*call.whole, weight.shape[0]))
        ys.append(y)
        terms.append((weight.t(), bias, y.view(tokens.outer, tokens.width, weight.shape[0])))
    kept = x.new_empty((*call.whole, x.shape[-1])) if call.keeps else None
    kept_rows = tokens.whole(kept) if kept is not None else None

    def consume(owner: Owner, part: torch.Tensor) -> None:
        blocks = tokens.blocks[owner.start, owner.stop]

        def with_rows(number: int, rows: slice, weight: torch.Tensor) -> None:
            _, bias, whole = terms[number]
            product_to(part, weight.t(), None if bias is None else bias[rows], whole[..., rows], blocks)

        if sharded is not None and not sharded.here:
            sharded.gather(with_rows)
        else:
            for right, bias, whole in terms:
                product_to(part, right, bias, whole, blocks)
        if kept_rows is not None:
            place(part, kept_rows, blocks)

    def consume_all(coming: Sequence[Coming], wait: Callable[[WordLike], None]) -> bool:
        assert kernels is not None
        products = [Product("forward", right.t(), y.flatten(0, 1).t(), bias) for right, bias, y in terms]
        whole = kernels.consume(tokens, coming, wait, products, consume)
        if whole and kept_rows is not None:
            for owner, part, _ in coming:
                place(part, kept_rows, tokens.blocks[owner.start, owner.stop])
        return whole

    session = ALONE if call.forward.alone else begin(*ranks, x.device, TENSOR_PARALLEL)
    kernels = kernels_for(session.transport, sharded)
    waiting = consume_all if kernels is not None and kernels.waits else None
    shard = (Bindings(x.flatten(0, -2), consume=consume, consume_all=waiting),)
    execute(call.name, call.forward.program, shard, session, x.device)
    if sharded is not None and not sharded.here:  # no tokens at all
        sharded.gather()
    return ys, kept


def column_backward(
    grads: Sequence[torch.Tensor | None],
    saved: torch.Tensor,
    weights: Sequence[torch.Tensor],
    call: Column,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """(dx of the own shard, dW_i, db_i), None where not wanted. grads: of y_i; None: nothing has used it here.

    sharded: whose weights these are; dW_i and db_i leave through it, and are None.

    Which collectives are run depends on what all ranks want, not on what this rank has been given."""
    (tokens, rank, program, slices, _), gathers, count = call.backward, call.gathers, len(weights)
    wholes: list[torch.Tensor | None] = []
    for grad in grads:
        wholes.append(None if grad is None else grad.contiguous().view(tokens.outer, tokens.width, grad.shape[-1]))
    wgrads = WeightGradients(call, wholes, weights, rank if sharded is not None else None)
    session = begin(*ranks, saved.device, TENSOR_PARALLEL) if call.want_x or gathers else ALONE
    kernels = kernels_for(session.transport, sharded)
    bindings, dx = [], None
    if call.want_x:
        terms = InputGradient(call, wholes, weights, sharded)

        # Beside a share of dW_i travels what has been computed for others; beside the last, the sums that all ranks get.
        shares = slices + 1 if call.replicated else 1

        def from_whole_first(owner: Owner, buffer: torch.Tensor) -> None:
            if owner == rank:
                wgrads.from_whole(saved, min(1.0, (owner.index + 1) / shares))
            terms.produce(owner, buffer)

        def from_whole_last(owner: Owner, _: torch.Tensor) -> None:
            if owner == rank and owner.index + 1 == slices:
                wgrads.from_whole(saved)

        fills = not gathers and sharded is None
        produce = from_whole_first if fills else terms.produce

        def produce_all(leaving: Sequence[Leaving], value: int) -> list[list[WordLike]]:
            assert kernels is not None
            words = terms.produce_all(leaving, value, kernels, produce)
            if fills:
                wgrads.from_whole(saved, max(1, shares - 1) / shares)
            return words

        dx = torch.empty((*call.own, weights[0].shape[1]), dtype=weights[0].dtype, device=saved.device)
        signalling = produce_all if kernels is not None and any(whole is not None for whole in wholes) else None
        consume = from_whole_last if fills and call.replicated else None
        bindings.append(Bindings(target=dx.flatten(0, -2), produce=produce, consume=consume, produce_all=signalling))
    if gathers:
        waiting = partial(wgrads.consume_all, kernels) if kernels is not None and kernels.waits and wgrads.wanted else None
        bindings.append(Bindings(saved.flatten(0, -2), consume=wgrads.consume, consume_all=waiting))
    if bindings:
        execute(call.name, program, bindings, session, saved.device)
    if sharded is not None:
        wgrads.leave(sharded, saved, whole=not gathers)
        return dx, [None] * count, [None] * count
    if not gathers:
        wgrads.from_whole(saved)
    dbs: list[torch.Tensor | None] = [None] * count
    for number, whole in enumerate(wholes):
        if call.want_biases[number] and whole is not None:
            dbs[number] = whole.flatten(0, -2).sum(0)
    return dx, wgrads.finish(), dbs


def announced_forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    call: Column,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """`column_forward`, which modes see as a gather (of a sharded x) and a product for each weight. The first whose result is
    not saved computes all of them."""

    @cache
    def computed() -> tuple[list[torch.Tensor], torch.Tensor | None]:
        return column_forward(x, weights, biases, call, ranks, sharded)

    def answer(number: int) -> torch.Tensor:
        return computed()[0][number].flatten(0, -2)

    def answer_whole() -> torch.Tensor:
        kept = computed()[1] if call.keeps else None
        return announced.absent(shape, x) if kept is None else kept.flatten(0, -2)

    shape = math.prod(call.whole), x.shape[-1]
    whole = None
    if not call.replicated:
        part = announced.absent((math.prod(call.own), x.shape[-1]), x, answer_whole)
        whole = announced.gathered(part, len(call.sizes), ranks[0])
    ys = []
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = announced.product(announced.absent(shape, x, partial(answer, number)), weight.t(), bias)
        ys.append(y.view(*call.whole, weight.shape[0]))
    return ys, whole.view(*call.whole, x.shape[-1]) if whole is not None and call.keeps else None


def announced_backward(
    grads: Sequence[torch.Tensor | None],
    saved: torch.Tensor,
    weights: Sequence[torch.Tensor],
    call: Column,
    *ranks: Any,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None], list[torch.Tensor | None]]:
    """`column_backward`, which modes see as the products of all gradients."""
    tokens, shapes = math.prod(call.whole), []
    for grad, weight, wanted in zip(grads, weights, call.want_weights, strict=True):
        features, width = weight.shape
        of_weight, of_x = (features, tokens, width), (tokens, features, width)
        shapes += [] if grad is None else [of_weight] * wanted + [of_x] * call.want_x
    with announced.products(saved, shapes):
        return column_backward(grads, saved, weights, call, *ranks)


# ---- autograd --------------------------------------------------------------------------------------------------------
class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[Column, Ranks, ShardedWeights | None], x: torch.Tensor, *params: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """params: weights and biases; the anchors of what is sharded, if weights are."""
        ctx.how = call, ranks, sharded = how
        ctx.set_materialize_grads(False)
        compute = announced_forward if modes_active() and hides_inside() else column_forward
        early = saved_tensors_hooks() is not None and not call.keeps
        if sharded is not None:
            if early:
                save(ctx, x)
            ys, kept = compute(x, sharded.weights, sharded.biases, call, ranks, sharded)
            sharded.release()
            if not early:
                ctx.save_for_backward(x if kept is None else kept)
            return tuple(ys)
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        if early:
            save(ctx, x, *weights)  # type: ignore[arg-type]
        ys, kept = compute(x, weights, biases, call, ranks)  # type: ignore[arg-type]
        if not early:
            ctx.save_for_backward(x if kept is None else kept, *weights)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _backward_once(ctx, *grads)  # type: ignore[no-any-return]
        x, *weights = ctx.saved_tensors or saved(ctx)
        call, ranks, sharded = ctx.how
        compute = announced_backward if modes_active() and hides_inside() else column_backward
        if sharded is None:
            dx, dws, dbs = compute(grads, x, weights, call, ranks)
            return (None, dx, *dws, *dbs)
        sharded.renew()
        dx, _, _ = compute(grads, x, sharded.weights, call, ranks, sharded)
        sharded.release()
        return (None, dx, *(None for _ in sharded.anchors))


# With create_graph=True: what is differentiated a second time raises. It calls the backward again, without the grad mode.
_backward_once: Any = torch.autograd.function.once_differentiable(_ColumnParallel.backward)  # type: ignore[no-untyped-call]


def column_parallel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    *,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    save: Save = "shard",
    layout: Layout = "sharded",
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
) -> tuple[torch.Tensor, ...]:
    """y_i = gathered x @ W_i.T + b_i for every weight, from one gather of x along the sequence, slice by slice.

    Args:
        x: [..., s_r, ..., D]: this rank's positions (of dimension `dim`) of a sequence that is sharded over the ranks. Ranks
            may keep different numbers of positions, also none.
        weights: [F_i, D] each: this rank's rows of every weight, of x's dtype (under autocast all are cast to its dtype, x
            before it travels). biases: [F_i] or None for every weight; empty: no biases.
        sizes: positions of every rank; None: they are exchanged first, which costs a message to every peer.
        save: what is kept for the weights' gradients: the own 'shard' of x, gathered again in backward, or the 'gathered' x.
        layout: 'replicated': x is [..., D], the same on every rank, and nothing is gathered; dx is summed for all ranks, behind
            the products of dx and of the weights' gradients. `dim`, `sizes` and `save` are of no use then.
        slices_per_rank: m of the paper; None: 2 at two ranks whose slices then have 256 rows or more, else 1. Replicated: up
            to 4 whose slices have 256 rows or more.
        group, order, transport: as in `commfuse_dp.collectives`; group None: the default group.

    Returns [..., S, ..., F_i] for every weight. Differentiable in all operands: dx is summed over the ranks. All ranks must
    call it alike, and run the backwards of several calls in the same order; the same operands must require gradients on all
    ranks.

    Raises ValueError for operands that do not fit together here, MismatchError (before data moves) for those that do not fit
    those of other ranks, and what the collectives raise.
    """
    return column_parallel_of(
        "column_parallel",
        x,
        weights,
        biases,
        dim=dim,
        sizes=sizes,
        group=group,
        save=save,
        layout=layout,
        slices_per_rank=slices_per_rank,
        order=order,
        transport=transport,
    )


def column_parallel_of(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    dim: int,
    sizes: Sequence[int] | None,
    save: str,
    slices_per_rank: int | None,
    order: str,
    transport: Transport | None,
    layout: Layout = "sharded",
    group: dist.ProcessGroup | None = None,
    sharded: ShardedWeights | None = None,
    served: GraphPlace | None = None,
) -> tuple[torch.Tensor, ...]:
    """`column_parallel` of a layer whose name is in errors and measurements. sharded: whose weights and biases these are.
    served: where graphs find the layer's ranks."""
    if torch.is_autocast_enabled(x.device.type):
        x, weights = autocast(x), [autocast(weight) for weight in weights]
        biases = [None if bias is None else autocast(bias) for bias in biases]
    if torch.compiler.is_compiling() and (transport is None or served is not None):
        from commfuse_dp.ops.sequence.graph_ops import column_in_graph, new_place

        dim = _check(name, x, weights, biases, dim, sizes, save, layout)
        found = served if served is not None else new_place(group, order, slices_per_rank, name)
        return column_in_graph(x, list(weights), list(biases or [None] * len(weights)), dim, sizes, save, layout, found)
    if transforms_active():
        raise transformed(name)
    trainable = sharded.trainable if sharded is not None else None
    params, ranks = (*weights, *(biases or (None,) * len(weights))), (group, transport)
    call = prepare(name, x, weights, biases, params, dim, sizes, ranks, save, layout, slices_per_rank, order, trainable)
    return _ColumnParallel.apply((call, ranks, sharded), x.contiguous(), *(params if sharded is None else sharded.anchors))


def column_parallel_reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    *,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    save: Save = "shard",
    layout: Layout = "sharded",
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
) -> tuple[torch.Tensor, ...]:
    """What `column_parallel` computes, unfused: gather everything, then one GEMM a weight; in backward GEMMs, then one
    reduce-scatter. `transport` serves the exchange of sizes alone."""
    x, weights = autocast(x), [autocast(weight) for weight in weights]
    biases = [None if bias is None else autocast(bias) for bias in biases]
    name = "column_parallel_reference"
    params = *weights, *(biases or (None,) * len(weights))
    call = prepare(name, x, weights, biases, params, dim, sizes, (group, transport), save, layout, slices_per_rank, order)
    whole = replicated(x, group) if call.replicated else gather_sequence(x.contiguous(), call.dim, call.sizes, group)
    return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True))


def prepare(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor | None],
    dim: int,
    sizes: Sequence[int] | None,
    ranks: Ranks,
    save: str,
    layout: Layout,
    slices_per_rank: int | None,
    order: str,
    trainable: Sequence[bool] | None = None,
) -> Column:
    """Check the operands and agree with the other ranks, or find that this was done before for ones like these. params: weights
    and biases. trainable: of these; None: those that require a gradient."""
    divided = sizes if sizes is None else tuple(sizes)
    flags = trainable if trainable is None else tuple(trainable)
    how = name, dim, divided, save, layout, slices_per_rank, order, flags, len(biases)
    signature, found = find_call(ranks, how, x, params)
    if found is not None:
        return found  # type: ignore[no-any-return]
    at = _check(name, x, weights, biases, dim, sizes, save, layout)
    sited = place_of(*ranks, order, slices_per_rank, name)
    recorded = torch.is_grad_enabled()
    if trainable is None:
        trainable = [tensor is not None and tensor.requires_grad for tensor in params]
    wanted = tuple([recorded and flag for flag in (x.requires_grad, *trainable)])
    tokens = agree_on(sited, x, at, wanted, sizes, int(x.shape[at]), layout, features=x.shape[-1], save=save)
    shape = beside(x, at, layout)
    call = column_of(name, sited.how, tokens, at, shape, (x.shape[-1], x.dtype), save, wanted, layout)
    if sizes is not None or layout == "replicated":
        remember(ranks, x.device, signature, call)
    return call


def _check(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    dim: int,
    sizes: Sequence[int] | None,
    save: str,
    layout: Layout,
) -> int:
    """The dimension of the sequence, counted from the front. Raises ValueError for operands that do not fit together."""
    if not weights:
        raise ValueError(f"{name}: weights is empty: at least one weight [F, D] is needed")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{name}: {len(biases)} biases for {len(weights)} weights: give one for each (None: no bias), or none")
    if save not in ("shard", "gathered"):
        raise ValueError(f"{name}: save={save!r}: must be 'shard' or 'gathered'")
    dim = check_dim(name, x, dim, sizes, layout)
    for number, (weight, bias) in enumerate(zip(weights, biases or [None] * len(weights), strict=True)):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"{name}: weights[{number}] has shape {tuple(weight.shape)}: [F, {x.shape[-1]}] is needed for an input of "
                f"shape {tuple(x.shape)}"
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"{name}: biases[{number}] has shape {tuple(bias.shape)}: ({weight.shape[0]},) is needed")
        check_dtype(name, x, {f"weights[{number}]": weight, f"biases[{number}]": bias})
    return dim


__all__ = ["column_backward", "column_forward", "column_parallel", "column_parallel_of", "column_parallel_reference"]
