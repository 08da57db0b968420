"""What the three GEMM kernels share on the device: waiting for a word, the order of tiles, one step of a product, stores.

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

TYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def await_word(line, epoch, TMA: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stand until the line's word has reached its value plus epoch (cyclic). A line without a word waits for nothing."""
    address = tl.load(line + WORD)
    if address != 0:
        word = address.to(tl.pointer_type(tl.int32))
        value = tl.load(line + VALUE).to(tl.int32) + epoch
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") - value < 0:
            pass
        if TMA and not INTERPRETED:
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
            )


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
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def slice_pointer(line, dtype, POINTER_ALIGN: tl.constexpr):
    """Where the line's slice begins. Its alignment, which the compiler cannot see by itself, allows wide loads."""
    return tl.multiple_of(tl.load(line + DATA).to(tl.pointer_type(dtype)), POINTER_ALIGN)


@triton.jit
def store_tile(out, stride, offs_m, start_n, rows, columns, acc, BLOCK_N: tl.constexpr, HALVES: tl.constexpr):
    """out[offs_m, start_n ...] = acc, cast, inside rows x columns. HALVES: the left half first, then the right one."""
    base = out + offs_m[:, None].to(tl.int64) * stride
    inside = offs_m[:, None] < rows
    if HALVES:
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, BLOCK_N // 2)), (0, 2, 1)))
        offs_n = start_n + tl.arange(0, BLOCK_N // 2)
        tl.store(base + offs_n[None, :], left.to(out.dtype.element_ty), mask=inside & (offs_n[None, :] < columns))
        offs_n += BLOCK_N // 2
        tl.store(base + offs_n[None, :], right.to(out.dtype.element_ty), mask=inside & (offs_n[None, :] < columns))
    else:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        tl.store(base + offs_n[None, :], acc.to(out.dtype.element_ty), mask=inside & (offs_n[None, :] < columns))


INTERPRETED = not isinstance(grouped, triton.JITFunction)
