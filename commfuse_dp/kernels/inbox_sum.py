"""The inbox reduction: partials of all ranks summed in rank order, divided, cast, added to a gradient; one pass over memory.

    out = cast(((p_0 + p_1) + p_2 + ... + p_{N-1}) / divisor)          or, accumulating,   out += that

| tensor | shape | dtype |
| --- | --- | --- |
| partials | N tensors of n elements, contiguous | bfloat16, float16, float32 or float64 |
| out | n elements, contiguous | any of these |

[Note: Exact]
The rounding steps are those of collectives/summation.py, so a sum is bitwise the same on a CPU, on a GPU by this kernel and on
a GPU by the reference below, whatever the transport: a left fold in rank order in the wide type (float32 for the half types,
else the widest type involved), a division by the divisor in that type, one rounding to out's dtype (double to half by way of
float, as torch casts). Accumulation is then an addition of its own, in out's dtype, as `out += sum` is. A division by a power
of two is done as a multiplication by its reciprocal: both are the correct rounding of the same number. torch's own `div` by a
Python number on a GPU multiplies by the reciprocal of every divisor; the reference therefore divides by a tensor.

[Note: Bytes]
N reads and one write of n elements (and one more read to accumulate) are all the memory traffic there is; a chain of torch
additions would read and write the wide accumulator N - 1 times more. Each thread issues at least four independent 16-byte loads
before its first addition (N = 3: three).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from commfuse_dp.device.compat import raw_stream
from commfuse_dp.kernels import nvrtc
from commfuse_dp.kernels.packs import THREADS, TYPE_NAMES, Implementation, common_head

MOST_PARTIALS = 64
UNROLLED = 8  # up to here every number of partials has a kernel of its own


class InboxSumArgument(ctypes.Structure):
    """struct InboxSum of inbox_sum.cu."""

    _fields_ = (
        ("partials", ctypes.c_uint64 * MOST_PARTIALS),
        ("out", ctypes.c_uint64),
        ("numel", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("count", ctypes.c_int32),
        ("head", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def inbox_sum(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    *,
    divisor: float | None = None,
    accumulate: bool = False,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Sum `partials` in the order given into `out`; returns `out`. Asynchronous on a GPU, on the current stream.

    Args:
        out: contiguous, any shape. May be the very memory of one partial of the same dtype (not if accumulating), and must
            not overlap any otherwise.
        partials: N >= 1 contiguous tensors with out's number of elements, on its device.
        divisor: divide the sum by this number. None or 1: no division.
        accumulate: add to what is in `out` instead of overwriting it.
        implementation: "auto": the kernel for CUDA tensors of one dtype and N <= 64 where it can be compiled (if it cannot, one
            warning), else the reference; "kernel": the kernel or an error.

    Raises ValueError on wrong sizes, layouts or aliases; ToolchainError or CompileError if "kernel" cannot be had.
    """
    _check(out, partials, accumulate)
    if implementation == "reference" or (implementation == "auto" and not out.is_cuda):
        return _fold(out, partials, divisor, accumulate)
    refusal = _refusal(out, partials)
    if refusal is None:
        try:
            _launch(out, partials, divisor, accumulate)
            return out
        except (nvrtc.ToolchainError, nvrtc.CompileError) as error:
            if implementation == "kernel":
                raise
            nvrtc.warn_of_fallback("inbox_sum", error)
    elif implementation == "kernel":
        raise ValueError(f"inbox_sum: the kernel {refusal}: use implementation='auto'")
    return _fold(out, partials, divisor, accumulate)


def inbox_sum_reference(
    out: torch.Tensor, partials: Sequence[torch.Tensor], *, divisor: float | None = None, accumulate: bool = False
) -> torch.Tensor:
    """The same by torch's own operations, bitwise equal to the kernel, on any device."""
    _check(out, partials, accumulate)
    return _fold(out, partials, divisor, accumulate)


@torch.library.custom_op("commfuse::inbox_sum", mutates_args=("out",))
def inbox_sum_op(out: torch.Tensor, partials: Sequence[torch.Tensor], divisor: float, accumulate: bool) -> None:
    """torch.ops.commfuse.inbox_sum: `inbox_sum` as a registered op (functionalization allows no partial in out's memory)."""
    inbox_sum(out, partials, divisor=divisor, accumulate=accumulate)


@inbox_sum_op.register_fake
def _(out: torch.Tensor, partials: Sequence[torch.Tensor], divisor: float, accumulate: bool) -> None:
    return None


# ---- reference -----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def _fold(out: torch.Tensor, partials: Sequence[torch.Tensor], divisor: float | None, accumulate: bool) -> torch.Tensor:
    wide = _wide_dtype([out.dtype, *(partial.dtype for partial in partials)])
    total = partials[0].reshape(out.shape).to(wide, copy=True)
    for partial in partials[1:]:
        total.add_(partial.view(out.shape))
    if divisor is not None and divisor != 1:
        total.div_(torch.full((), divisor, dtype=wide, device=out.device))
    return out.add_(total.to(out.dtype)) if accumulate else out.copy_(total)


def _wide_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


# ---- kernel --------------------------------------------------------------------------------------------------------------
def plan_sum(
    out_pointer: int,
    pointers: Sequence[int],
    numel: int,
    *,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
    divisor: float | None,
    accumulate: bool,
) -> tuple[nvrtc.Spec, InboxSumArgument, int]:
    """(what to compile, the argument, number of blocks); pure arithmetic on addresses, also used without a GPU."""
    alignments = (*[pointer % 16 for pointer in pointers], out_pointer % 16)
    spec, head, factor, blocks = _alike(alignments, numel, out_dtype, dtype, divisor)
    argument = InboxSumArgument()
    argument.partials[: len(pointers)] = pointers
    argument.out = out_pointer
    argument.numel = numel
    argument.count = len(pointers)
    argument.head = head
    argument.factor = factor
    argument.accumulate = int(accumulate)
    return spec, argument, blocks


@lru_cache(maxsize=4096)
def _alike(
    alignments: Sequence[int], numel: int, out_dtype: torch.dtype, dtype: torch.dtype, divisor: float | None
) -> tuple[nvrtc.Spec, int, float, int]:
    """What sums have in common whose partials and output (the last one) are aligned alike: (what to compile, elements ahead of
    the first pack, factor, number of blocks)."""
    count = len(alignments) - 1
    pack = 16 // dtype.itemsize
    head = common_head([(at, dtype.itemsize) for at in alignments[:-1]] + [(alignments[-1], out_dtype.itemsize)], pack)
    vector = head is not None and numel >= pack
    unrolled = count if count <= UNROLLED else 0
    how, factor = scaling(divisor, torch.float64 if torch.float64 in (dtype, out_dtype) else torch.float32)
    spec = nvrtc.Spec(
        "inbox_sum",
        (
            ("COMMFUSE_PARTIAL", TYPE_NAMES[dtype]),
            ("COMMFUSE_OUT", TYPE_NAMES[out_dtype]),
            ("COMMFUSE_COUNT", str(unrolled)),
            ("COMMFUSE_SCALING", str(how)),
            ("COMMFUSE_VECTOR", str(int(vector))),
        ),
    )
    skipped = head if head is not None and vector else 0
    return spec, skipped, factor, max(1, -(-(numel - skipped) // tile_elements(unrolled, pack if vector else 1)))


def tile_elements(unrolled: int, pack: int) -> int:
    """Elements that one block does: Sum::TILE of inbox_sum.cu."""
    batch = unrolled or UNROLLED
    packs = 4 if batch == 1 else 2 if batch == 2 or pack == 1 else 1
    return THREADS * packs * pack


def scaling(divisor: float | None, wide: torch.dtype) -> tuple[int, float]:
    """(COMMFUSE_SCALING, factor): a multiplication only where it is bitwise the division."""
    if divisor is None or divisor == 1:
        return 0, 1.0
    divisor = float(divisor)
    mantissa, exponent = math.frexp(divisor)
    limit = 126 if wide == torch.float32 else 1022  # the reciprocal must be a normal number
    if abs(mantissa) == 0.5 and abs(exponent - 1) <= limit:
        return 1, 1.0 / divisor
    return 2, divisor


def _launch(out: torch.Tensor, partials: Sequence[torch.Tensor], divisor: float | None, accumulate: bool) -> None:
    numel = out.numel()
    if numel == 0:
        return
    spec, argument, blocks = plan_sum(
        out.data_ptr(),
        [partial.data_ptr() for partial in partials],
        numel,
        out_dtype=out.dtype,
        dtype=partials[0].dtype,
        divisor=divisor,
        accumulate=accumulate,
    )
    nvrtc.kernel(spec, out.device).launch(blocks, THREADS, ctypes.addressof(argument), raw_stream(out.device.index))


def _refusal(out: torch.Tensor, partials: Sequence[torch.Tensor]) -> str | None:
    """Why the kernel cannot do this call."""
    if not out.is_cuda:
        return f"runs on CUDA tensors, out is on {out.device}"
    dtypes = {partial.dtype for partial in partials}
    if len(dtypes) > 1:
        return f"takes partials of one dtype, got {sorted(map(str, dtypes))}"
    if len(partials) > MOST_PARTIALS:
        return f"takes at most {MOST_PARTIALS} partials, got {len(partials)}"
    return None


def _check(out: torch.Tensor, partials: Sequence[torch.Tensor], accumulate: bool) -> None:
    if not partials:
        raise ValueError("inbox_sum: no partials given; at least one is needed")
    if out.dtype not in TYPE_NAMES:
        raise ValueError(f"inbox_sum: out is {out.dtype}; allowed: {', '.join(map(str, TYPE_NAMES))}")
    if not out.is_contiguous():
        raise ValueError(f"inbox_sum: out of shape {tuple(out.shape)} is not contiguous: pass a contiguous buffer")
    numel, begin = out.numel(), out.data_ptr()
    end = begin + numel * out.itemsize
    for rank, partial in enumerate(partials):
        if partial.numel() != numel:
            raise ValueError(f"inbox_sum: partial {rank} has {partial.numel()} elements, out has {numel}: they must be equal")
        if partial.device != out.device:
            raise ValueError(
                f"inbox_sum: partial {rank} is on {partial.device}, out on {out.device}: they must be on one device"
            )
        if partial.dtype not in TYPE_NAMES:
            raise ValueError(f"inbox_sum: partial {rank} is {partial.dtype}; allowed: {', '.join(map(str, TYPE_NAMES))}")
        if not partial.is_contiguous():
            raise ValueError(
                f"inbox_sum: partial {rank} is not contiguous (strides {partial.stride()}): pass contiguous buffers"
            )
        pointer = partial.data_ptr()
        if pointer < end and begin < pointer + numel * partial.itemsize:
            if accumulate:
                raise ValueError(
                    f"inbox_sum: partial {rank} lies in out's memory, which accumulating adds to: pass a copy of it"
                )
            if pointer != begin or partial.dtype != out.dtype:
                raise ValueError(
                    f"inbox_sum: partial {rank} overlaps out without being the same elements of the same dtype: pass separate "
                    "buffers, or out itself as the partial"
                )
