"""A .cu file as a shared library of the host: see cuda_on_host.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from commfuse_dp.kernels import nvrtc

HERE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wno-unknown-pragmas")


class Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64), ("writable", ctypes.c_int32))


class Watch(ctypes.Structure):
    _fields_ = (
        ("ranges", Range * 2200),
        ("count", ctypes.c_int32),
        ("misaligned", ctypes.c_int64),
        ("outside", ctypes.c_int64),
        ("bytes_read", ctypes.c_int64),
        ("bytes_written", ctypes.c_int64),
        ("reads", ctypes.c_int64),
        ("reads_of_16", ctypes.c_int64),
    )


class HostKernel:
    """Kernel `name`, compiled for the host; `watch` counts what the last launches did."""

    def __init__(self, name: str, folder: Path) -> None:
        compiler = shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler (g++, clang++): the kernels' arithmetic cannot be emulated")
        text = f'#include "cuda_on_host.h"\n{nvrtc.source(name)}\n#include "conversions.h"\n#include "{name}_main.h"\n'
        file, library = folder / f"{name}.cpp", folder / f"{name}.so"
        file.write_text(text)
        done = subprocess.run(
            [compiler, *_FLAGS, f"-I{HERE}", str(file), "-o", str(library)], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.library = ctypes.CDLL(str(library))
        self.library.watched.restype = ctypes.POINTER(Watch)
        self._run = getattr(self.library, name)
        self._run.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)

    @property
    def watch(self) -> Watch:
        return self.library.watched().contents

    def allow(self, readable: Sequence[torch.Tensor], writable: Sequence[torch.Tensor]) -> None:
        """The only memory that may be touched from now on; counts start at 0."""
        watch = self.watch
        ctypes.memset(ctypes.byref(watch), 0, ctypes.sizeof(watch))
        for tensor, write in [(tensor, 0) for tensor in readable] + [(tensor, 1) for tensor in writable]:
            begin = tensor.data_ptr()
            watch.ranges[watch.count] = Range(begin, begin + tensor.numel() * tensor.itemsize, write)
            watch.count += 1

    def run(self, spec: nvrtc.Spec, argument: int, blocks: int) -> None:
        key = " ".join(value for _, value in spec.macros)
        assert self._run(key.encode(), argument, blocks) == 0, f"{key}: not among those that {spec.name}_main.h compiles"
        assert self.watch.misaligned == 0, f"{self.watch.misaligned} misaligned accesses: a GPU would have stopped"
        assert self.watch.outside == 0, f"{self.watch.outside} accesses outside the tensors"


def misaligned(numel: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Empty 1-D tensor that starts `offset` elements after a 64-byte boundary; NaN stands before and behind it."""
    room = torch.full((numel + offset + 8,), float("nan"), dtype=dtype)
    assert room.data_ptr() % 64 == 0
    return room[offset : offset + numel]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equal, but all NaNs alike (their payloads differ between processors)."""
    nan = a.isnan() & b.isnan()
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return bool(((a.view(as_int) == b.view(as_int)) | nan).all())
