"""The GEMMs of a fused linear, slice by slice. No autograd.

Rank o keeps rows_o of the weight W along dim 0. Whether the weight is [out, in] (nn.Linear) or [in, out] (`transposed`, Conv1D
of Hugging Face), three products do; only their operands change places:

| product | for each owner o | [out, in]: y = x @ W.T + b | [in, out]: y = x @ W + b |
| --- | --- | --- | --- |
| columns | q[:, rows_o] = p @ W_o.T (+ b_o) | forward: p = x, q = y | dgrad: p = dy, q = dx |
| sum | q += p[:, rows_o] @ W_o (+ b) | dgrad: p = dy, q = dx | forward: p = x, q = y (K is split) |
| partials | dW_o = left[:, rows_o].T @ right | left = dy, right = x | left = x, right = dy |

The bias of an owner comes with its first slice, [out] cut by its own rows: those of W in the first case, unrelated to them in
the second, where it is needed whole and is added when all of it has come. db_o = sum over tokens of dy[:, rows_o] in both.

A rank may also keep a flat range of W that begins and ends in the middle of a row (DeepSpeed). The pieces of such a row, [1,
columns] each, are put together, and the row is computed as a whole.

[Note: Sums in low precision]
q += p_o @ W_o rounds q once a slice. In float32 and wider this is lost in the GEMM's own rounding. In bfloat16 and float16 it
is not: the error grows to 1.23, 2.1 and 5.7 x that of one GEMM at 2, 8 and 64 slices. Products rounded to bfloat16 and added up
in float32 still give 1.41 x, at any number of slices; products of operands converted to float32 give 1.00 x, but cost a GEMM in
float32, 4 bytes an element of W and a second sum as large as q. So slices of a narrow type are put together as they come, in
[rows, columns] of that type, and one GEMM follows the last: the very GEMM of the unfused layer, 1.00 x, for a copy of W. (Under
autocast that copy is the conversion, which is needed anyway.) The partial gradients leave as ever, slice by slice. On GPUs
Triton's kernel adds up in float32 registers and turns to slices as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from commfuse_dp.kernels.by_slices import is_narrow
from commfuse_dp.ops.joined import JoinedPartials, JoinedRows, joining
from commfuse_dp.ops.operands import ByOwner, ShardedOperand
from commfuse_dp.ops.pieces import Piece


def linear_forward(
    x: torch.Tensor, operand: ShardedOperand, *, convert: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x @ W.T + b (transposed: x @ W + b), [..., in] -> [..., out], in x's dtype, slice by slice. No autograd.

    convert: cast the parameters to x's dtype (autocast); otherwise the dtypes must agree, as in torch's own linear.
    bias: [out], whole, for an operand that has none.
    Raises RuntimeError for an x of another width or dtype.
    """
    shape = x.shape
    if not shape or shape[-1] != operand.in_features:
        raise RuntimeError(f"linear layer of {operand.in_features} input features got an input of shape {tuple(shape)}")
    flat = len(shape) == 2
    rows = x if flat else x.reshape(-1, operand.in_features)
    y = x.new_empty((*shape[:-1], operand.out_features))
    columns = y if flat else y.view(-1, operand.out_features)
    if bias is not None:
        _check(bias, x.dtype, convert)
    if operand.whole is not None and not convert and operand.whole.forward(rows, columns):
        return y if bias is None else y.add_(bias)
    kind = _Sum if operand.transposed else _Columns
    product = kind(rows, columns, operand, with_bias=operand.has_bias, convert=convert, bias=bias)
    operand.gather(product.consume)
    if product.pending:
        product.finish()
    return y


def linear_backward(
    grad: torch.Tensor, x: torch.Tensor, operand: ShardedOperand, needs_input_grad: bool
) -> torch.Tensor | None:
    """dx [..., in] (None if not needed); the gradients of weight and bias leave through `operand`."""
    grads = grad if grad.dim() == 2 else grad.reshape(-1, operand.out_features)
    rows = x if x.dim() == 2 else x.reshape(-1, operand.in_features)
    dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_input_grad else None
    left, right = (rows, grads) if operand.transposed else (grads, rows)
    joined: JoinedPartials | None = None
    thin, most = joining(left.shape[1], left.shape[0])
    upright = left.t()

    def produce(item: ByOwner, pieces: Sequence[Piece]) -> None:
        for part, row, out, column in pieces:
            if part == 1:
                torch.sum(grads.narrow(1, row, out.shape[0]), dim=0, out=out, dtype=out.dtype)
                continue
            count, width = out.shape
            if count < thin and width == right.shape[1]:
                nonlocal joined
                if joined is None:
                    joined = JoinedPartials(left, right, most)
                joined.fill(row, out)
                continue
            span = upright.narrow(0, row, count)
            inputs = right if width == right.shape[1] else right.narrow(1, column, width)
            if out.dtype == grads.dtype:
                torch.mm(span, inputs, out=out)
            else:  # autocast: computed in the low precision, handed on in the parameter's
                out.copy_(torch.mm(span, inputs))

    product: _Columns | _Sum | None = None
    if dx is not None:
        kind = _Columns if operand.transposed else _Sum
        product = kind(grads, dx, operand, with_bias=False, convert=True)
    consume, products = product.consume if product is not None else None, operand.whole
    if products is None:
        operand.exchange(consume, produce)
    else:
        grads = grads if grads.stride(-1) == 1 else grads.contiguous()
        products.backward(grads, rows, dx, consume, produce)
    if dx is None:
        return None
    if product is not None and product.pending:
        product.finish()
    return dx if dx.shape == x.shape else dx.view(x.shape)


class _SplitRows:
    """Rows of the weight that come in several pieces, put together in `whole`, [rows, columns]."""

    __slots__ = ("_missing", "_places", "rows", "whole")

    def __init__(self, rows: tuple[int, ...], columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.whole = torch.empty(len(rows), columns, dtype=dtype, device=device)
        self._places = {row: place for place, row in enumerate(rows)}
        self._missing = [columns] * len(rows)

    def put(self, piece: Piece) -> torch.Tensor | None:
        """The row, [1, columns], when all of it has come."""
        place, width = self._places[piece.row_start], piece.tensor.shape[1]
        row = self.whole[place : place + 1]
        row.narrow(1, piece.column_start, width).copy_(piece.tensor)
        self._missing[place] -= width
        return row if self._missing[place] == 0 else None


def _check(weight: torch.Tensor, dtype: torch.dtype, convert: bool) -> None:
    # Autocast leaves float64 as it is, so that torch's own linear refuses the mixture, too.
    if weight.dtype != dtype and (not convert or weight.dtype == torch.float64):
        raise RuntimeError(f"linear layer with parameters of dtype {weight.dtype} got an input of dtype {dtype}")


class _Product:
    """Of `given` with the weight, slice by slice, to `out`."""

    __slots__ = (
        "_bias",
        "_convert",
        "_few",
        "_given",
        "_joined",
        "_most",
        "_narrow",
        "_operand",
        "_out",
        "_split",
        "_started",
        "_whole",
        "pending",
    )
    _sums: ClassVar[bool]  # slices are of what is summed over

    def __init__(
        self,
        given: torch.Tensor,
        out: torch.Tensor,
        operand: ShardedOperand,
        *,
        with_bias: bool,
        convert: bool,
        bias: torch.Tensor | None = None,
    ) -> None:
        """with_bias: it comes with the slices. bias: it is here."""
        self._given, self._out, self._operand, self._convert = given, out, operand, convert
        self._bias = out.new_empty(out.shape[1]) if with_bias else bias  # an owner's comes with its first slice
        self._split: _SplitRows | None = None  # from the first piece of a row on
        self._few, self._most = joining((given if self._sums else out).shape[1], given.shape[0])
        self._joined: JoinedRows | None = None  # from the first slice of few rows on
        self._whole: torch.Tensor | None = None  # sums in a narrow type: all rows
        self._narrow, self._started = is_narrow(given.dtype), False
        self.pending = self._sums and self._bias is not None  # `finish` is still to come
        if self._sums and not given.shape[1]:
            out.zero_()


class _Columns(_Product):
    """out[:, rows of s] = given @ W_s.T (+ b_s), slice by slice. given: [tokens, columns], out: [tokens, rows]."""

    __slots__ = ()
    _sums = False

    def consume(self, item: ByOwner | None, pieces: Sequence[Piece]) -> None:
        given, dtype = self._given, self._given.dtype
        for piece in pieces:
            part, row, weight, _ = piece
            if part == 1:
                if self._bias is not None:
                    piece.of(self._bias).copy_(weight)
                continue
            count, width = weight.shape
            if weight.dtype != dtype:
                _check(weight, dtype, self._convert)
            if width < given.shape[1]:
                if self._split is None:
                    self._split = _SplitRows(self._operand.split_rows, given.shape[1], dtype, given.device)
                whole = self._split.put(piece)
                if whole is None:
                    continue
                weight = whole
            if count < self._few:
                if self._joined is None:
                    self._joined = JoinedRows(self._most, given.shape[1], dtype, given.device)
                    self.pending = True
                block = self._joined.put(row, weight)
                if block is None:
                    continue
                row, weight = block
                count = weight.shape[0]
            elif weight.dtype != dtype:
                weight = weight.to(dtype)
            out = self._out.narrow(1, row, count)
            if self._bias is not None:
                torch.addmm(self._bias[row : row + count], given, weight.t(), out=out)
            else:
                torch.mm(given, weight.t(), out=out)

    def finish(self) -> None:
        """After the last slice, if anything is `pending`."""
        if self._joined is not None:
            self._few = 0
            self.consume(None, [Piece(0, *self._joined.take())])


class _Sum(_Product):
    """out = sum over s of given[:, rows of s] @ W_s (+ b). given: [tokens, rows], out: [tokens, columns]."""

    __slots__ = ()
    _sums = True

    def consume(self, item: ByOwner | None, pieces: Sequence[Piece]) -> None:
        given, out, dtype = self._given, self._out, self._given.dtype
        for piece in pieces:
            part, row, weight, _ = piece
            if weight.dtype != dtype:
                _check(weight, dtype, self._convert)
            if part == 1:
                if self._bias is not None:
                    piece.of(self._bias).copy_(weight)
                continue
            count, width = weight.shape
            if self._narrow and (count < given.shape[1] or width < out.shape[1] or self._bias is not None):
                if self._whole is None:
                    self._whole = torch.empty(given.shape[1], out.shape[1], dtype=dtype, device=given.device)
                    self.pending = True
                piece.of(self._whole).copy_(weight)
                continue
            if width < out.shape[1]:
                if self._split is None:
                    self._split = _SplitRows(self._operand.split_rows, out.shape[1], dtype, given.device)
                    self.pending = True
                self._split.put(piece)
                continue
            if count < self._few:
                if self._joined is None:
                    self._joined = JoinedRows(self._most, out.shape[1], dtype, given.device)
                    self.pending = True
                block = self._joined.put(row, weight)
                if block is None:
                    continue
                row, weight = block
            elif weight.dtype != dtype:
                weight = weight.to(dtype)
            span = given.narrow(1, row, weight.shape[0])
            if self._started:
                out.addmm_(span, weight)
            else:
                torch.mm(span, weight, out=out)
                self._started = True

    def finish(self) -> None:
        """After the last slice, if anything is `pending`."""
        if self._whole is not None and self._bias is not None:
            torch.addmm(self._bias, self._given, self._whole, out=self._out)
            return
        if self._whole is not None:
            torch.mm(self._given, self._whole, out=self._out)
        if self._joined is not None:
            self._few = 0
            self.consume(None, [Piece(0, *self._joined.take())])
        if self._split is not None:
            span = torch.cat([self._given.narrow(1, row, 1) for row in self._split.rows], dim=1)
            if self._started:
                self._out.addmm_(span, self._split.whole)
            else:
                torch.mm(span, self._split.whole, out=self._out)
        if self._bias is not None:
            self._out.add_(self._bias)
