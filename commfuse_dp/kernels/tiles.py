"""Shapes of tiles and the numbers that go with them: a small fixed set to measure among, and a default for each case.

Nothing here knows Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from commfuse_dp.kernels.table import SliceTable

Pass = Literal["forward", "dgrad", "wgrad"]
PASSES: tuple[Pass, ...] = ("forward", "dgrad", "wgrad")
OPERANDS: dict[Pass, tuple[str, str]] = {"forward": ("x", "y"), "dgrad": ("dy", "dx"), "wgrad": ("dy", "x")}  # all but slices
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TileConfig:
    """How one launch is cut. Outputs are computed in tiles of block_m x block_n, the reduction goes on in steps of block_k."""

    block_m: int
    block_n: int
    block_k: int
    warps: int = 8
    stages: int = 3  # loads in flight, in steps of block_k
    group: int = 8  # tiles that share columns are computed next to each other in groups of so many, for the L2 cache
    # The loop over tiles and the loop over k as one: the next tile's loads run under this tile's stores. In dgrad and wgrad
    # with TMA only: without it the compiler loses sight of the columns' alignment, and with that its wide asynchronous loads.
    flat: bool = False
    tma: bool = False  # loads by tensor memory accelerator (sm_90 and newer); needs rows at multiples of 16 bytes
    halves: bool = False  # store a tile in two halves: less shared memory, so more stages
    per_sm: int = 1  # programs per multiprocessor; never more in all than there are tiles

    def __str__(self) -> str:
        words = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"{self.warps} warps", f"{self.stages} stages"]
        words += [name for name in ("flat", "tma", "halves") if getattr(self, name)]
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def config_from(values: object) -> TileConfig:
    """The inverse of `as_dict`. Raises ValueError on anything else."""
    if not isinstance(values, dict) or set(values) != set(TileConfig.__dataclass_fields__):
        raise ValueError(f"not a tile configuration: {values!r}")
    for name, value in values.items():
        wanted = bool if name in ("flat", "tma", "halves") else int
        if type(value) is not wanted or (wanted is int and value < 1):
            raise ValueError(f"tile configuration: {name}={value!r}")
    return TileConfig(**values)


class Problem(NamedTuple):
    """One product, as far as the choice of tiles depends on it."""

    op: Pass
    tokens: int  # rows of x and dy
    columns: int  # of the slices = of x and dx
    rows: tuple[int, ...]  # of the slices that are not empty, in order
    dtype: torch.dtype  # of the operands
    out_dtype: torch.dtype
    has_bias: bool = False  # the slices; a row_bias is none of it: a load a tile, with the same loads, stores and memory
    vectored: bool = True  # all rows that are read begin at multiples of 16 bytes
    tf32: bool = False
    transposed: tuple[bool, bool] = (False, False)  # of OPERANDS: rows are dense, not columns

    @property
    def layout(self) -> str:
        """The operands that lie in memory transposed: "x.T", "dy.T, dx.T"."""
        names = zip(OPERANDS[self.op], self.transposed, strict=True)
        return ", ".join(f"{name}.T" for name, transposed in names if transposed)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a matrix lies in memory with dense columns or dense rows."""
    return 1 in tensor.stride() or min(tensor.shape) <= 1


def problem_of(op: Pass, table: SliceTable, first: torch.Tensor, second: torch.Tensor) -> Problem:
    """The product of a launch. first, second: see OPERANDS. In one frame: every launch asks."""
    dtype = first.dtype
    wgrad = op == "wgrad"
    (row, column), (other_row, other_column) = first.stride(), second.stride()
    # Elements of a column side by side, columns any distance apart.
    turned = column != 1 and (row == 1 or first.shape[0] <= 1)
    other_turned = other_column != 1 and (other_row == 1 or second.shape[0] <= 1)
    vectored = table.vectored
    if vectored:  # every row that is read, or column if columns are what is dense, begins at a multiple of 16 bytes
        for tensor, pitch in ((first, column if turned else row), (second, other_column if other_turned else other_row)):
            if 1 not in tensor.stride() and min(tensor.shape) > 1:  # a launch copies it: see `is_dense`
                pitch = tensor.shape[1]
            elif tensor.data_ptr() % 16:
                vectored = False
            vectored = vectored and pitch * tensor.itemsize % 16 == 0
            if not wgrad:
                break
    if op != "forward" and not turned:  # dy is read from the columns where slices begin; y is only written there
        vectored = vectored and table.alignments.column * dtype.itemsize % 16 == 0
    bias = table.has_bias and op == "forward"
    tf32 = dtype == torch.float32 and uses_tf32()
    out_dtype = table.dtype if wgrad else second.dtype
    fields = op, first.shape[0], table.columns, table.rows, dtype, out_dtype, bias, vectored, tf32, (turned, other_turned)
    return tuple.__new__(Problem, fields)  # without a frame for each launch


# Large tiles keep Hopper's tensor cores busy: 128 x 256 needs the fewest bytes per product of all that fit the registers of two
# warp groups. The smaller ones are for skinny products, which otherwise leave multiprocessors idle, and for sm_80.
_HOPPER = (
    TileConfig(128, 256, 64, warps=8, stages=3, flat=True, tma=True),
    TileConfig(128, 256, 64, warps=8, stages=4, flat=True, tma=True, halves=True),
    TileConfig(128, 256, 64, warps=8, stages=4, tma=True),
    TileConfig(256, 128, 64, warps=8, stages=4, flat=True, tma=True, halves=True),
    TileConfig(128, 256, 64, warps=8, stages=3, flat=True),
    TileConfig(128, 128, 64, warps=8, stages=4, flat=True, tma=True),
    TileConfig(128, 128, 64, warps=8, stages=4),
    TileConfig(64, 128, 64, warps=4, stages=4, tma=True, per_sm=2),
    TileConfig(64, 64, 64, warps=4, stages=5, per_sm=2),
)
_AMPERE = (
    TileConfig(128, 256, 32, warps=8, stages=4),
    TileConfig(128, 128, 64, warps=8, stages=3, flat=True),
    TileConfig(128, 128, 32, warps=8, stages=4),
    TileConfig(64, 128, 32, warps=4, stages=5),
    TileConfig(64, 64, 32, warps=4, stages=5),
)
_SINGLE = (  # fp32: an element is twice as wide, so steps are half as long
    TileConfig(128, 128, 32, warps=8, stages=3),
    TileConfig(128, 128, 32, warps=8, stages=3, flat=True),
    TileConfig(64, 128, 32, warps=4, stages=4),
    TileConfig(64, 64, 32, warps=4, stages=4),
)
_UNALIGNED = (  # loads of single elements: many registers for addresses
    TileConfig(128, 128, 32, warps=8, stages=3),
    TileConfig(64, 64, 32, warps=4, stages=3),
)

_BARRIERS = 512  # bytes of shared memory beside what is loaded and stored, at most


def supports_tma(problem: Problem, config: TileConfig, capability: tuple[int, int]) -> bool:
    """Whether the loads of this launch can be described to the tensor memory accelerator.

    In dgrad the reduction runs over rows of slices: a step that reached beyond a slice's end would multiply dy's columns of the
    next slice by the zeros that TMA reads there, and 0 x inf is not 0. There every slice must be a multiple of the step.
    """
    if capability < (9, 0) or not problem.vectored or problem.columns < 1 or problem.tokens < 1:
        return False
    return problem.op != "dgrad" or all(rows % config.block_k == 0 for rows in problem.rows)


def shared_bytes(problem: Problem, config: TileConfig) -> int:
    """Of a launch on sm_90: operands in flight, and the tile on its way out, which has room of its own in a flat loop."""
    operands = config.stages * (config.block_m + config.block_n) * config.block_k * problem.dtype.itemsize
    tile = config.block_m * config.block_n * problem.out_dtype.itemsize // (2 if config.halves else 1)
    return (operands + tile if config.flat else max(operands, tile)) + _BARRIERS


def _fitted(problem: Problem, config: TileConfig, capability: tuple[int, int]) -> TileConfig:
    """As much of it as shared memory takes: an output in float32 is twice as wide as the operands. Below sm_90 all fit."""
    room = (227 if capability < (12, 0) else 99) << 10
    while capability >= (9, 0) and shared_bytes(problem, config) > room and config.stages > 2:
        if config.flat and not config.halves:
            config = replace(config, halves=True)
        else:
            config = replace(config, stages=config.stages - 1)
    return config


def _allowed(problem: Problem, config: TileConfig, capability: tuple[int, int]) -> bool:
    return not config.tma or supports_tma(problem, config, capability)


def _spills(problem: Problem, config: TileConfig, capability: tuple[int, int]) -> bool:
    """Whether it needs more registers than there are, as seen by compiling it."""
    if problem.op == "forward":
        return problem.transposed[1] and config.block_m > 128
    tf32 = problem.tf32 and config.warps < 8 and config.block_n > 64  # operands are rounded in registers
    return problem.op == "wgrad" and (tf32 or (capability < (9, 0) and config.block_n > 128))


def candidates(problem: Problem, capability: tuple[int, int]) -> tuple[TileConfig, ...]:
    """Configurations worth measuring, the likeliest first. Never empty."""
    table: Sequence[TileConfig] = _HOPPER if capability >= (9, 0) else _AMPERE
    if not problem.vectored:
        table = _UNALIGNED
    elif problem.dtype == torch.float32:
        table = _SINGLE
    found = []
    for config in table:
        if not config.tma and (problem.op != "forward" or problem.transposed[1]):  # y.T: its stores would be narrow
            config = replace(config, flat=False)
        if _spills(problem, config, capability):
            continue
        config = _fitted(problem, config, capability)
        if _allowed(problem, config, capability) and config not in found:
            found.append(config)
    return tuple(found)


def default(problem: Problem, capability: tuple[int, int]) -> TileConfig:
    """What is used where nothing was measured: the first candidate whose tiles are not mostly empty."""
    tall = min(problem.rows) if problem.op == "wgrad" else problem.tokens
    wide = min(problem.rows) if problem.op == "forward" else problem.columns
    found = candidates(problem, capability)
    for config in found:
        if config.block_m < 2 * tall and config.block_n < 2 * wide:
            return config
    return found[-1]


def count_tiles(problem: Problem, config: TileConfig) -> int:
    """How many output tiles the launch has."""
    if problem.op == "dgrad":
        return -(-problem.tokens // config.block_m) * -(-problem.columns // config.block_n)
    if problem.op == "forward":
        across = -(-problem.tokens // config.block_m)
        return sum(across * -(-rows // config.block_n) for rows in problem.rows)
    across = -(-problem.columns // config.block_n)
    return sum(across * -(-rows // config.block_m) for rows in problem.rows)


def is_even(problem: Problem, config: TileConfig) -> bool:
    """Whether all that is read are whole blocks, which need no masks (device_code.load_dense says where they are needed)."""
    tokens, columns, (first, second) = problem.tokens, problem.columns, problem.transposed
    whole_tokens = not first or tokens % config.block_m == 0
    if problem.op == "forward":
        return columns > 0 and columns % config.block_k == 0 and whole_tokens
    if problem.op == "dgrad":
        whole = columns % config.block_n == 0 and whole_tokens
        return whole and all(rows % config.block_k == 0 for rows in problem.rows)
    whole = tokens > 0 and tokens % config.block_k == 0 and (second or columns % config.block_n == 0)
    return whole and (first or all(rows % config.block_m == 0 for rows in problem.rows))


def uses_tf32() -> bool:
    """torch's own setting for fp32 products on CUDA.

    It has two names: `fp32_precision`, and the older allow_tf32 (which float32_matmul_precision sets). Once the new one has
    been set, torch raises where the old one is read.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision in ("ieee", "tf32"):
        return precision == "tf32"
    return bool(torch.backends.cuda.matmul.allow_tf32)
