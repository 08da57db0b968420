"""Row-parallel projection to a sequence that is sharded over the ranks: GEMM and reduce-scatter, slice by slice.

R ranks; x [B, S, K] are this rank's own features of all positions, W [D, K] its own columns of the weight; S_j are the
positions of rank j.

| pass | for each rank j | slice GEMM | communicated | order |
| --- | --- | --- | --- | --- |
| forward | P_j = x[:, S_j] @ W.T | [B s_j, K] x [K, D] | P_j to j, summed in rank order | own last |
| dgrad | dx[:, S_j] = dy_j @ W | [B s_j, D] x [D, K] | dy_j gathered, once for all three | own first |
| wgrad | dW += dy_j.T @ x[:, S_j] | [D, B s_j] x [B s_j, K] | | |
| bias | db += sum of dy_j | | | |

The bias is whole on every rank. Each owner adds it to its own rows, in the GEMM of its own partial, so once. Its gradient is
summed over all rows of all ranks: every rank gets them in backward anyway, and adds up one sum per slice in rank order, so db
is the same on all ranks bit by bit, and costs no message. Saved for backward: x and W. Source: arXiv 2604.24013, Algorithm 3;
the backward is ours.

In bfloat16 and float16 wgrad is one GEMM over all tokens: see [Note: Sums in low precision] in products.py.

Below data parallelism W is sharded by rows over other ranks (`ShardedWeights`): rows_o lie on rank o of these. The first
product of a pass takes them as they come, P_j[:, rows_o] = x[:, S_j] @ W[rows_o].T in forward and dx[:, S_r] += dy_r[:,
rows_o] @ W[rows_o] in backward; those after it take W whole. The last term of wgrad is the own shard's, dW[rows_o] += dy_r[:,
rows_o].T @ x[:, S_r], and leaves for o as it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from commfuse_dp.collectives.arguments import check_summable, even_sizes
from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import Bindings, Coming, Leaving
from commfuse_dp.collectives.sessions import ALONE, begin, execute
from commfuse_dp.collectives.summation import fold, wide_dtype
from commfuse_dp.device.base import WordLike
from commfuse_dp.ops import announced
from commfuse_dp.ops.compat import hides_inside, modes_active, saved_tensors_hooks, transformed, transforms_active
from commfuse_dp.ops.gathered import ShardedWeights
from commfuse_dp.ops.linear import autocast
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.ops.saved import save, saved
from commfuse_dp.ops.sequence.calls import Row, row_of
from commfuse_dp.ops.sequence.reference import replicated, scatter_sequence, total
from commfuse_dp.ops.sequence.rows import (
    TENSOR_PARALLEL,
    GraphPlace,
    Layout,
    Ranks,
    Terms,
    agree_on,
    beside,
    check_dim,
    check_dtype,
    find_call,
    place,
    place_of,
    product,
    product_from,
    product_to,
    remember,
)
from commfuse_dp.ops.sequence.whole import Product, kernels_for
from commfuse_dp.transport.base import Transport


# ---- without autograd ------------------------------------------------------------------------------------------------
def row_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: Row,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> torch.Tensor:
    """Own rows of the sum, [*, s_r, *, D]. x: contiguous. sharded: whose weight and bias these are."""
    tokens, rank, program, *_ = call.forward
    whole, right = x.view(tokens.outer, tokens.width, x.shape[-1]), weight.t()
    y = x.new_empty((*call.own, weight.shape[0]))

    def produce(owner: Owner, buffer: torch.Tensor) -> None:
        blocks, added = tokens.blocks[owner.start, owner.stop], bias if owner == rank else None

        def with_rows(_: int, rows: slice, weight: torch.Tensor) -> None:
            product_from(whole, blocks, weight.t(), None if added is None else added[rows], buffer[:, rows])

        if sharded is not None and not sharded.here:
            sharded.gather(with_rows)
        else:
            product_from(whole, blocks, right, added, buffer)

    def produce_all(leaving: Sequence[Leaving], value: int) -> list[list[WordLike]]:
        assert kernels is not None
        apart = [item for item in leaving if bias is not None and not item.sent]  # to which the bias is added
        made = [item for item in leaving if bias is None or item.sent]
        words = kernels.produce(tokens, made, value, whole.flatten(0, 1).t(), right, produce)
        for owner, out, _ in apart:
            produce(owner, out)
        return words + [[] for _ in apart]  # own last

    session = begin(*ranks, x.device, TENSOR_PARALLEL)
    kernels = kernels_for(session.transport, sharded)
    sums = (Bindings(target=y.flatten(0, -2), produce=produce, produce_all=produce_all if kernels is not None else None),)
    execute(call.name, program, sums, session, x.device)
    if sharded is not None and not sharded.here:  # no tokens at all
        sharded.gather()
    return y


def row_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype,
    call: Row,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dW, db), None where not wanted, from the gradient of the own rows. sharded: whose weight and bias these are; dW and
    db leave through it, and are None."""
    tokens, rank, program, *_ = call.backward
    want_x, want_weight, want_bias = call.wanted
    block = tokens.outer, tokens.width, x.shape[-1]
    whole, width, narrow = x.view(block), weight.shape[0], call.narrow
    dx = torch.empty_like(x) if want_x else None
    dx_whole = dx.view(block) if dx is not None else None
    joined: torch.Tensor | None = None  # in a narrow type: all of dy
    dw: torch.Tensor | None = None
    sums: dict[tuple[int, int], torch.Tensor] = {}

    def consume(owner: Owner, part: torch.Tensor) -> None:
        nonlocal dw, joined
        blocks = tokens.blocks[owner.start, owner.stop]
        if dx_whole is not None and sharded is not None and not sharded.here and not narrow:
            made = part.new_empty(part.shape[0], x.shape[-1])
            sharded.gather(Terms({0: part}, made))
            place(made, dx_whole, blocks)
        elif dx_whole is not None:
            if sharded is not None and not sharded.here:
                sharded.gather()
            product_to(part, weight, None, dx_whole, blocks)
        if want_weight and narrow:
            if joined is None:
                joined = part.new_empty(tokens.outer, tokens.width, width)
            place(part, joined, blocks)
        elif sharded is not None and owner == rank:
            pass  # the last term: see below
        elif want_weight and dw is None:
            dw = torch.mm(part.t(), blocks.pick(whole))
        elif want_weight:
            assert dw is not None
            dw.addmm_(part.t(), blocks.pick(whole))
        if want_bias:
            sums[int(owner), owner.index] = part.sum(0, dtype=wide_dtype(part.dtype))

    def consume_all(coming: Sequence[Coming], wait: Callable[[WordLike], None]) -> bool:
        nonlocal dw
        assert kernels is not None
        products, made = [], None
        if dx_whole is not None:
            products.append(Product("forward", weight.t(), dx_whole.flatten(0, 1).t()))
        if want_weight:
            made = torch.empty_like(weight)
            products.append(Product("dgrad", whole.flatten(0, 1).t(), made.t()))
        if not kernels.consume(tokens, coming, wait, products, consume):
            return False
        dw = made
        for owner, part, _ in coming if want_bias else ():
            sums[int(owner), owner.index] = part.sum(0, dtype=wide_dtype(part.dtype))
        return True

    session = ALONE if call.backward.alone else begin(*ranks, x.device, TENSOR_PARALLEL)
    kernels = kernels_for(session.transport, sharded)
    waiting = consume_all if kernels is not None and kernels.waits and (want_x or want_weight) else None
    rows = grad.contiguous().flatten(0, -2)
    shard = (Bindings(rows, consume=consume, consume_all=waiting),)
    execute(call.name, program, shard, session, x.device)
    db = fold([weight.new_zeros(width), *map(sums.__getitem__, sorted(sums))], bias_dtype) if want_bias else None
    if sharded is not None:
        own = (rows, tokens.blocks_of(rank).pick(whole)) if joined is None else (joined.flatten(0, -2), x.flatten(0, -2))
        _leave(sharded, own, dw, db)
        return dx, None, None
    if joined is not None:
        dw = torch.mm(joined.flatten(0, -2).t(), x.flatten(0, -2))
    if want_weight and dw is None:  # no tokens at all
        dw = torch.zeros_like(weight)
    return dx, dw, db


def _leave(
    sharded: ShardedWeights, last: tuple[torch.Tensor, torch.Tensor], dw: torch.Tensor | None, db: torch.Tensor | None
) -> None:
    """Add the last term of wgrad, last[0].T @ last[1], and send rows by rows."""
    grads, inputs = last

    def produce(_: int, piece: Piece) -> None:
        out = piece.tensor
        if piece.part == 1:
            assert db is not None
            out.copy_(piece.of(db))
            return
        left = grads[:, piece.row_start : piece.row_start + out.shape[0]].t()
        product(left, inputs, None if dw is None else piece.of(dw), out)

    sharded.scatter(produce)


def _announced(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: Row,
    ranks: Ranks,
    sharded: ShardedWeights | None = None,
) -> torch.Tensor:
    """`row_forward`, which modes see as a product and the sum of it over the ranks: scattered, or for all of them."""

    def answer() -> torch.Tensor:
        return row_forward(x, weight, bias, call, ranks, sharded).flatten(0, -2)

    rows = x.flatten(0, -2)
    shape = rows.shape[0], weight.shape[0]
    weights = announced.absent(weight.t().shape, x, lambda: announced.absent(shape, x))
    announced.product(rows, weights, None)
    partial = announced.absent(shape, x, answer)
    y = announced.summed(partial, ranks[0]) if call.replicated else announced.scattered(partial, len(call.sizes), ranks[0])
    return y.view(*call.own, weight.shape[0])


def _announced_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_dtype: torch.dtype, call: Row, *ranks: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`row_backward`, which modes see as the products of both gradients."""
    (features, width), tokens = weight.shape, math.prod(x.shape[:-1])
    want_x, want_weight, _ = call.wanted
    with announced.products(x, [(tokens, features, width)] * want_x + [(features, tokens, width)] * want_weight):
        return row_backward(grad, x, weight, bias_dtype, call, *ranks)


# ---- autograd --------------------------------------------------------------------------------------------------------
class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[Row, Ranks, ShardedWeights | None], x: torch.Tensor, *params: torch.Tensor | None
    ) -> torch.Tensor:
        """params: weight and bias; the anchor of what is sharded, if they are."""
        ctx.how = call, ranks, sharded = how
        ctx.bias_dtype = x.dtype
        compute = _announced if modes_active() and hides_inside() else row_forward
        if sharded is not None:
            if saved_tensors_hooks() is None:
                ctx.save_for_backward(x)
            else:
                save(ctx, x)
            y = compute(x, sharded.weights[0], sharded.biases[0], call, ranks, sharded)
            sharded.release()
            return y
        weight, bias = params
        assert weight is not None
        if bias is not None:
            ctx.bias_dtype = bias.dtype
        if saved_tensors_hooks() is None:
            ctx.save_for_backward(x, weight)
        else:
            save(ctx, x, weight)
        return compute(x, weight, bias, call, ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _backward_once(ctx, grad)  # type: ignore[no-any-return]
        x, *weights = ctx.saved_tensors or saved(ctx)
        call, ranks, sharded = ctx.how
        compute = _announced_backward if modes_active() and hides_inside() else row_backward
        if sharded is None:
            return (None, *compute(grad, x, weights[0], ctx.bias_dtype, call, ranks))
        sharded.renew()
        dx, _, _ = compute(grad, x, sharded.weights[0], ctx.bias_dtype, call, ranks, sharded)
        sharded.release()
        return None, dx, None


# With create_graph=True: what is differentiated a second time raises. It calls the backward again, without the grad mode.
_backward_once: Any = torch.autograd.function.once_differentiable(_RowParallel.backward)  # type: ignore[no-untyped-call]


def row_parallel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    layout: Layout = "sharded",
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
) -> torch.Tensor:
    """This rank's positions of the sum over ranks of x @ W.T, plus bias, computed and sent slice by slice.

    Args:
        x: [..., S, ..., K]: all positions (of dimension `dim`), this rank's features.
        weight: [D, K]: this rank's columns of the weight, of x's dtype (under autocast both are cast to its dtype). bias: [D],
            whole and the same on every rank; added once to every row, its gradient summed over all ranks.
        sizes: positions that each rank keeps of the result; None: torch.chunk's division of S (that of DTensor's Shard): ceil(S
            / R), the last ones short or empty.
        reduce_dtype: dtype in which the partial sums travel; default x's. They are always summed in a wide type, in rank order
            (order='ring': in ring order).
        layout: 'replicated': every rank gets the sums of all positions, [..., D], the first while the products of the next are
            computed. `dim` and `sizes` are of no use then; nothing moves in backward, and db is not summed over the ranks, for
            all have the same gradient.
        slices_per_rank, group, order, transport: as in `column_parallel`.

    Returns [..., s_r, ..., D]. Differentiable in all operands. All ranks must call it alike, and run the backwards of several
    calls in the same order; the same operands must require gradients on all ranks.

    Raises ValueError for operands that do not fit together here, MismatchError (before data moves) for those that do not fit
    those of other ranks, and what the collectives raise.
    """
    return row_parallel_of(
        "row_parallel",
        x,
        weight,
        bias,
        dim=dim,
        sizes=sizes,
        group=group,
        reduce_dtype=reduce_dtype,
        layout=layout,
        slices_per_rank=slices_per_rank,
        order=order,
        transport=transport,
    )


def row_parallel_of(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dim: int,
    sizes: Sequence[int] | None,
    slices_per_rank: int | None,
    order: str,
    transport: Transport | None,
    layout: Layout = "sharded",
    reduce_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    sharded: ShardedWeights | None = None,
    served: GraphPlace | None = None,
) -> torch.Tensor:
    """`row_parallel` of a layer whose name is in errors and measurements. sharded: whose weight and bias these are.
    served: where graphs find the layer's ranks."""
    if torch.is_autocast_enabled(x.device.type):
        x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    if torch.compiler.is_compiling() and (transport is None or served is not None):
        from commfuse_dp.ops.sequence.graph_ops import new_place, row_in_graph

        dim, partial_dtype = _check(name, x, weight, bias, dim, sizes, reduce_dtype, layout)
        found = served if served is not None else new_place(group, order, slices_per_rank, name)
        divided = _divided(name, x, dim, sizes, found.world_size)
        return row_in_graph(x, weight, bias, dim, divided, partial_dtype, layout, found)
    if transforms_active():
        raise transformed(name)
    trainable = sharded.trainable if sharded is not None else None
    ranks = group, transport
    call = _prepare(name, x, weight, bias, dim, sizes, ranks, reduce_dtype, layout, slices_per_rank, order, trainable)
    params = (weight, bias) if sharded is None else sharded.anchors
    return _RowParallel.apply((call, ranks, sharded), x.contiguous(), *params)


def row_parallel_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 1,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    layout: Layout = "sharded",
    slices_per_rank: int | None = None,
    order: str = "pairwise",
    transport: Transport | None = None,
) -> torch.Tensor:
    """What `row_parallel` computes, unfused: one GEMM, then one reduce-scatter; in backward one all-gather, then GEMMs, and an
    all-reduce of the bias' gradient. `transport` serves the comparison of the ranks alone."""
    x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    name = "row_parallel_reference"
    call = _prepare(name, x, weight, bias, dim, sizes, (group, transport), reduce_dtype, layout, slices_per_rank, order)
    if call.replicated:
        whole = total(F.linear(x, weight), group, reduce_dtype)
        return whole if bias is None else whole + bias
    own = scatter_sequence(F.linear(x, weight), call.dim, call.sizes, group, reduce_dtype)
    return own if bias is None else own + replicated(bias, group)


def _prepare(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    sizes: Sequence[int] | None,
    ranks: Ranks,
    reduce_dtype: torch.dtype | None,
    layout: Layout,
    slices_per_rank: int | None,
    order: str,
    trainable: Sequence[bool] | None = None,
) -> Row:
    """Check the operands and agree with the other ranks, or find that this was done before for ones like these. trainable: of
    weight and bias; None: those that require a gradient."""
    given = sizes if sizes is None else tuple(sizes)
    flags = trainable if trainable is None else tuple(trainable)
    how = name, dim, given, reduce_dtype, layout, slices_per_rank, order, flags
    signature, found = find_call(ranks, how, x, (weight, bias))
    if found is not None:
        return found  # type: ignore[no-any-return]
    at, partial_dtype = _check(name, x, weight, bias, dim, sizes, reduce_dtype, layout)
    sited = place_of(*ranks, order, slices_per_rank, name)
    divided = _divided(name, x, at, sizes, sited.world_size)
    recorded = torch.is_grad_enabled()
    if trainable is None:
        trainable = [tensor is not None and tensor.requires_grad for tensor in (weight, bias)]
    wanted = tuple([recorded and flag for flag in (x.requires_grad, *trainable)])
    more = {"out_features": weight.shape[0], "reduce_dtype": partial_dtype}
    tokens = agree_on(sited, x, at, wanted, divided, divided[sited.rank], layout, **more)
    shape, features = beside(x, at, layout), (weight.shape[0], x.dtype)
    call = row_of(name, sited.how, tokens, at, shape, features, partial_dtype, wanted, layout)
    remember(ranks, x.device, signature, call)
    return call


def _check(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    sizes: Sequence[int] | None,
    reduce_dtype: torch.dtype | None,
    layout: Layout,
) -> tuple[int, torch.dtype]:
    """(dimension of the sequence, counted from the front; dtype of the partial sums).

    Raises ValueError for operands that do not fit together."""
    dim = check_dim(name, x, dim, sizes, layout)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}: [D, {x.shape[-1]}] is needed for an input of "
            f"shape {tuple(x.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"{name}: bias has shape {tuple(bias.shape)}: ({weight.shape[0]},) is needed")
    check_dtype(name, x, {"weight": weight, "bias": bias})
    partial_dtype = reduce_dtype if reduce_dtype is not None else x.dtype
    check_summable("reduce_dtype", partial_dtype)
    return dim, partial_dtype


def _divided(name: str, x: torch.Tensor, dim: int, sizes: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Positions that every rank keeps."""
    positions = x.shape[dim]
    found = tuple(sizes) if sizes is not None else even_sizes(positions, world_size)
    if len(found) != world_size or min(found) < 0 or sum(found) != positions:
        raise ValueError(
            f"{name}: sizes={list(found)}: one size >= 0 for each of {world_size} ranks is needed, {positions} positions "
            f"(dim {dim} of an input of shape {tuple(x.shape)}) in all"
        )
    return found


__all__ = ["row_backward", "row_forward", "row_parallel", "row_parallel_of", "row_parallel_reference"]
