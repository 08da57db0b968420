"""The run-time compiler itself, which needs no GPU: NVRTC through cuda-core, the way kernels take on a GPU up to the driver."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from commfuse_dp.kernels import nvrtc
from commfuse_dp.kernels.cubins import CubinCache
from commfuse_dp.kernels.inbox_sum import plan_sum
from commfuse_dp.kernels.nvrtc import CompileError, Spec
from commfuse_dp.kernels.publish import Shard, plan_publish

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _sum(ranks: int, dtype: torch.dtype, out: torch.dtype, divisor: float | None = None, shift: int = 0) -> Spec:
    return plan_sum(0, [shift] * ranks, 1 << 20, out_dtype=out, dtype=dtype, divisor=divisor, accumulate=False)[0]


def _publish(shards: int, out: torch.dtype) -> Spec:
    return plan_publish([Shard(0, 0, 1 << 20, FP32, out)] * shards)[0].spec


# What a training step asks for, and what is rare: many ranks, unaligned partials, float64, a divisor that is no power of two.
USUAL = (_sum(8, BF16, FP32, 8.0), _publish(100, BF16))
RARE = (_sum(64, FP16, FP32, 7.5), _sum(3, BF16, BF16, shift=2), _sum(2, FP64, FP64), _publish(900, FP64), _publish(1, FP16))


@pytest.fixture(autouse=True)
def real() -> None:
    nvrtc.compiler_version.cache_clear()
    reason = nvrtc.unavailable()
    if reason is not None:
        pytest.skip(reason)  # not with the dev extra, which brings NVRTC: so not in make test


def architecture_of(cubin: bytes) -> int:
    """Of an ELF file: bits 8..15 of e_flags in the format of CUDA 13, 0..7 before."""
    assert cubin[:4] == b"\x7fELF"
    version, flags = cubin[8], struct.unpack_from("<I", cubin, 48)[0]
    return (flags >> 8) & 0xFF if version >= 8 else flags & 0xFF


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_source_compiles(architecture: str) -> None:
    for spec in USUAL:
        code = nvrtc.compile_cubin(spec, architecture)
        assert f"sm_{architecture_of(code)}" == architecture
        assert f".text.{spec.name}\0".encode() in code  # the entry under the name by which it is looked up


@pytest.mark.parametrize("spec", RARE, ids=str)
def test_rare_kinds_compile(spec: Spec) -> None:
    assert architecture_of(nvrtc.compile_cubin(spec, "sm_90")) == 90


def test_the_cache_saves_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hit, corrupt file, changed source: compiled once, again, and beside."""
    compiled = []
    compile_cubin = nvrtc.compile_cubin

    def counted(spec: Spec, architecture: str) -> bytes:
        compiled.append(spec)
        return compile_cubin(spec, architecture)

    monkeypatch.setattr(nvrtc, "compile_cubin", counted)
    spec, disk = USUAL[0], CubinCache(tmp_path / "cubins")
    first = nvrtc.cubin(spec, "sm_90", disk)
    assert nvrtc.cubin(spec, "sm_90", CubinCache(tmp_path / "cubins")) == first and len(compiled) == 1
    (file,) = (tmp_path / "cubins").iterdir()
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:200] + b"\0\1\2\3" + whole[204:], b""):
        file.write_bytes(broken)
        assert nvrtc.cubin(spec, "sm_90", disk) == first
        assert file.read_bytes() == whole
    assert len(compiled) == 4
    text = nvrtc.source(spec.name)
    monkeypatch.setattr(nvrtc, "source", lambda *of: text.replace("template <", "/* changed */ template <", 1))
    assert nvrtc.cubin(spec, "sm_90", disk)[:4] == b"\x7fELF"
    assert len(compiled) == 5 and len(list((tmp_path / "cubins").iterdir())) == 2


def test_an_error_shows_file_line_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    name, macros = USUAL[0].name, USUAL[0].macros
    wrong = Spec(name, tuple((key, "nonsense" if key == "COMMFUSE_OUT" else value) for key, value in macros))
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(wrong, "sm_90")
    text = str(caught.value)
    assert f"kernel {wrong} did not compile for sm_90 with nvrtc 1" in text
    assert 'error: identifier "nonsense" is undefined' in text and "inbox_sum.cu(" in text
    source = nvrtc.source(name) + "\nint last_line = oops;\n"
    monkeypatch.setattr(nvrtc, "source", lambda *of: source)
    lines = source[source.index('#line 1 "inbox_sum.cu"') :].count("\n") - 1  # the marker speaks of the line that follows it
    with pytest.raises(CompileError, match=rf'inbox_sum\.cu\({lines}\): error: identifier "oops" is undefined'):
        nvrtc.compile_cubin(USUAL[0], "sm_90")


def test_an_architecture_that_is_not_known_is_an_error_that_names_it() -> None:
    with pytest.raises(CompileError, match=r"(?s)for sm_12 with nvrtc .*invalid value for --gpu-architecture"):
        nvrtc.compile_cubin(USUAL[0], "sm_12")
