"""Sums of partials in rank order: the one place where the numbers of different ranks meet.

Floating-point addition is not associative, so the order is part of the result. Every sum here is the left fold
((p0 + p1) + p2) + ... in a wide type (float32 for the half types, else the widest dtype involved), whatever the order in
which the partials arrived: results are bitwise equal from run to run and from transport to transport.

[Note: One pass over memory]
Adding N large tensors one after the other reads and writes the accumulator N-1 times from main memory. The sum is done in
blocks that stay in the cache instead, so each partial is read once and the result written once. Element for element the
operations are the same, so blocking does not change a bit. On a GPU one kernel does it (kernels/inbox_sum.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_dp.kernels.inbox_sum import inbox_sum

# 1 MiB in float32. Smaller blocks lost more to the calls than they gained in the cache (one core, 2.4 M and 16.8 M elements,
# N = 2 and 4: blocks of 64 Ki elements took 1.3-1.8 times as long); none at all was 1.2 times slower at 16.8 M, N = 4.
BLOCK_ELEMENTS = 1 << 18

_HALF_TYPES = (torch.bfloat16, torch.float16)


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The type that partials of these dtypes are summed in: float32 for half types, else the widest of them."""
    wide = torch.float32 if dtypes[0] in _HALF_TYPES else dtypes[0]
    for dtype in dtypes[1:]:
        wide = torch.promote_types(wide, torch.float32 if dtype in _HALF_TYPES else dtype)
    return wide


def fold(terms: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of small tensors of any layout, rounded once, to `dtype`. For large ones: `sum_in_rank_order`."""
    total = terms[0].to(wide_dtype(terms[0].dtype))
    for term in terms[1:]:
        total = total + term
    return total.to(dtype)


def sum_in_rank_order(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    *,
    own_rank: int,
    scale_divisor: float | None = None,
    scratch: torch.Tensor | None = None,
    wide: torch.dtype | None = None,
) -> torch.Tensor:
    """out = (partials[0] + partials[1] + ... + partials[N-1]) / scale_divisor, added up in that order.

    Args:
        out: any shape, contiguous; receives the result, rounded once to its dtype.
        partials: N >= 1 contiguous tensors with out's number of elements; float dtypes may differ. `partials[own_rank]` may
            be `out` itself (same memory, same dtype); no other partial may share memory with it.
        own_rank: index of the partial that may alias `out`.
        scale_divisor: divide the sum by this number, in the wide type (a division, as FSDP does, no multiplication by the
            reciprocal). None or 1: no division.
        scratch: optional 1-D buffer of the wide type, at least min(out.numel(), BLOCK_ELEMENTS) elements, for callers that
            sum often; used only where the fold cannot run in `out` itself.
        wide: the wide type, from a caller who vouches for it, for sizes, layouts and aliases, and for partials of one dtype,
            all of them 1-D, as out is. None: all of it is checked.

    Returns `out`. Raises ValueError on wrong sizes, layouts or aliases.
    """
    numel = out.numel()
    if wide is None:
        _check(out, partials, own_rank)
    if numel == 0:
        return out
    if out.is_cuda:
        return inbox_sum(out, partials, divisor=scale_divisor)
    flat = wide is not None
    if wide is None:
        wide = wide_dtype(out.dtype, *{p.dtype for p in partials})
    divisor = None if scale_divisor is None or scale_divisor == 1 else float(scale_divisor)
    aliased = partials[own_rank].data_ptr() == out.data_ptr()
    # From this index on the fold may run in `out`: not before the aliased partial itself has been added, and not at all if
    # `out` is too narrow to hold the running sum.
    switch = len(partials) if out.dtype != wide else (own_rank if aliased else 0)

    block = min(numel, BLOCK_ELEMENTS)
    if switch > 1 and (scratch is None or scratch.dtype != wide or scratch.numel() < block or scratch.device != out.device):
        scratch = torch.empty(block, dtype=wide, device=out.device)
    whole = out
    if not flat and (switch > 1 or numel > BLOCK_ELEMENTS or any(partial.shape != out.shape for partial in partials)):
        whole, partials = out.view(-1), [partial.view(-1) for partial in partials]
    if numel <= BLOCK_ELEMENTS:
        _fold(whole, partials, switch, wide, divisor, scratch)
        return out
    blocks = zip(*(partial.split(BLOCK_ELEMENTS) for partial in partials), strict=True)
    for out_block, partial_blocks in zip(whole.split(BLOCK_ELEMENTS), blocks, strict=True):
        _fold(out_block, partial_blocks, switch, wide, divisor, scratch)
    return out


def _fold(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    switch: int,
    wide: torch.dtype,
    divisor: float | None,
    scratch: torch.Tensor | None,
) -> None:
    """One block. The running sum lies in `scratch` until partial number `switch` is added, from then on in `out`."""
    first = partials[0]
    if len(partials) == 1:
        if divisor is None:
            if first.data_ptr() != out.data_ptr():
                out.copy_(first)
        elif out.dtype == first.dtype == wide:
            torch.div(first, divisor, out=out)
        else:
            out.copy_(first.to(wide).div(divisor))
        return

    into_out = switch <= 1
    total = out if into_out else scratch[: out.numel()]  # type: ignore[index]
    second = partials[1]
    if first.dtype == wide or second.dtype == wide:
        torch.add(first, second, out=total)
    else:  # two half types: torch would add them in their own, narrow type
        # `total` may be the aliased partial number 1 only if that has the wide dtype, which is the other branch.
        total.copy_(first)
        total.add_(second)
    for index in range(2, len(partials)):
        if not into_out and index >= switch:
            torch.add(total, partials[index], out=out)
            total, into_out = out, True
        else:
            total.add_(partials[index])
    if divisor is not None:
        total.div_(divisor)
    if not into_out:
        out.copy_(total)


def _check(out: torch.Tensor, partials: Sequence[torch.Tensor], own_rank: int) -> None:
    if not 0 <= own_rank < len(partials):
        raise ValueError(f"own_rank={own_rank}: must lie in 0 .. {len(partials) - 1} ({len(partials)} partials given)")
    if not out.is_contiguous():
        raise ValueError(
            f"out of shape {tuple(out.shape)} is not contiguous (strides {out.stride()}): pass a contiguous buffer"
        )
    numel = out.numel()
    for rank, partial in enumerate(partials):
        if partial.numel() != numel:
            raise ValueError(f"partial of rank {rank} has {partial.numel()} elements, out has {numel}: they must be equal")
        if not partial.is_contiguous():
            raise ValueError(f"partial of rank {rank} is not contiguous (strides {partial.stride()}): pass contiguous buffers")
        if numel and partial.data_ptr() == out.data_ptr():
            if rank != own_rank:
                raise ValueError(f"partial of rank {rank} lies in out's memory: only own_rank={own_rank}'s may")
            if partial.dtype != out.dtype:
                raise ValueError(f"partial of rank {rank} shares out's memory but is {partial.dtype}, not {out.dtype}")
