"""Host side of a kernel launch: checks, the grid, alignment, scratch memory for TMA descriptors."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.device_code import INTERPRETED, TYPES
from commfuse_dp.kernels.table import Alignments, SliceTable
from commfuse_dp.kernels.tiles import Problem, TileConfig


@lru_cache(maxsize=64)
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if neither its columns nor its rows are dense (an expanded gradient)."""
    return tensor if tiles.is_dense(tensor) else tensor.contiguous()


def strides(problem: Problem, first: torch.Tensor, second: torch.Tensor) -> tuple[int, int]:
    """From one dense row, or column, of either operand to the next."""
    turned_first, turned_second = problem.transposed
    return first.stride(int(turned_first)), second.stride(int(turned_second))


def check_operand(name: str, tensor: torch.Tensor, table: SliceTable, columns: int | None, dtype: torch.dtype | None) -> None:
    """A matrix on the table's device, at least `columns` wide if given. Raises ValueError."""
    if tensor.dim() != 2 or (columns is not None and tensor.shape[1] < columns):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}: give a matrix of at least {columns} columns")
    if tensor.device != table.device:
        raise ValueError(f"{name} is on {tensor.device}, the slices are on {table.device}")
    if tensor.dtype not in tiles.DTYPES or (dtype is not None and tensor.dtype != dtype):
        allowed = [dtype] if dtype is not None else list(tiles.DTYPES)
        raise ValueError(f"{name} of {tensor.dtype}: allowed here: {', '.join(map(str, allowed))}")


def check_output(name: str, tensor: torch.Tensor, table: SliceTable, columns: int) -> None:
    """As check_operand; it is written where it lies, so columns or rows must be dense."""
    check_operand(name, tensor, table, columns, None)
    if not tiles.is_dense(tensor):
        raise ValueError(f"{name} with strides {tensor.stride()}: give dense columns or dense rows")


def settle(problem: Problem, config: TileConfig | None, device: torch.device) -> TileConfig:
    """The given configuration, if it can serve the problem, or the default one. Raises ValueError."""
    # The interpreter can do what the newest can.
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if config is None:
        return tiles.default(problem, capability)
    if config.tma and not tiles.supports_tma(problem, config, capability):
        raise ValueError(
            f"{problem.op} with {config}: TMA needs sm_90 (this is sm_{capability[0]}{capability[1]}), operands at multiples "
            f"of 16 bytes, none of them empty, and in dgrad slices of multiples of {config.block_k} rows (these: "
            f"{problem.rows}); take a configuration without tma"
        )
    return config


def _scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """Where a program puts its TMA descriptors. Comes from torch's caching allocator on the current stream, so it may be reused
    by whatever is enqueued there next, which runs after this kernel."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Plan(NamedTuple):
    """A launch but for its operands."""

    config: TileConfig
    constants: dict[str, Any]  # constexpr arguments; never changed
    tiles: int
    steps: int  # dgrad: of all slices' reductions
    compiled: dict[tuple[Any, ...], Callable[..., None]]  # see `launch`


@lru_cache(maxsize=4096)
def plan_of(problem: Problem, config: TileConfig | None, alignments: Alignments, has_exact: bool, device: torch.device) -> Plan:
    """What a launch needs besides its operands; the same for every launch of a shape and layout."""
    config = settle(problem, config, device)
    constants = common_constants(problem, config)
    constants |= {
        "EVEN": tiles.is_even(problem, config),
        "POINTER_ALIGN": alignments.pointer,
        "STRIDE_ALIGN": alignments.stride,
        "COLUMN_ALIGN": alignments.column,
    }
    if problem.op == "wgrad":
        constants["OUT_TYPE"] = TYPES[problem.out_dtype]
    else:
        constants["HAS_EXACT"] = has_exact
    if problem.op == "forward":
        constants |= {"HAS_BIAS": problem.has_bias, "ROWS_ALIGN": alignments.rows}
    steps = sum(-(-rows // config.block_k) for rows in problem.rows)
    return Plan(config, constants, tiles.count_tiles(problem, config), steps, {})


def launch(kernel: Any, arguments: tuple[Any, ...], plan: Plan, programs: int | None) -> None:
    """Run `kernel` with min(tiles, programs) programs on the current stream of its first argument's device.

    arguments: all that are no constants, in the kernel's order; the last one, its epoch, is not specialized. Triton finds the
    machine code of a launch by binding all arguments by name, which takes the host longer than the launch itself. So what it
    has found is called directly where arguments would lead there again: it depends on numbers and on how pointers are aligned.
    """
    device, config = arguments[0].device, plan.config
    if INTERPRETED:
        kernel[(min(plan.tiles, programs or 1),)](*arguments, **plan.constants)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, arguments, plan, programs)
        return
    alike = (programs, *[a if a is None or type(a) is int else a.data_ptr() % 16 for a in arguments[:-1]])
    run = plan.compiled.get(alike)
    if run is None:
        most = _multiprocessors(device.index) * config.per_sm if programs is None else programs
        run = _first(kernel, plan, min(plan.tiles, most), alike)
    if config.tma:
        # In a copy of the context: an allocator that the program has set for kernels of its own stays in place.
        contextvars.copy_context().run(_with_scratch, run, arguments)
    else:
        run(*arguments)


def _first(kernel: Any, plan: Plan, programs: int, alike: tuple[Any, ...]) -> Callable[..., None]:
    """A launch that binds, compiles if need be, and keeps what the next ones call."""

    def run(*arguments: Any) -> None:
        options = {"num_warps": plan.config.warps, "num_stages": plan.config.stages}
        again = kernel[(programs,)](*arguments, **plan.constants, **options)[programs, 1, 1]
        constants = [plan.constants[name] for name in kernel.arg_names[len(arguments) :]]
        plan.compiled[alike] = lambda *given: again(*given, *constants)

    return run


def _with_scratch(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    triton.set_allocator(_scratch)
    run(*arguments)


def common_constants(problem: Problem, config: TileConfig) -> dict[str, Any]:
    """constexpr arguments that all three kernels have, but for the names of their operands."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "FLAT": config.flat,
        "TMA": config.tma,
        "INTERPRETED": INTERPRETED,
        "HALVES": config.halves,
        "PRECISION": "tf32" if problem.tf32 and not INTERPRETED else "ieee",
        "WIDEN": INTERPRETED and problem.dtype == torch.bfloat16,
        **{
            f"{name.upper()}_TRANSPOSED": value
            for name, value in zip(tiles.OPERANDS[problem.op], problem.transposed, strict=True)
        },
    }
