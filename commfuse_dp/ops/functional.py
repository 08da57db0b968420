"""The fused linear as a function, for users of torch.distributed who shard their weights themselves.

    y = fused_linear(x, weight_shard, bias_shard, out_features=3072)
    loss(y).backward()                                  # x.grad as usual; weight_shard.grad is the sum over all ranks

N ranks, rank o keeps rows_o of the weight [out, in] and of the bias [out]; x is this rank's own data (data parallelism).

| pass | collective | computed in its callback | order |
| --- | --- | --- | --- |
| forward | all_gather | y[:, rows_o] = x @ W_o.T + b_o | own first |
| dgrad | all_gather | dx += dy[:, rows_o] @ W_o | own first |
| wgrad | reduce_scatter | dW_o = dy[:, rows_o].T @ x, db_o = sum of dy | own last |

The bias travels as one more column of its weight rows, so that it costs no message of its own. Each call is complete when it
returns; overlap beyond one layer is the engine's business. `fused_linear_reference` computes the same, unfused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from commfuse_dp.collectives import Owner, all_gather, reduce_scatter, reference
from commfuse_dp.collectives.arguments import Op, check_op, check_sizes, even_sizes
from commfuse_dp.collectives.sessions import rank_and_size
from commfuse_dp.ops.adjoint import adjoint
from commfuse_dp.ops.compat import hides_inside, modes_active, transformed, transforms_active
from commfuse_dp.ops.linear import announced_linear, announced_linear_backward
from commfuse_dp.ops.operands import Visit, WholeProducts
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.ops.products import linear_backward, linear_forward
from commfuse_dp.ops.saved import save, saved
from commfuse_dp.transport.base import Transport


class _Slice(NamedTuple):
    """A `ByOwner`."""

    owner: int


class _Options(NamedTuple):
    sizes: tuple[int, ...]  # rows of every rank
    op: Op
    reduce_dtype: torch.dtype | None
    calls: dict[str, Any]  # arguments of every collective call


class _ShardOperand:
    """A `ShardedOperand` moved by the plain collectives: one call for every pass."""

    name = "(fused_linear)"

    def __init__(self, packed: torch.Tensor, has_bias: bool, options: _Options) -> None:
        self.out_features = sum(options.sizes)
        self.in_features = packed.shape[1] - has_bias
        self.transposed = False
        self.has_bias = has_bias
        self.split_rows: tuple[int, ...] = ()
        self.whole: WholeProducts | None = None
        self.anchor = packed
        self.trainable = (False, False)
        self.reduced: torch.Tensor | None = None  # [own rows, columns of the parts that have a gradient]
        self._packed = packed
        self._options = options

    def expect_backward(self) -> None:
        pass

    def gather(self, consume: Visit) -> None:
        def take(owner: Owner, rows: torch.Tensor) -> None:
            consume(_Slice(int(owner)), self._parts(rows, owner.start, (True, self.has_bias)))

        all_gather(self._packed, take, sizes=self._options.sizes, **self._options.calls)

    def exchange(self, consume: Visit | None, produce: Visit | None) -> None:
        if consume is not None:
            self.gather(consume)
        include = self.trainable
        if produce is None or not any(include):
            return

        def fill(owner: Owner, rows: torch.Tensor) -> None:
            produce(_Slice(int(owner)), self._parts(rows, owner.start, include))

        width = self.in_features * include[0] + include[1]
        self.reduced = reduce_scatter(
            fill,
            shape=(self.out_features, width),
            dtype=self._packed.dtype,
            reduce_dtype=self._options.reduce_dtype,
            op=self._options.op,
            sizes=self._options.sizes,
            **self._options.calls,
        )

    def _parts(self, rows: torch.Tensor, start: int, include: tuple[bool, ...]) -> list[Piece]:
        parts = [Piece(1, start, rows[:, -1])] if include[1] else []
        return [*parts, Piece(0, start, rows[:, : self.in_features])] if include[0] else parts


class _FusedShardLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: _Options) -> torch.Tensor:
        ctx.options = options
        save(ctx, x, weight, *(() if bias is None else (bias,)))
        compute = announced_linear if modes_active() and hides_inside() else linear_forward
        return compute(x, _operand(weight, bias, options))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *more = saved(ctx)
        bias = more[0] if more else None
        options: _Options = ctx.options
        operand = _operand(weight, bias, options)
        wanted = operand.trainable = (ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2])
        compute = announced_linear_backward if modes_active() and hides_inside() else linear_backward
        dx = compute(grad, x, operand, ctx.needs_input_grad[0])
        reduced = operand.reduced
        if reduced is None:
            return dx, None, None, None
        dw = reduced[:, : operand.in_features].contiguous() if wanted[0] else None
        db = reduced[:, -1].contiguous() if wanted[1] else None
        return dx, dw, db, None


def _operand(weight: torch.Tensor, bias: torch.Tensor | None, options: _Options) -> _ShardOperand:
    packed = weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], dim=1)
    return _ShardOperand(packed, bias is not None, options)


def fused_linear(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias_shard: torch.Tensor | None = None,
    *,
    out_features: int,
    op: Op = "sum",
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor:
    """y = x @ W.T + b with W and b sharded by rows over the ranks of a group. Differentiable in x and in the shards.

    Args:
        x: [..., in]; this rank's data; leading dimensions may differ from rank to rank.
        weight_shard: [rows of this rank, in]; bias_shard: [rows of this rank]; of x's dtype (under autocast they are cast to
            the autocast dtype before they travel).
        out_features: rows of the whole weight.
        op: how the ranks' gradients of a shard are put together: their 'sum' (of the ranks' losses) or 'mean'.
        reduce_dtype: dtype in which partial gradients travel; default the shards'. They are always summed in a wide type.
        sizes: rows of every rank; default torch.chunk's division of out_features (FSDP2's rule): ceil(out / N), the last
            ones short or empty.
        group, order, slices_per_rank, transport: as in `commfuse_dp.collectives`.

    Returns [..., out]. All ranks must call it alike, and run the backwards of several calls in the same order; the same of
    x, weight_shard and bias_shard must require gradients on all ranks.

    Raises ValueError for shards that do not fit, RuntimeError for an x that does not, and what the collectives raise.
    """
    x, weight_shard, bias_shard, options = _prepare(
        x, weight_shard, bias_shard, out_features, op, reduce_dtype, sizes, group, order, slices_per_rank, transport
    )
    return _FusedShardLinear.apply(x, weight_shard, bias_shard, options)


def _gather_whole(shard: torch.Tensor, options: _Options) -> torch.Tensor:
    """Whole tensor from shards; backward: reduce-scatter of its gradient. Stock collectives."""
    dtype = shard.dtype
    partial_dtype = options.reduce_dtype if options.reduce_dtype is not None else dtype

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        partial = grad.to(partial_dtype)
        return reference.reduce_scatter(partial, op=options.op, sizes=options.sizes, dtype=dtype, **options.calls)

    return adjoint(shard, lambda own: reference.all_gather(own, sizes=options.sizes, **options.calls), scatter)


def fused_linear_reference(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias_shard: torch.Tensor | None = None,
    *,
    out_features: int,
    op: Op = "sum",
    reduce_dtype: torch.dtype | None = None,
    sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    order: str = "pairwise",
    slices_per_rank: int = 1,
    transport: Transport | None = None,
) -> torch.Tensor:
    """What `fused_linear` computes, unfused: gather everything, one GEMM, reduce everything. `transport` is not used."""
    x, weight_shard, bias_shard, options = _prepare(
        x, weight_shard, bias_shard, out_features, op, reduce_dtype, sizes, group, order, slices_per_rank, transport
    )
    weight = _gather_whole(weight_shard, options)
    bias = None if bias_shard is None else _gather_whole(bias_shard, options)
    return F.linear(x, weight, bias)


def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    op: Op,
    reduce_dtype: torch.dtype | None,
    sizes: Sequence[int] | None,
    group: dist.ProcessGroup | None,
    order: str,
    slices_per_rank: int,
    transport: Transport | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, _Options]:
    """Check the arguments, before any rank has sent anything, and cast them under autocast (a differentiable cast)."""
    if transforms_active():
        raise transformed("fused_linear")
    check_op(op)
    rank, world_size = rank_and_size(group, transport)
    rows = check_sizes(sizes, world_size) if sizes is not None else even_sizes(out_features, world_size)
    if sum(rows) != out_features:
        raise ValueError(f"sizes={list(rows)} add up to {sum(rows)}, but out_features={out_features}")
    if weight.dim() != 2 or weight.shape[0] != rows[rank]:
        raise ValueError(
            f"weight_shard of rank {rank} has shape {tuple(weight.shape)}: [{rows[rank]}, in_features] is needed, as "
            f"out_features={out_features} are divided among {world_size} ranks in {list(rows)} rows"
        )
    if bias is not None and (tuple(bias.shape) != (rows[rank],) or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias_shard of rank {rank} is {bias.dtype} of shape {tuple(bias.shape)}: {weight.dtype} of shape "
            f"({rows[rank]},) is needed"
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    calls = {"group": group, "order": order, "slices_per_rank": slices_per_rank, "transport": transport}
    return x, weight, bias, _Options(rows, op, reduce_dtype, calls)
