"""The terms of a column-parallel layer's backward, slice by slice or by kernels for all slices: see column_parallel.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import Coming, Leaving
from commfuse_dp.device.base import WordLike
from commfuse_dp.ops.gathered import ShardedWeights
from commfuse_dp.ops.pieces import Piece
from commfuse_dp.ops.sequence.calls import Column
from commfuse_dp.ops.sequence.rows import Terms, place, product
from commfuse_dp.ops.sequence.whole import Product, WholeSequence, join


class InputGradient:
    """P_j = sum over i of dy_i[:, S_j] @ W_i."""

    def __init__(
        self,
        call: Column,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        sharded: ShardedWeights | None,
    ) -> None:
        """grads: of y_i, [outer, width, F_i]."""
        self._call, self._grads, self._weights, self._sharded = call, grads, weights, sharded
        self._joined: torch.Tensor | None = None  # in a narrow type: all weights

    def produce(self, owner: Owner, out: torch.Tensor) -> None:
        blocks, sharded, narrow = self._call.backward.tokens.blocks[owner.start, owner.stop], self._sharded, self._call.narrow
        lefts = {}
        for number, grad in enumerate(self._grads):
            if grad is not None:
                lefts[number] = blocks.pick(grad)
        if not lefts:
            out.zero_()
            return
        if sharded is not None and not sharded.here:
            sum_rows = None if narrow else Terms(lefts, out)
            sharded.gather(sum_rows, tuple(lefts))
            if sum_rows is not None:
                return
        if narrow and len(lefts) > 1:
            if self._joined is None:
                self._joined = torch.cat([self._weights[number] for number in lefts])
            torch.mm(torch.cat([*lefts.values()], dim=1), self._joined, out=out)
            return
        started = False
        for number, left in lefts.items():
            if started:
                out.addmm_(left, self._weights[number])
            else:
                torch.mm(left, self._weights[number], out=out)
                started = True

    def produce_all(
        self,
        leaving: Sequence[Leaving],
        value: int,
        kernels: WholeSequence,
        produce: Callable[[Owner, torch.Tensor], object],
    ) -> list[list[WordLike]]:
        """The sum over i in one kernel. At least one gradient is there."""
        grads, weights = [], []
        for grad, weight in zip(self._grads, self._weights, strict=True):
            if grad is not None:
                grads.append(grad.flatten(0, 1))
                weights.append(weight)
        return kernels.produce(self._call.backward.tokens, leaving, value, join(grads, 1).t(), join(weights, 0), produce)


class WeightGradients:
    """dW_i = dy_i.T @ x, from slices of x or from all of it."""

    def __init__(
        self,
        call: Column,
        grads: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor],
        own_last: int | None,
    ) -> None:
        """grads: of y_i, [outer, width, F_i]. own_last: the rank whose shard's terms are left to `leave`."""
        self._call, self._grads, self._weights, self._own_last = call, grads, weights, own_last
        self._sums: dict[int, torch.Tensor] = {}
        self._active: list[tuple[int, torch.Tensor]] = []
        for i, grad in enumerate(grads):
            if call.want_weights[i] and grad is not None:
                self._active.append((i, grad))
        self.wanted = bool(self._active)
        self._started = False
        self._made = 0.0  # share of the rows of each dW_i that is computed
        self._joined: torch.Tensor | None = None  # in a narrow type: all of x

    def consume(self, owner: Owner, rows: torch.Tensor) -> None:
        if not self._active:
            return
        tokens = self._call.backward.tokens
        blocks = tokens.blocks[owner.start, owner.stop]
        if self._call.narrow:
            if self._joined is None:
                self._joined = rows.new_empty(tokens.outer, tokens.width, rows.shape[1])
            place(rows, self._joined, blocks)
            return
        if owner == self._own_last:
            return
        for i, grad in self._active:
            left = blocks.pick(grad).t()
            if self._started:
                self._sums[i].addmm_(left, rows)
            else:
                self._sums[i] = torch.mm(left, rows)
        self._started = True

    def consume_all(self, kernels: WholeSequence, coming: Sequence[Coming], wait: Callable[[WordLike], None]) -> bool:
        """Those of all weights in one kernel; each is a part of the result."""
        left = join([grad.flatten(0, 1) for _, grad in self._active], 1).t()
        made = left.new_empty(left.shape[0], coming[0].rows.shape[1])
        whole = kernels.consume(self._call.backward.tokens, coming, wait, [Product("dgrad", left, made)], self.consume)
        if whole:
            parts = made.split([grad.shape[-1] for _, grad in self._active])
            self._sums = {i: part for (i, _), part in zip(self._active, parts, strict=True)}
            self._made = 1.0
        return whole

    def from_whole(self, x: torch.Tensor, share: float = 1.0) -> None:
        """What is missing up to this share of the rows of each dW_i."""
        made, self._made = self._made, max(share, self._made)
        if made >= share:
            return
        rows = x.flatten(0, -2)
        for i, grad in self._active:
            left, count = grad.flatten(0, -2).t(), grad.shape[-1]
            if made == 0.0 and share == 1.0:
                self._sums[i] = torch.mm(left, rows)
                continue
            if i not in self._sums:
                self._sums[i] = rows.new_empty(count, rows.shape[1])
            part = slice(int(count * made), int(count * share))
            torch.mm(left[part], rows, out=self._sums[i][part])

    def leave(self, sharded: ShardedWeights, saved: torch.Tensor, *, whole: bool) -> None:
        """Add the last terms, those of the own shard, and send rows by rows. whole: `saved` is all of x, not the own shard."""
        tokens = self._call.backward.tokens
        if self._joined is not None:
            saved, whole = self._joined, True
        right = saved.flatten(0, -2)
        blocks = tokens.blocks_of(self._own_last) if not whole and self._own_last is not None else None

        def produce(i: int, piece: Piece) -> None:
            grad, out = self._grads[i], piece.tensor
            if grad is None:
                out.zero_()
                return
            columns = grad[..., piece.row_start : piece.row_start + out.shape[0]]
            if piece.part == 1:
                torch.sum(columns, dim=(0, 1), dtype=out.dtype, out=out)
                return
            left = columns.flatten(0, -2) if blocks is None else blocks.pick(columns)
            product(left.t(), right, piece.of(self._sums[i]) if i in self._sums else None, out)

        sharded.scatter(produce)

    def finish(self) -> list[torch.Tensor | None]:
        if self._joined is not None:
            self.from_whole(self._joined)
        found: list[torch.Tensor | None] = [None] * len(self._grads)
        for i, _ in self._active:
            found[i] = self._sums[i] if i in self._sums else torch.zeros_like(self._weights[i])  # else no tokens at all
        return found


__all__ = ["InputGradient", "WeightGradients"]
