"""All-gather GEMM, dgrad: dx = sum over slices s of dy[:, rows_s] @ W_s, in one persistent kernel.

    dy       [tokens, >= end_row]  dense columns or rows; columns of rows that the table does not have take no part
    W_s      [rows_s, columns]     through the table
    dx       [tokens, columns]     dense columns or rows; overwritten

The reduction runs over the slices in the table's order, own first, then the others as they arrive, in float32 registers: dx is
written once, is never read, and is rounded once (a chain of one GEMM per slice reads and rounds it N - 1 times).

[Note: How far this overlaps]
Every tile needs every slice, so the tiles that are computed first cannot end before the last slice is there; all others
run without a wait. In a fused linear's backward the slices travel under wgrad, which comes first and needs none of them.

[Note: The wait inside the loop]
The loop over k is one loop over the steps of all slices, so that loads stay in flight across the ends of slices. A new
slice's line is read, and waited for, in the step that begins it: ahead of the loads that depend on its address. Only the first
tile of a program waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from commfuse_dp.device.base import as_int32
from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.device_code import (
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
from commfuse_dp.kernels.launching import check_operand, check_output, dense, launch, plan_of, strides
from commfuse_dp.kernels.table import SliceTable
from commfuse_dp.kernels.tiles import Problem, TileConfig


@triton.jit(do_not_specialize=["epoch"])
def dgrad_kernel(
    dy,
    dx,
    table,
    tokens,
    columns,
    total,
    steps,
    stride_dy,
    stride_dx,
    width_dy,
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
    DY_TRANSPOSED: tl.constexpr,
    DX_TRANSPOSED: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    POINTER_ALIGN: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
):
    dtype = dy.dtype.element_ty
    tiles_m = tl.cdiv(tokens, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    mine = tl.program_id(0)
    rows = tl.load(table + ROWS).to(tl.int32)
    if TMA:
        dy_tma = describe_dense(dy, tokens, width_dy, stride_dy, BLOCK_M, BLOCK_K, DY_TRANSPOSED)
        w_tma = tl.make_tensor_descriptor(
            slice_pointer(table, dtype, 16), [rows, columns], [tl.load(table + STRIDE), 1], [BLOCK_K, BLOCK_N]
        )
    for tile in tl.range(mine, total, tl.num_programs(0), flatten=FLAT):
        tile_m, tile_n = grouped(tile, tiles_m, tiles_n, GROUP)
        start_m = tile_m * BLOCK_M
        start_n = tile_n * BLOCK_N
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        if not TMA:
            a_rows = begin_rows(dy, stride_dy, offs_m, tokens, False, DY_TRANSPOSED)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        line = table - FIELDS
        at = 0  # row within the slice
        rows = 0
        # Kept divided by their alignment: the compiler sees the factor, which it could not see in a value carried by a loop.
        address = tl.zeros((), dtype=tl.int64)
        column = tl.zeros((), dtype=tl.int64)
        w_stride = tl.zeros((), dtype=tl.int64)
        for _ in range(steps):
            if at >= rows:
                line += FIELDS
                at = 0
                if tile == mine:
                    await_word(line, epoch, HAS_EXACT, TMA, INTERPRETED)
                rows = tl.load(line + ROWS).to(tl.int32)
                column = tl.load(line + FIRST_ROW) // COLUMN_ALIGN
                if TMA:
                    w_tma = tl.make_tensor_descriptor(
                        slice_pointer(line, dtype, 16), [rows, columns], [tl.load(line + STRIDE), 1], [BLOCK_K, BLOCK_N]
                    )
                else:
                    address = tl.load(line) // POINTER_ALIGN
                    w_stride = tl.load(line + STRIDE) // STRIDE_ALIGN
            if TMA:
                a = load_described(dy_tma, start_m, (column * COLUMN_ALIGN).to(tl.int32) + at, DY_TRANSPOSED)
                b = w_tma.load([at, start_n])
            else:
                offs_k = at + tl.arange(0, BLOCK_K)
                w = tl.multiple_of((address * POINTER_ALIGN).to(tl.pointer_type(dtype)), POINTER_ALIGN)
                first = column * COLUMN_ALIGN
                a = load_dense(a_rows, stride_dy, first, offs_m, tokens, offs_k, rows, False, EVEN, DY_TRANSPOSED)
                b_at = w + offs_k[:, None].to(tl.int64) * (w_stride * STRIDE_ALIGN) + offs_n[None, :]
                if EVEN:
                    b = tl.load(b_at)
                else:
                    b = tl.load(b_at, mask=(offs_k[:, None] < rows) & (offs_n[None, :] < columns), other=0.0)
            acc = multiply(a, b, acc, PRECISION, WIDEN)
            at += BLOCK_K
        store_tile(dx, stride_dx, offs_m, start_n, tokens, columns, acc, HALVES, DX_TRANSPOSED)


def gemm_dgrad(
    dy: torch.Tensor,
    table: SliceTable,
    dx: torch.Tensor,
    *,
    epoch: int = 0,
    config: TileConfig | None = None,
    programs: int | None = None,
    problem: Problem | None = None,
) -> None:
    """Enqueue the product on the current stream. Never waits on the host.

    dy: [tokens, >= table.end_row] in the slices' dtype; dx: [tokens, columns], dense columns or rows, any of the dtypes.
    epoch: added to the value that a slice's word is waited for, unless it is exact. programs: how many run (default: as the
    configuration says). problem: `tiles.problem_of` of these operands, if the caller has it. Raises ValueError if they do not
    fit together.
    """
    check_operand("dy", dy, table, table.end_row, table.dtype if len(table) else None)
    check_output("dx", dx, table, table.columns)
    if dx.shape != (dy.shape[0], table.columns):
        raise ValueError(
            f"dy {tuple(dy.shape)}, dx {tuple(dx.shape)}: dx must have {table.columns} columns, as many rows as dy"
        )
    if not len(table):
        dx.zero_()
        return
    if not dx.numel():
        return
    dy = dense(dy)
    problem = problem or tiles.problem_of("dgrad", table, dy, dx)
    plan = plan_of(problem, config, table.alignments, table.has_exact, dy.device)
    arguments = (
        *(dy, dx, table.lines, dy.shape[0], table.columns, plan.tiles, plan.steps),
        *(*strides(problem, dy, dx), dy.shape[1], as_int32(epoch)),
    )
    launch(dgrad_kernel, arguments, plan, programs)
