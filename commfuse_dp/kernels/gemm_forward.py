"""All-gather GEMM, forward: y[:, rows_s] = x @ W_s.T (+ b_s) for every slice s, in one persistent kernel.

    x        [tokens, columns]     dense columns, rows any distance apart; or dense rows, columns any distance apart
    W_s      [rows_s, columns]     through the table: any number of slices, any sizes, any addresses
    y        [tokens, >= end_row]  as x; columns of rows that the table does not have are left as they are

Tiles of y are computed slice by slice in the table's order: own slice first, the others as they arrive. A tile's product runs
over all columns, so it needs one slice only and nothing is summed twice; accumulated in float32, rounded once. The first tile
that a program computes of a slice waits for the slice (device_code, "Waiting inside a kernel").

    programs    | own slice            | slice 1         | slice 2         |
    copies      | slice 1 | slice 2 | ...

[Note: One loop or two]
`flat` makes one loop of the loop over tiles and the loop over k. The loads of the next tile, and its wait, then run ahead under
the last products of this one, which is right as long as nobody waits for this tile's output before the next slice has come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from commfuse_dp.device.base import as_int32
from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.device_code import (
    BIAS,
    FIELDS,
    FIRST_ROW,
    ROWS,
    STRIDE,
    await_word,
    begin_rows,
    describe_dense,
    grouped,
    load_dense,
    load_described,
    multiply,
    slice_pointer,
    store_tile,
)
from commfuse_dp.kernels.launching import (
    check_operand,
    check_output,
    dense,
    launch,
    plan_of,
    strides,
)
from commfuse_dp.kernels.table import SliceTable, check_row_bias
from commfuse_dp.kernels.tiles import Problem, TileConfig


@triton.jit(do_not_specialize=["epoch"])
def forward_kernel(
    x,
    y,
    table,
    row_bias,
    tokens,
    columns,
    total,
    stride_x,
    stride_y,
    epoch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    Y_TRANSPOSED: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    POINTER_ALIGN: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
    ROWS_ALIGN: tl.constexpr,
):
    dtype = x.dtype.element_ty
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    steps = tl.maximum(tl.cdiv(columns, BLOCK_K), 1)
    s = 0  # the slice at hand; `before` tiles are in the slices before it, `count` in it
    before = 0
    rows = tl.load(table + ROWS).to(tl.int32)
    count = tl.cdiv(rows, BLOCK_N) * tiles_m
    waited = -1
    if TMA:
        x_tma = describe_dense(x, tokens, columns, stride_x, BLOCK_M, BLOCK_K, X_TRANSPOSED)
        w_tma = tl.make_tensor_descriptor(
            slice_pointer(table, dtype, 16), [rows, columns], [tl.load(table + STRIDE), 1], [BLOCK_N, BLOCK_K]
        )
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        while tile >= before + count:
            before += count
            s += 1
            rows = tl.load(table + s * FIELDS + ROWS).to(tl.int32)
            count = tl.cdiv(rows, BLOCK_N) * tiles_m
        line = table + s * FIELDS
        if s != waited:
            await_word(line, epoch, HAS_EXACT, TMA, INTERPRETED)
            waited = s
            if TMA:
                w_tma = tl.make_tensor_descriptor(
                    slice_pointer(line, dtype, 16), [rows, columns], [tl.load(line + STRIDE), 1], [BLOCK_N, BLOCK_K]
                )
        tile_m, tile_n = grouped(tile - before, tiles_m, tl.cdiv(rows, BLOCK_N), GROUP)
        start_m = tile_m * BLOCK_M
        start_n = tile_n * BLOCK_N
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if not TMA:  # rows of the slice beyond its end read the last one; they are not stored
            w_stride = tl.multiple_of(tl.load(line + STRIDE), STRIDE_ALIGN)
            a_rows = begin_rows(x, stride_x, offs_m, tokens, False, X_TRANSPOSED)
            b_rows = slice_pointer(line, dtype, POINTER_ALIGN) + tl.minimum(offs_n, rows - 1)[None, :].to(tl.int64) * w_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            if TMA:
                a = load_described(x_tma, start_m, step * BLOCK_K, X_TRANSPOSED)
                b = w_tma.load([start_n, step * BLOCK_K]).T
            else:
                offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_dense(a_rows, stride_x, 0, offs_m, tokens, offs_k, columns, False, EVEN, X_TRANSPOSED)
                if EVEN:
                    b = tl.load(b_rows + offs_k[:, None])
                else:
                    b = tl.load(b_rows + offs_k[:, None], mask=offs_k[:, None] < columns, other=0.0)
            acc = multiply(a, b, acc, PRECISION, WIDEN)
        if HAS_BIAS:
            bias = tl.load(line + BIAS).to(tl.pointer_type(dtype))
            acc += tl.load(bias + offs_n, mask=offs_n < rows, other=0.0).to(tl.float32)[None, :]
        if row_bias is not None:
            acc += tl.load(row_bias + offs_m, mask=offs_m < tokens, other=0.0).to(tl.float32)[:, None]
        column = tl.multiple_of(tl.load(line + FIRST_ROW), COLUMN_ALIGN)
        end = tl.multiple_of(tl.load(line + ROWS).to(tl.int32), ROWS_ALIGN)
        out = y + (column * stride_y if Y_TRANSPOSED else column)
        store_tile(out, stride_y, offs_m, start_n, tokens, end, acc, HALVES, Y_TRANSPOSED)


def gemm_forward(
    x: torch.Tensor,
    table: SliceTable,
    y: torch.Tensor,
    *,
    row_bias: torch.Tensor | None = None,
    epoch: int = 0,
    config: TileConfig | None = None,
    programs: int | None = None,
    problem: Problem | None = None,
) -> None:
    """Enqueue the product on the current stream. Never waits on the host.

    x: [tokens, columns] in the slices' dtype; y: [tokens, >= table.end_row], dense columns or rows, any of the dtypes.
    row_bias: [tokens], dense, in x's dtype, added to every column of y; only where the slices have no bias. epoch: added to the
    value that a slice's word is waited for, unless it is exact. programs: how many run (default: as the configuration says).
    problem: `tiles.problem_of` of these operands, if the caller has it. Raises ValueError if they do not fit together.
    """
    check_operand("x", x, table, table.columns, table.dtype)
    check_output("y", y, table, table.end_row)
    if x.shape != (y.shape[0], table.columns):
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)}: x must have {table.columns} columns, y as many rows as x")
    if row_bias is not None:
        check_row_bias(row_bias, x, table)
    if not len(table) or not x.shape[0]:
        return
    x = dense(x)
    problem = problem or tiles.problem_of("forward", table, x, y)
    plan = plan_of(problem, config, table.alignments, table.has_exact, x.device)
    arguments = (
        *(x, y, table.lines, row_bias, x.shape[0], table.columns, plan.tiles),
        *(*strides(problem, x, y), as_int32(epoch)),
    )
    launch(forward_kernel, arguments, plan, programs)
