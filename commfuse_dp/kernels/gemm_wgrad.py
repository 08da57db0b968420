"""GEMM reduce-scatter, wgrad: dW_s = dy[:, rows_s].T @ x for every slice s, in one persistent kernel.

    dy       [tokens, >= end_row]  dense columns or rows
    x        [tokens, columns]     dense columns or rows
    dW_s     [rows_s, columns]     through the table: into the place that a copy engine sends from (or any other); overwritten

Tiles are computed slice by slice in the table's order: those owed to others first, the own one last. Accumulated in float32
over all tokens, rounded once to the slices' dtype, which may be narrower or wider than the operands'. As soon as a slice is
complete its word says so, while the kernel goes on with the next.

[Note: The last tile of a slice signals]
    every tile   stores | barrier | counter += 1 (acquire and release)
    last one                        sees all others' counts | counter = 0 | word = value (release, system scope)
    copy stream                                                             wait_value(word) | copy dW_s -> owner

The barrier orders all threads' stores before the one thread that counts. A count releases the tile's stores, the last count
acquires everybody's, and its release of the word at system scope hands all of it on: happens-before is transitive, so the
counts themselves need the device's scope only. The counter is back at zero before the word is written: whoever launches after
having seen the word finds it so.
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
    TYPES,
    begin_rows,
    describe_dense,
    grouped,
    join_threads,
    load_dense,
    load_described,
    multiply,
    slice_pointer,
    store_tile,
    write_word,
)
from commfuse_dp.kernels.launching import check_operand, dense, launch, plan_of, strides
from commfuse_dp.kernels.table import SliceTable
from commfuse_dp.kernels.tiles import Problem, TileConfig


@triton.jit(do_not_specialize=["epoch"])
def wgrad_kernel(
    dy,
    x,
    table,
    counters,
    tokens,
    columns,
    total,
    stride_dy,
    stride_x,
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
    X_TRANSPOSED: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    OUT_TYPE: tl.constexpr,
    POINTER_ALIGN: tl.constexpr,
    STRIDE_ALIGN: tl.constexpr,
    COLUMN_ALIGN: tl.constexpr,
):
    tiles_n = tl.cdiv(columns, BLOCK_N)
    steps = tl.maximum(tl.cdiv(tokens, BLOCK_K), 1)
    s = 0  # the slice at hand; `before` tiles are in the slices before it, `count` in it
    before = 0
    rows = tl.load(table + ROWS).to(tl.int32)
    count = tl.cdiv(rows, BLOCK_M) * tiles_n
    if TMA:
        dy_tma = describe_dense(dy, tokens, width_dy, stride_dy, BLOCK_K, BLOCK_M, DY_TRANSPOSED)
        x_tma = describe_dense(x, tokens, columns, stride_x, BLOCK_K, BLOCK_N, X_TRANSPOSED)
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLAT):
        while tile >= before + count:
            before += count
            s += 1
            rows = tl.load(table + s * FIELDS + ROWS).to(tl.int32)
            count = tl.cdiv(rows, BLOCK_M) * tiles_n
        line = table + s * FIELDS
        tile_m, tile_n = grouped(tile - before, tl.cdiv(rows, BLOCK_M), tiles_n, GROUP)
        start_m = tile_m * BLOCK_M
        start_n = tile_n * BLOCK_N
        offs_m = start_m + tl.arange(0, BLOCK_M)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        column = tl.multiple_of(tl.load(line + FIRST_ROW), COLUMN_ALIGN)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            if TMA:  # columns of the next slice make rows beyond this one's end, which are not stored
                a = load_described(dy_tma, step * BLOCK_K, column.to(tl.int32) + start_m, DY_TRANSPOSED).T
                b = load_described(x_tma, step * BLOCK_K, start_n, X_TRANSPOSED)
            else:
                offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a_rows = begin_rows(dy, stride_dy, offs_k, tokens, True, DY_TRANSPOSED)
                b_rows = begin_rows(x, stride_x, offs_k, tokens, True, X_TRANSPOSED)
                a = load_dense(a_rows, stride_dy, column, offs_k, tokens, offs_m, rows, True, EVEN, DY_TRANSPOSED).T
                b = load_dense(b_rows, stride_x, 0, offs_k, tokens, offs_n, columns, True, EVEN, X_TRANSPOSED)
            acc = multiply(a, b, acc, PRECISION, WIDEN)
        out_stride = tl.multiple_of(tl.load(line + STRIDE), STRIDE_ALIGN)
        out = slice_pointer(line, OUT_TYPE, POINTER_ALIGN)
        store_tile(out, out_stride, offs_m, start_n, rows, columns, acc, HALVES, False)
        join_threads(INTERPRETED)
        last = tl.atomic_add(counters + s, 1, sem="acq_rel", scope="gpu") == count - 1
        tl.atomic_xchg(counters + s, 0, mask=last, sem="relaxed", scope="gpu")
        write_word(line, epoch, last)


def gemm_wgrad(
    dy: torch.Tensor,
    x: torch.Tensor,
    table: SliceTable,
    *,
    epoch: int = 0,
    config: TileConfig | None = None,
    programs: int | None = None,
    problem: Problem | None = None,
) -> None:
    """Enqueue the product on the current stream. Never waits on the host.

    dy: [tokens, >= table.end_row], x: [tokens, columns], of one dtype; the slices in any of the dtypes. epoch: added to the
    value that is written to a slice's word. programs: how many run (default: as the configuration says). problem:
    `tiles.problem_of` of these operands, if the caller has it. Raises ValueError if they do not fit together.
    """
    check_operand("dy", dy, table, table.end_row, None)
    check_operand("x", x, table, table.columns, dy.dtype)
    if x.shape != (dy.shape[0], table.columns) or (len(table) and table.dtype not in TYPES):
        raise ValueError(
            f"dy {tuple(dy.shape)}, x {tuple(x.shape)}, slices of {table.columns} columns of {table.dtype}: x must have as "
            f"many rows as dy and the slices' columns; slices may be of {', '.join(map(str, TYPES))}"
        )
    if not len(table) or not table.columns:
        return
    dy, x = dense(dy), dense(x)
    problem = problem or tiles.problem_of("wgrad", table, dy, x)
    plan = plan_of(problem, config, table.alignments, False, dy.device)
    arguments = (
        *(dy, x, table.lines, table.counters, dy.shape[0], table.columns, plan.tiles),
        *(*strides(problem, dy, x), dy.shape[1], as_int32(epoch)),
    )
    launch(wgrad_kernel, arguments, plan, programs)
