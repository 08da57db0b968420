"""Compiles the GEMM kernels for a GPU that is not there: `python -m tests.conformance.kernels.compiling` prints JSON.

Triton needs no device to compile, and brings the assembler and the tool that reads its resource report. Each item says what the
machine code of one kernel and configuration uses, and which of the instructions it depends on are in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from commfuse_dp.kernels import tiles
from commfuse_dp.kernels.device_code import TYPES
from commfuse_dp.kernels.gemm_dgrad import dgrad_kernel
from commfuse_dp.kernels.gemm_forward import forward_kernel
from commfuse_dp.kernels.gemm_wgrad import wgrad_kernel
from commfuse_dp.kernels.launching import common_constants
from commfuse_dp.kernels.tiles import PASSES, Pass, Problem, TileConfig

KERNELS = {"forward": forward_kernel, "dgrad": dgrad_kernel, "wgrad": wgrad_kernel}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ALIGNED = ("tokens", "columns", "stride_x", "stride_y", "stride_dy", "stride_dx", "width_dy")

# The products of column-parallel layers (forward, dx, dW), then of row-parallel ones (forward, dx, dW): which operands lie
# transposed.
TENSOR_PARALLEL: tuple[tuple[Pass, tuple[bool, bool]], ...] = (
    *(("forward", (False, True)), ("wgrad", (True, False)), ("dgrad", (True, False))),
    *(("wgrad", (True, True)), ("forward", (True, True)), ("dgrad", (True, True))),
)


def compile_for(
    arch: int, problem: Problem, config: TileConfig, *, even: bool = True, exact: bool = False, row_bias: bool = False
) -> Any:
    """even: sizes are whole steps and everything lies at multiples of 16 bytes; else nothing is promised to the compiler.
    exact: words are; row_bias: with one.

    Arguments that are 1 become constants, as in a launch: the kernel is compiled for them anew.
    """
    kernel = KERNELS[problem.op]
    align = 16 if even else 1
    constants = common_constants(problem, config)
    constants |= {"EVEN": even, "POINTER_ALIGN": align if even else 2, "STRIDE_ALIGN": align}
    constants |= {"COLUMN_ALIGN": align, "ROWS_ALIGN": align, "HAS_BIAS": True, "OUT_TYPE": TYPES[problem.out_dtype]}
    constants |= {"HAS_EXACT": exact} | ({} if row_bias else {"row_bias": None})
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ones = {"tokens": problem.tokens, "columns": problem.columns, "total": tiles.count_tiles(problem, config)}
    constants |= {name: 1 for name, value in ones.items() if value == 1 and name in kernel.arg_names}
    out = NAMES[problem.out_dtype]
    pointers = {"x": f"*{NAMES[problem.dtype]}", "y": f"*{out}", "dx": f"*{out}", "table": "*i64", "counters": "*i32"}
    pointers["dy"] = pointers["row_bias"] = pointers["x"]
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    divisible = [name for name in kernel.arg_names if name in ("table", "counters") or (even and name in (*pointers, *ALIGNED))]
    return triton.compile(
        ASTSource(
            kernel,
            signature,
            constexprs=constants,
            attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
        ),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": config.warps, "num_stages": config.stages},
    )


def resources(binary: bytes) -> dict[str, int]:
    """Registers and bytes of stack of the only kernel; spilled registers are on the stack."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def report(arch: int, problem: Problem, config: TileConfig, *, even: bool = True, **how: bool) -> dict[str, Any]:
    built = compile_for(arch, problem, config, even=even, **how)
    code = built.asm["ptx"]
    order = [found[0] for found in re.finditer(r"\bst\.global|\bbar\.sync|\batom\.[a-z.]*acq_rel", code)]
    counts = [number for number, name in enumerate(order) if name.startswith("atom")]
    return {
        "joined": all(order[number - 1] == "bar.sync" for number in counts) and bool(counts) == (problem.op == "wgrad"),
        "arch": arch,
        "op": problem.op,
        "dtype": NAMES[problem.dtype],
        "layout": problem.layout,
        "row_bias": how.get("row_bias", False),
        "config": str(config),
        "even": even and problem.tokens > 1,  # one token: a loop of one step, nothing to overlap
        "shared": built.metadata.shared,
        **resources(built.asm["cubin"]),
        "acquires": len(
            re.findall(r"\b(?:ld|atom)\.(?:global\.)?(?:sys\.acquire|acquire\.sys)|\bld\.global\.sys\.acquire", code)
        ),
        "releases": len(re.findall(r"\batom\.[a-z.]*sys[a-z.]*release|\batom\.[a-z.]*release[a-z.]*sys", code)),
        "proxy_fences": code.count("fence.proxy.async.global"),
        "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor[\w.:]*shared[\w.:]*global", code)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10", code)),
        "wgmma": code.count("wgmma.mma_async"),
        "overlapped": "wgmma.wait_group.sync.aligned \t1" in code
        or bool(re.search(r"wgmma\.wait_group\.sync\.aligned\s+1", code)),
        "wide_stores": code.count("st.global.v4.b32"),
    }


def main() -> None:
    found = []
    for arch in (90, 80):
        for op in PASSES:
            for dtype in (torch.bfloat16, torch.float32):
                problem = Problem(op, 8192, 4096, (512,) * 8, dtype, dtype, tf32=dtype == torch.float32)
                found += [report(arch, problem, config) for config in tiles.candidates(problem, (arch // 10, 0))]
                odd = problem._replace(out_dtype=torch.float32, vectored=False)
                found += [report(arch, odd, config, even=False) for config in tiles.candidates(odd, (arch // 10, 0))]
            wide = Problem(op, 8192, 4096, (512,) * 8, torch.bfloat16, torch.float32)  # what needs most shared memory
            found += [report(arch, wide, config) for config in tiles.candidates(wide, (arch // 10, 0))]
        for op, transposed in TENSOR_PARALLEL:  # slices of 1,024 tokens; layers of 4096 x 2048
            problem = Problem(op, 2048, 4096, (1024,) * 4, torch.bfloat16, torch.bfloat16, transposed=transposed)
            for row_bias in (False, True) if op == "forward" and not transposed[0] else (False,):
                how = {"exact": op != "wgrad", "row_bias": row_bias}
                found += [report(arch, problem, config, **how) for config in tiles.candidates(problem, (arch // 10, 0))]
        for op in PASSES:
            skinny = Problem(op, 1, 4096, (512,), torch.bfloat16, torch.bfloat16)
            if arch == 90:  # the largest tile, and those that one token is worth
                configs = tiles.candidates(skinny, (9, 0))
                found += [report(arch, skinny, config) for config in configs if config is configs[0] or config.block_m <= 64]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
