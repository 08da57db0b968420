"""What the three GEMM kernels share on the device: waits for words, the order of tiles, loads, one step of a product, stores.

[Note: Waiting inside a kernel]
A program waits for a slice by one spinning load, `atomic_add(word, 0)` with acquire semantics at system scope: Triton emits
`ld.acquire.sys` executed by one thread of the program and a barrier behind it, so that what the writer did before the word is
visible to all threads of the program. (Triton versions that emit a true atomic addition of 0 mean the same, and the words are
in this device's own memory, where that is cheap.) A volatile load has no acquire semantics; a fence after it is not to be had
in Triton.

    copy engine    slice -> window | word = value  (behind the copy, at system scope)
    program                                          ld.acquire.sys word ... >= value | barrier | loads of the slice

The data path of TMA is another proxy than that of ordinary loads, hence the proxy fence behind the wait where TMA is used.

A program waits once per slice, not per tile. Tiles are numbered in order of arrival and program p computes tiles p, p + P,
p + 2P, ..., so the first tile of a slice waits and those behind it find it there.

[Note: Spinning programs hold their multiprocessors]
A waiting kernel occupies the device. What it waits for must not need a multiprocessor behind it in the same queue: slices come
by copy engines and their words are written by stream memory operations, neither of which does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from commfuse_dp.kernels import table as layout

# Fields of a line; a kernel reads globals only as constexpr.
FIELDS = tl.constexpr(layout.FIELDS)
DATA = tl.constexpr(layout.DATA)
FIRST_ROW = tl.constexpr(layout.FIRST_ROW)
ROWS = tl.constexpr(layout.ROWS)
STRIDE = tl.constexpr(layout.STRIDE)
WORD = tl.constexpr(layout.WORD)
VALUE = tl.constexpr(layout.VALUE)
BIAS = tl.constexpr(layout.BIAS)
EXACT = tl.constexpr(layout.EXACT)

TYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def await_word(line, epoch, HAS_EXACT: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stand until the line's word has reached its value plus epoch (cyclic), or equals its value if the line is exact (which
    none is without HAS_EXACT). A line without a word waits for nothing."""
    address = tl.load(line + WORD)
    if address != 0:
        word = address.to(tl.pointer_type(tl.int32))
        value = tl.load(line + VALUE).to(tl.int32)
        if HAS_EXACT:
            exact = tl.load(line + EXACT).to(tl.int32)
            value += (1 - exact) * epoch
            while misses(tl.atomic_add(word, 0, sem="acquire", scope="sys") - value, exact):
                pass
        else:
            value += epoch
            while tl.atomic_add(word, 0, sem="acquire", scope="sys") - value < 0:
                pass
        if TMA and not INTERPRETED:
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def misses(ahead, exact):
    """Whether a word that is so far ahead of its value is not what is waited for."""
    return (ahead < 0) | ((exact != 0) & (ahead != 0))


@triton.jit
def join_threads(INTERPRETED: tl.constexpr):
    """All threads of the program, and what they have stored, before anything that one of them does next.

    `tl.debug_barrier` means the same, but a loop that contains it is not pipelined.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def write_word(line, epoch, go):
    """If `go`: the line's word := its value plus epoch, after everything that this program has done or seen done. No word:
    nothing. (Masks instead of branches: Triton 3.6 cannot flatten a loop nest with branches behind the inner loop.)"""
    address = tl.load(line + WORD)
    value = tl.load(line + VALUE).to(tl.int32) + epoch
    word = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, value, mask=go & (address != 0), sem="release", scope="sys")


@triton.jit
def grouped(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of the index-th tile: down GROUP rows, then the next column, so that tiles at work share operands in L2."""
    per_group = GROUP * tiles_n
    first = (index // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    within = index % per_group
    return first + within % height, within // height


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """acc + a @ b in float32. WIDEN: the interpreter cannot multiply bfloat16; its products are exact in float32 anyway."""
    if PRECISION == "tf32":
        return tl.dot(nearest_tf32(a), nearest_tf32(b), acc, input_precision=PRECISION)
    elif WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def nearest_tf32(x):
    """Rounded. Tensor cores cut float32 operands off, which makes all products too small: three times cuBLAS's error."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def slice_pointer(line, dtype, POINTER_ALIGN: tl.constexpr):
    """Where the line's slice begins. Its alignment, which the compiler cannot see by itself, allows wide loads."""
    return tl.multiple_of(tl.load(line + DATA).to(tl.pointer_type(dtype)), POINTER_ALIGN)


@triton.jit
def describe_dense(
    matrix, rows, columns, stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """For loads of [BLOCK_ROWS, BLOCK_COLUMNS] by TMA, in the orientation in which the matrix lies in memory."""
    if TRANSPOSED:
        return tl.make_tensor_descriptor(matrix, [columns, rows], [stride, 1], [BLOCK_COLUMNS, BLOCK_ROWS])
    else:
        return tl.make_tensor_descriptor(matrix, [rows, columns], [stride, 1], [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit
def load_described(descriptor, row, column, TRANSPOSED: tl.constexpr):
    """[BLOCK_ROWS, BLOCK_COLUMNS] from there on, of what describe_dense has described."""
    if TRANSPOSED:
        return descriptor.load([column, row]).T
    else:
        return descriptor.load([row, column])


@triton.jit
def begin_rows(matrix, stride, offs_i, rows, SUM_OVER_ROWS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Where rows offs_i of a matrix begin, for load_dense: columns are dense, or rows if it is TRANSPOSED. The product sums
    over its rows or over its columns. A row beyond the end is the last one where no mask leaves it out."""
    if TRANSPOSED:
        return matrix + offs_i[:, None]
    elif SUM_OVER_ROWS:
        return matrix + offs_i[:, None].to(tl.int64) * stride
    else:
        return matrix + tl.minimum(offs_i, rows - 1)[:, None].to(tl.int64) * stride


@triton.jit
def load_dense(
    begins,
    stride,
    first_column,
    offs_i,
    rows,
    offs_j,
    columns,
    SUM_OVER_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """[rows offs_i, columns first_column + offs_j] of a matrix, by wide loads along what is dense.

    Zeros beyond the end of what the product sums over. Beyond the other end, which is not stored: zeros, or the last row or
    column where loads run along the sum, so that no load needs a mask of its own.
    """
    if TRANSPOSED:
        inner = tl.minimum(offs_j, columns - 1) if SUM_OVER_ROWS else offs_j
        at = begins + (first_column + inner)[None, :].to(tl.int64) * stride
    else:
        at = begins + first_column + offs_j[None, :]
    if EVEN:
        return tl.load(at)
    elif SUM_OVER_ROWS != TRANSPOSED:
        return tl.load(at, mask=(offs_i[:, None] < rows) & (offs_j[None, :] < columns), other=0.0)
    elif SUM_OVER_ROWS:
        return tl.load(at, mask=offs_i[:, None] < rows, other=0.0)
    else:
        return tl.load(at, mask=offs_j[None, :] < columns, other=0.0)


@triton.jit
def store_dense(out, stride, offs_m, start_n, rows, columns, values, TRANSPOSED: tl.constexpr):
    """out[offs_m, start_n ...] = values, cast, inside rows x columns; by wide stores along what is dense."""
    base = out + (offs_m[:, None] if TRANSPOSED else offs_m[:, None].to(tl.int64) * stride)
    inside = offs_m[:, None] < rows
    offs_n = start_n + tl.arange(0, values.shape[1])
    at = base + (offs_n[None, :].to(tl.int64) * stride if TRANSPOSED else offs_n[None, :])
    tl.store(at, values.to(out.dtype.element_ty), mask=inside & (offs_n[None, :] < columns))


@triton.jit
def store_tile(out, stride, offs_m, start_n, rows, columns, acc, HALVES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """store_dense of a whole tile. HALVES: the left half first, then the right one."""
    if HALVES:
        half: tl.constexpr = acc.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, half)), (0, 2, 1)))
        store_dense(out, stride, offs_m, start_n, rows, columns, left, TRANSPOSED)
        store_dense(out, stride, offs_m, start_n + half, rows, columns, right, TRANSPOSED)
    else:
        store_dense(out, stride, offs_m, start_n, rows, columns, acc, TRANSPOSED)


INTERPRETED = not isinstance(grouped, triton.JITFunction)
