"""Checks of the collectives' arguments, shared by the fused functions and their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from commfuse_dp.program.layout import chunk_bounds
from commfuse_dp.program.orders import check_order

Op = Literal["sum", "mean"]
SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_op(op: str) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(f"op={op!r}: must be 'sum' or 'mean'")


def check_reduction(order: str, op: str, name: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """dtype of the partials, for a result of `dtype`, which is called `name`."""
    check_order(order)
    check_op(op)
    check_summable(name, dtype)
    if reduce_dtype is None:
        return dtype
    check_summable("reduce_dtype", reduce_dtype)
    return reduce_dtype


def check_summable(name: str, dtype: torch.dtype) -> None:
    if dtype not in SUMMABLE:
        raise ValueError(f"{name} is {dtype}: only {', '.join(map(str, SUMMABLE))} can be reduced; convert it first")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{name} has no dimensions: collectives cut dim 0; pass {name}.reshape(1)")


def check_sizes(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """`sizes` as a tuple. Raises ValueError unless there is one size >= 0 per rank."""
    given = tuple(int(size) for size in sizes)
    if len(given) != world_size or any(size < 0 for size in given):
        raise ValueError(f"sizes={list(given)}: one size >= 0 for each of {world_size} ranks is needed")
    return given


def check_total(name: str, rows: int, sizes: tuple[int, ...]) -> None:
    if rows != sum(sizes):
        raise ValueError(f"{name} has {rows} rows, but sizes={list(sizes)} add up to {sum(sizes)}")


def even_sizes(rows: int, world_size: int) -> tuple[int, ...]:
    """FSDP2's division of `rows` (torch.chunk)."""
    return tuple(stop - start for start, stop in chunk_bounds(rows, world_size))


def kept_rows(
    sizes: Sequence[int] | None, rows: int | None, world_size: int, exchange: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """What every rank keeps of a sum. rows: in all, None if not known: then ranks exchange what they have room for."""
    if sizes is not None:
        found = check_sizes(sizes, world_size)
    else:
        found = even_sizes(rows, world_size) if rows is not None else exchange()
    if rows is not None:
        check_total("the tensor to reduce", rows, found)
    return found


def line_of(sizes: Any, rank: int, given: torch.Tensor | None, world_size: int) -> tuple[tuple[int, ...], Any]:
    """(rows that `rank` sends to each, all ranks' such lines if they are known) of an all-to-all.

    sizes: that table, or this rank's line; None: the rows of `given` are divided."""
    if sizes is None:
        if given is None:
            raise ValueError("produce is a function: pass sizes, the rows for every destination")
        return even_sizes(int(given.shape[0]), world_size), None
    if not len(sizes) or isinstance(sizes[0], int):
        return check_sizes(sizes, world_size), None
    if len(sizes) != world_size:
        raise ValueError(f"sizes has {len(sizes)} lines: one for each of {world_size} sources is needed")
    table = tuple(check_sizes(row, world_size) for row in sizes)
    return table[rank], table


def check_out(out: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(out.shape) != shape or not out.is_contiguous():
        layout = "contiguous" if out.is_contiguous() else "not contiguous"
        raise ValueError(f"out has shape {tuple(out.shape)} and is {layout}: {what} needs a contiguous tensor of shape {shape}")


def scatter_shapes(
    produce: object,
    out: torch.Tensor | None,
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> tuple[int | None, tuple[int, ...], torch.dtype, torch.device]:
    """(rows in all or None if not known, row shape, dtype of the result, device) of a reduce-scatter's arguments."""
    if isinstance(produce, torch.Tensor):
        check_rows("produce", produce)
        if shape is not None and tuple(shape) != tuple(produce.shape):
            raise ValueError(f"shape={tuple(shape)} contradicts the tensor given as produce: {tuple(produce.shape)}")
        rows, row_shape = int(produce.shape[0]), tuple(produce.shape[1:])
        found, device = produce.dtype, produce.device
    elif shape is not None:
        if len(shape) == 0:
            raise ValueError("shape=(): at least the number of rows (dim 0) is needed")
        rows, row_shape = int(shape[0]), tuple(int(extent) for extent in shape[1:])
        found, device = torch.get_default_dtype(), torch.device("cpu")
    elif out is not None:
        check_rows("out", out)
        rows, row_shape, found, device = None, tuple(out.shape[1:]), out.dtype, out.device  # type: ignore[assignment]
    else:
        raise ValueError("produce is a function: pass out, or shape (of all rows together) and dtype, to say what it fills")
    if out is not None:
        if dtype is not None and dtype != out.dtype:
            raise ValueError(f"dtype={dtype} contradicts out, which is {out.dtype}")
        return rows, row_shape, out.dtype, out.device
    return rows, row_shape, dtype if dtype is not None else found, device
