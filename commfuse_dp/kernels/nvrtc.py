"""CUDA C++ compiled at run time: text -> NVRTC -> cubin for the GPU at hand -> a function that can be launched.

Nothing is compiled when the package is installed or imported. The first use of a kernel compiles it (well under a second) and
keeps the cubin on disk (cubins.py), keyed by text, macros, architecture and compiler version. NVRTC and the driver are reached
through cuda-core and cuda-bindings, NVIDIA's own Python packages, which are imported here only when a kernel is asked for.

[Note: Arguments by value]
A launch takes one argument, a struct by value with pointers and sizes of everything the kernel touches (552 bytes for a sum,
4 KB or, for many shards, 32 KB for publishing; a launch may carry 32,764 bytes from CUDA 12.1 and compute capability 7.0 on).
cuLaunchKernel copies it before it returns, so the struct on the host can be reused at once, and the device reads it from the
constant bank. A table in device memory would need one host-to-device copy per change: from pageable memory that copy makes
the host wait, from pinned memory the buffer must outlive it, and it is one more node in every stream.

    host     fill struct | launch | fill struct | launch          no copy, no wait, no lifetime
    stream                 kernel                 kernel

[Note: Streams and lifetime]
A kernel runs on torch's current stream of the tensors' device. As with every torch op, tensors that were made on another
stream are the caller's to order (an event) and to keep alive. The loaded library is never unloaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType

import torch

from commfuse_dp.errors import CommFuseError
from commfuse_dp.kernels.cubins import CubinCache

PRELUDE = "numbers.cuh"
STANDARD = "c++17"
OLDEST = (8, 0)  # bf16 conversions in hardware; what the sources are checked for
_FIX = "pip install 'commfuse_dp[cuda]' (cuda-core and cuda-bindings)"
_CUDA_ERROR_INVALID_CONTEXT = 201


class ToolchainError(CommFuseError):
    """NVRTC, the driver or the packages that reach them are missing or too old; the message says which and the fix."""


class CompileError(CommFuseError):
    """A kernel did not compile; the message carries the compiler's log."""


@dataclass(frozen=True)
class Spec:
    """One kernel to be compiled: file `name`.cu, its entry `name`, and the macros that specialise it.

    folder: of the file; "": the package's own."""

    name: str
    macros: tuple[tuple[str, str], ...] = ()
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.macros)})"


@cache
def source(name: str, folder: str = "") -> str:
    """The text that NVRTC gets for kernel `name`: the prelude and the file, with line markers for its messages."""
    own = resources.files("commfuse_dp.kernels").joinpath("cuda")
    parts = []
    for place, file in ((own, PRELUDE), (Path(folder) if folder else own, f"{name}.cu")):
        parts.append(f'#line 1 "{file}"\n{place.joinpath(file).read_text(encoding="utf-8")}')
    return "\n".join(parts)


def cache_key(spec: Spec, architecture: str, compiler: str) -> str:
    """Hex SHA-256 over everything that decides what the compiler makes of it."""
    digest = hashlib.sha256()
    for part in (source(spec.name, spec.folder), repr(spec.macros), architecture, compiler, STANDARD):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


@cache
def compiler_version() -> str:
    """For example "nvrtc 13.0". Raises ToolchainError where there is no NVRTC."""
    bindings = _import("cuda.bindings.nvrtc")
    try:
        status, major, minor = bindings.nvrtcVersion()
    except Exception as error:  # cuda.pathfinder's DynamicLibNotFoundError, or an OSError of the loader
        raise ToolchainError(
            f"the library libnvrtc cannot be loaded: {_first_line(error)}. It comes with torch's CUDA wheels and with the CUDA "
            "toolkit; else: pip install nvidia-cuda-nvrtc"
        ) from error
    if int(status) != 0:
        raise ToolchainError(f"nvrtcVersion() failed with {status}; is libnvrtc of the same CUDA as the driver?")
    return f"nvrtc {major}.{minor}"


def compile_cubin(spec: Spec, architecture: str) -> bytes:
    """Compile for `architecture` ("sm_90"); needs NVRTC but no GPU. Raises ToolchainError or CompileError."""
    compiler_version()  # names a missing NVRTC better than the compiler's own error
    core = _import("cuda.core")
    log = io.StringIO()
    options = core.ProgramOptions(name=f"{spec.name}.cu", arch=architecture, std=STANDARD, define_macro=list(spec.macros))
    try:
        code = core.Program(source(spec.name, spec.folder), "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        text = "\n".join(part for part in (log.getvalue().strip(), str(error).strip()) if part)
        raise CompileError(f"kernel {spec} did not compile for {architecture} with {compiler_version()}:\n{text}") from error
    return bytes(code)


def cubin(spec: Spec, architecture: str, disk: CubinCache | None = None) -> bytes:
    """From the cache on disk, else compiled and put there."""
    disk = CubinCache() if disk is None else disk
    key = cache_key(spec, architecture, compiler_version())
    code = disk.get(key)
    if code is None:
        code = compile_cubin(spec, architecture)
        disk.put(key, code)
    return code


class Kernel:
    """A function on one device. Launches are asynchronous; `launch` costs a few microseconds of host time."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        """Compile if need be, and load. Raises ToolchainError or CompileError."""
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            raise ToolchainError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}: the CUDA "
                f"kernels need {OLDEST[0]}.{OLDEST[1]} or newer (A100, H100, ...)"
            )
        core = _import("cuda.core")
        self._driver = _import("cuda.bindings.driver")
        self._device = device
        self._name = str(spec)
        code = cubin(spec, f"sm_{capability[0]}{capability[1]}")
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the device's primary context, torch's own, if nothing has yet
            try:
                self._library = core.ObjectCode.from_cubin(code, name=spec.name)
                self._kernel = self._library.get_kernel(spec.name)
            except Exception as error:
                raise ToolchainError(f"the driver did not load kernel {spec}: {_first_line(error)}") from error
        # cuLaunchKernel takes a CUkernel in the place of a CUfunction (CUDA 12).
        handle = getattr(self._kernel, "handle", None)  # older releases of cuda-core have it under a private name only
        self._function = self._driver.CUfunction(int(self._kernel._handle if handle is None else handle))

    def launch(self, blocks: int, threads: int, argument: int, stream: int) -> None:
        """`argument`: address of the struct (copied before this returns); `stream`: raw handle of a stream of the device."""
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self._launch(blocks, threads, argument, stream)
        else:
            self._launch(blocks, threads, argument, stream)

    def _launch(self, blocks: int, threads: int, argument: int, stream: int) -> None:
        parameters = ctypes.c_void_p(argument)  # void*[1]
        place = ctypes.addressof(parameters)
        handle = self._driver.CUstream(stream)
        status = self._driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, handle, place, 0)[0]
        if int(status) == _CUDA_ERROR_INVALID_CONTEXT:  # a thread in which torch has not touched this device yet
            torch.cuda.set_device(self._device)
            torch.empty(1, device=self._device)
            status = self._driver.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, handle, place, 0)[0]
        if int(status) != 0:
            raise CommFuseError(
                f"launching kernel {self._name} on {self._device} ({blocks} blocks of {threads} threads) failed: {status}"
            )


_kernels: dict[tuple[Spec, int], Kernel] = {}
_failures: dict[tuple[Spec, int], CommFuseError] = {}
_lock = threading.Lock()
_warned: set[str] = set()


def kernel(spec: Spec, device: torch.device) -> Kernel:
    """The loaded kernel; compiled at its first use on a device. A failure is remembered and raised again, not tried again."""
    key = (spec, device.index)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        if key in _failures:
            raise _failures[key]
        if key not in _kernels:
            try:
                _kernels[key] = Kernel(spec, device)
            except CommFuseError as error:
                _failures[key] = error
                raise
        return _kernels[key]


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def unavailable() -> str | None:
    """Why no kernel can be compiled here, or None."""
    try:
        compiler_version()
        _import("cuda.core")
    except ToolchainError as error:
        return str(error)
    return None


def warn_of_fallback(name: str, error: CommFuseError) -> None:
    """Once per kernel: it runs by torch's own operations, and why."""
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} runs by torch's own operations instead of its CUDA kernel: {error}", RuntimeWarning, stacklevel=3
        )


def _import(name: str) -> ModuleType:
    import importlib

    try:
        module = importlib.import_module(name)
    except Exception as error:  # also what a broken native library raises at import
        raise ToolchainError(f"{name} cannot be imported ({_first_line(error)}): {_FIX}") from error
    if name == "cuda.core" and not hasattr(module, "Program"):
        try:  # before 0.5 the same classes stand there
            return importlib.import_module("cuda.core.experimental")
        except Exception:
            pass
        raise ToolchainError(f"cuda-core {getattr(module, '__version__', '?')} is too old, 1.0 or newer is needed: {_FIX}")
    return module


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
