"""The .cu files through nvcc and cuobjdump, without a GPU: they compile for every architecture that is promised, spill nothing,
stay small enough to fill a multiprocessor, and read 16 bytes at a time."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from commfuse_dp.kernels import nvrtc
from commfuse_dp.kernels.inbox_sum import plan_sum
from commfuse_dp.kernels.publish import Shard, plan_publish

ARCHITECTURES = ("80", "90", "100")
MOST_REGISTERS = 64  # a thread: 1024 threads of a multiprocessor (65,536 registers), each with several 16-byte loads in flight
# Values of the macros. Partial, out, number (0: any), scaling, vector:
SUMS = (
    "bf16 float 1 1 1",
    "bf16 float 2 1 1",
    "bf16 float 4 1 1",
    "bf16 float 8 1 1",
    "bf16 float 0 1 1",
    "bf16 bf16 2 0 1",
    "float float 8 1 1",
    "double double 0 1 1",
    "bf16 float 3 2 1",
    "bf16 float 2 1 0",
)
PUBLICATIONS = ("bf16 120", "float 1000")  # out, capacity


@dataclass(frozen=True)
class Resources:
    registers: int
    stack: int
    spilled: int
    argument: int  # bytes of the constant bank; 0 if the report does not say


def parse_report(text: str) -> dict[tuple[str, str], Resources]:
    """(entry, architecture) -> what `ptxas -v` says of it."""
    found = {}
    for block in re.split(r"Compiling entry function ", text)[1:]:
        name, architecture = re.match(r"'(\w+)' for 'sm_(\d+)a?'", block).groups()  # type: ignore[union-attr]
        stack, stores, loads = (
            int(n)
            for n in re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block).groups()  # type: ignore[union-attr]
        )
        registers = int(re.search(r"Used (\d+) registers", block).group(1))  # type: ignore[union-attr]
        bank = re.search(r"(\d+) bytes cmem\[0\]", block)
        found[name, architecture] = Resources(registers, stack, stores + loads, int(bank.group(1)) if bank else 0)
    return found


def nvcc() -> str:
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return path if path is not None else pytest.skip("no nvcc: the CUDA sources are compiled at their first use only")


def cuobjdump() -> str:
    path = shutil.which("cuobjdump")
    if path is None and (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        path = shutil.which("cuobjdump", path=str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return path if path is not None else pytest.skip("no cuobjdump: the machine code cannot be looked at")


def compile_with_nvcc(file: Path, options: list[str], output: Path) -> str:
    """nvcc's report. The options are those that NVRTC gets, no others that change code."""
    command = [nvcc(), f"-std={nvrtc.STANDARD}", *options, "-Xptxas", "-v", str(file), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr, done.stderr
    return done.stderr


@dataclass(frozen=True)
class Built:
    fatbin: Path
    resources: dict[tuple[str, str], Resources]
    entries: tuple[str, ...]


def build(folder: Path, name: str, specs: tuple[str, ...]) -> Built:
    """All `specs` as entries of one file, for all architectures at once (one nvcc run: most of its time is starting up)."""
    lines, entries = [nvrtc.source(name)], tuple(f"{name}_{spec.replace(' ', '_')}" for spec in specs)
    for spec, entry in zip(specs, entries, strict=True):
        if name == "inbox_sum":
            argument, body = "InboxSum", f"Sum<{spec.replace(' ', ', ')}>::tile(args);"
        else:
            argument, body = f"Publish<{spec.split()[1]}>", f"publish_share<{spec.replace(' ', ', ')}>(args);"
        head = f'extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) {entry}(const __grid_constant__ {argument} args)'
        lines.append(f"{head} {{ {body} }}")
    file, fatbin = folder / f"{name}.cu", folder / f"{name}.fatbin"
    file.write_text("\n".join(lines))
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    return Built(fatbin, parse_report(compile_with_nvcc(file, [*targets, "-fatbin"], fatbin)), entries)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("sums"), "inbox_sum", SUMS)


@pytest.fixture(scope="module")
def publications(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("publications"), "publish", PUBLICATIONS)


def check_resources(built: Built) -> None:
    assert set(built.resources) == {(entry, a) for entry in built.entries for a in ARCHITECTURES}
    for (entry, architecture), found in built.resources.items():
        where = f"{entry} for sm_{architecture}: {found}"
        assert found.spilled == 0 and found.stack == 0, where
        assert found.registers <= MOST_REGISTERS, where


@pytest.mark.slow  # test_the_text_that_nvrtc_gets compiles both files, for one architecture
def test_sums_spill_nothing(sums: Built) -> None:
    check_resources(sums)


@pytest.mark.slow
def test_publishing_spills_nothing(publications: Built) -> None:
    check_resources(publications)


def machine_code(fatbin: Path, architecture: str) -> dict[str, str]:
    """entry -> SASS."""
    done = subprocess.run(
        [cuobjdump(), "--dump-sass", "-arch", f"sm_{architecture}", str(fatbin)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"Function : (\w+)", done.stdout)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def loads(sass: str) -> list[str]:
    return re.findall(r"\bLDG\S*", sass)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vector_sums_load_16_bytes_several_at_a_time(sums: Built, architecture: str) -> None:
    code = machine_code(sums.fatbin, architecture)
    for spec in SUMS:
        sass = code[f"inbox_sum_{spec.replace(' ', '_')}"]
        assert not re.search(r"\b(LDL|STL)\b", sass), f"{spec}: local memory"
        wide = [load for load in loads(sass) if ".128" in load]
        if spec.endswith(" 0"):
            assert not wide, spec
            continue
        assert wide, spec
        # Before the first addition of the sum, the loads of the main path stand side by side.
        count = int(spec.split()[2]) or 8
        longest = max(len(re.findall(r"\bLDG\S*\.128", part)) for part in re.split(r"\b(?:FADD|DADD|STG)\b", sass))
        assert longest >= min(4, count), f"{spec}: {longest} loads in flight"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_publishing_loads_16_bytes(publications: Built, architecture: str) -> None:
    for entry, sass in machine_code(publications.fatbin, architecture).items():
        assert not re.search(r"\b(LDL|STL)\b", sass), f"{entry}: local memory"
        assert sum(".128" in load for load in loads(sass)) >= 4 * 4, entry  # four source types, four packs each


@pytest.mark.parametrize("name", ["inbox_sum", "publish"])
def test_the_text_that_nvrtc_gets(tmp_path: Path, name: str) -> None:
    """Text and macros as nvrtc.py hands them over, with the entry that it looks up."""
    if name == "inbox_sum":
        spec, _, _ = plan_sum(0, [0] * 4, 1 << 20, out_dtype=torch.float32, dtype=torch.bfloat16, divisor=4, accumulate=False)
    else:
        spec = plan_publish([Shard(0, 0, 1 << 20, torch.float32, torch.bfloat16)])[0].spec
    file = tmp_path / f"{name}.cu"
    file.write_text(nvrtc.source(name))
    macros = [f"-D{key}={value}" for key, value in spec.macros]
    report = parse_report(compile_with_nvcc(file, ["-arch=sm_90", "-cubin", *macros], tmp_path / "out.cubin"))
    assert set(report) == {(name, "90")} and report[name, "90"].spilled == 0


def test_sources_include_nothing() -> None:
    """NVRTC would need a header path for it."""
    for name in ("inbox_sum", "publish"):
        assert not re.search(r"^\s*#\s*include", nvrtc.source(name), re.MULTILINE)


def test_sources_are_package_data() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["commfuse_dp.kernels"]
    folder = root / "commfuse_dp" / "kernels"
    listed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert listed == {path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh")} and len(listed) == 3


def test_report_is_read() -> None:
    text = """ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 4200 bytes cmem[0]
"""
    assert parse_report(text) == {("k", "80"): Resources(30, 8, 16, 4200)}
