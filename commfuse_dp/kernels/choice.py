"""Which backend computes a product, and with which tiles: measured once per shape and device, kept, explained, or forced.

| asked for | what happens |
| --- | --- |
| `auto` | the faster of kernel and BLAS by slices, by measurement; BLAS where the kernels cannot run, and the log says why |
| `triton` | the kernel, with the fastest tiles; raises ConfigError or KernelError where it cannot run |
| `blas` | BLAS, slice by slice; nothing is measured |

Numbers of tokens are rounded up to two significant bits in what is looked up, so that sequences of varying length are not
measured one by one (`alike`). Nothing is measured while a CUDA graph is captured: the default tiles serve then, and the choice
is not kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from commfuse_dp.errors import CommFuseError, ConfigError
from commfuse_dp.kernels import tiles, trial
from commfuse_dp.kernels.measured import MeasuredFile, Trial, default_path
from commfuse_dp.kernels.tiles import Problem, TileConfig

Asked = Literal["auto", "triton", "blas"]
Measure = Callable[[Problem, torch.device, Sequence[TileConfig]], Trial]

_LEAST_TRITON = (3, 6)
_LEAST_CAPABILITY = (8, 0)
_MOST_EXACT = 4096
_STEP = 64  # rows; the longest step of any configuration
_WIDE = 8  # elements of the narrowest dtype in 16 bytes
_SOURCES = ("device_code", "gemm_forward", "gemm_dgrad", "gemm_wgrad", "launching", "trial")

log = logging.getLogger(__name__)


class KernelError(CommFuseError):
    """A kernel that was asked for does not compile or start."""


@dataclass(frozen=True)
class Decision:
    """backend: who computes; config: the kernel's tiles (None for BLAS); reason: why, in words for the report."""

    backend: Literal["triton", "blas"]
    config: TileConfig | None
    reason: str
    measured: Trial | None = None


class Row(NamedTuple):
    """One line of the report."""

    op: str
    product: str  # tokens x columns x rows, and which operands lie in memory transposed
    dtype: str
    slices: int
    backend: str
    tiles: str
    why: str


def rounded(tokens: int) -> int:
    """The next number of two significant bits: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    step = 1 << max(tokens.bit_length() - 2, 0)
    return -(-tokens // step) * step


def alike(problem: Problem) -> Problem:
    """The problem that is measured for it.

    Where operands lie transposed, slices are of tokens (tensor parallelism), and so are their rows. Whether these are whole
    steps, which loads by TMA depend on, stays as it is, and so does what they are multiples of, which wide stores depend on."""
    rows = problem.rows
    if True in problem.transposed:
        whole = math.gcd(_STEP, *rows)
        rest = 0 if whole == _STEP else min(whole, _WIDE)  # two bits and so much are no multiple of a step
        rows = tuple(rounded(count) + rest for count in rows)
    return problem._replace(tokens=rounded(problem.tokens), rows=rows)


@lru_cache(maxsize=1)
def _source_hash() -> str:
    """Kernels of another version are measured anew."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def _triton_version() -> tuple[int, int] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def unavailable(device: torch.device, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why the kernels cannot run there; None if they can. Triton is imported only if the device could use it."""
    wrong = [dtype for dtype in dtypes if dtype not in tiles.DTYPES]
    if wrong:
        return f"the kernels know {', '.join(map(str, tiles.DTYPES))}, not {wrong[0]}"
    if device.type == "cpu" and _interpreting():
        return None
    if device.type != "cuda":
        return f"the kernels run on CUDA devices, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the kernels need sm_80 or newer, this is sm_{capability[0]}{capability[1]}"
    version = _triton_version()
    if version is None:
        return "Triton is not installed"
    if version < _LEAST_TRITON:
        return f"Triton {version[0]}.{version[1]} is older than 3.6"
    return None


def _interpreting() -> bool:
    """Whether Triton's interpreter stands in for a device (tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _triton_version() is not None


class Chooser:
    """Decisions of one process. asked: see above; path: the cache on disk, None for none; measure: runs a trial.

    A chooser is used by one thread at a time. Raises ConfigError on an unknown `asked`.

    Attributes:
        exact: decisions by the very problems that were asked about; `decide` takes them for others that are `alike`.
    """

    def __init__(
        self, asked: Asked = "auto", *, path: Path | Literal["default"] | None = "default", measure: Measure = trial.measure
    ):
        if asked not in get_args(Asked):
            raise ConfigError(f"kernels={asked!r}: allowed are {', '.join(map(repr, get_args(Asked)))}")
        self.asked = asked
        self._file = MeasuredFile(default_path() if path == "default" else path)
        self._measure = measure
        self._made: dict[tuple[Problem, torch.device], Decision] = {}  # tokens rounded
        self.exact: dict[tuple[Problem, torch.device], Decision] = {}
        self._logged: set[str] = set()

    def decide(self, problem: Problem, device: torch.device) -> Decision:
        """What computes this product there, where `exact` does not know. It may measure, which waits for the device.

        Raises ConfigError if 'triton' was asked for and the kernels cannot run there, KernelError if none of them compiles.
        """
        key = (alike(problem), device)
        decision, keep = self._made.get(key), True
        if decision is None:
            decision, keep = self._decide(*key)
        if keep:
            self._made[key] = decision
            if len(self.exact) >= _MOST_EXACT:
                self.exact.clear()
            self.exact[problem, device] = decision
        return decision

    def failed(self, problem: Problem, device: torch.device, error: BaseException) -> None:
        """The chosen kernel did not compile or start: BLAS from now on, with a warning.

        Raises KernelError if 'triton' was asked for.
        """
        why = trial.first_line(error)
        if self.asked == "triton":
            raise KernelError(
                f"the {problem.op} kernel of {problem.tokens} x {problem.columns} x {sum(problem.rows)} ({problem.dtype}) "
                f"failed: {why}; ask for 'auto' or 'blas' to go on without it"
            ) from error
        warnings.warn(
            f"commfuse_dp: the {problem.op} kernel failed ({why}); BLAS by slices takes over for products of this shape",
            stacklevel=3,
        )
        key = (alike(problem), device)
        self._made[key] = Decision("blas", None, f"the kernel failed: {why}")
        self.exact.clear()

    def explain(self) -> list[Row]:
        """Every decision made so far, for the report."""
        rows = []
        for (problem, _), decision in self._made.items():
            product = f"{problem.tokens} x {problem.columns} x {sum(problem.rows)}"
            if problem.layout:
                product += f", {problem.layout}"
            dtype = str(problem.dtype).removeprefix("torch.")
            if problem.out_dtype != problem.dtype:
                dtype += f" -> {str(problem.out_dtype).removeprefix('torch.')}"
            shape = "-" if decision.config is None else str(decision.config)
            rows.append(Row(problem.op, product, dtype, len(problem.rows), decision.backend, shape, decision.reason))
        return rows

    # ---- making a decision -------------------------------------------------------------------------------------------
    def _decide(self, problem: Problem, device: torch.device) -> tuple[Decision, bool]:
        """(decision, whether it holds from now on)."""
        if self.asked == "blas":
            return Decision("blas", None, "asked for"), True
        reason = unavailable(device, (problem.dtype, problem.out_dtype))
        if reason is not None:
            if self.asked == "triton":
                raise ConfigError(f"kernels='triton' for a {problem.op} on {device}: {reason}; use 'auto' or 'blas'")
            self._log_once(f"GEMMs by BLAS, slice by slice: {reason}")
            return Decision("blas", None, reason), True
        if device.type != "cuda":  # interpreted
            if self.asked == "auto":
                return Decision("blas", None, "an interpreter is never the faster one"), True
            return Decision("triton", tiles.default(problem, (9, 0)), "asked for; interpreted"), True
        capability = torch.cuda.get_device_capability(device)
        if torch.cuda.is_current_stream_capturing():
            return Decision("triton", tiles.default(problem, capability), "not measured: a CUDA graph is being captured"), False
        return self._by_measurement(problem, device, capability), True

    def _by_measurement(self, problem: Problem, device: torch.device, capability: tuple[int, int]) -> Decision:
        key = self._key(problem, device)
        found = self._file.get(key)
        if found is None:
            try:
                found = self._measure(problem, device, tiles.candidates(problem, capability))
            except torch.OutOfMemoryError:
                why = "not measured: no memory for a second set of operands"
                if self.asked == "triton":
                    return Decision("triton", tiles.default(problem, capability), f"asked for; {why}")
                self._log_once(f"GEMMs by BLAS, slice by slice: {why}")
                return Decision("blas", None, why)
            self._file.put(key, found)
        best = found.best
        if best is None:
            why = f"no kernel compiles: {next(iter(found.failed.values()), 'no candidate')}"
            if self.asked == "triton":
                raise KernelError(f"kernels='triton' for a {problem.op} on {device}: {why}; use 'auto' or 'blas'")
            warnings.warn(f"commfuse_dp: {problem.op}: {why}; BLAS by slices is used", stacklevel=4)
            return Decision("blas", None, why, found)
        kernel_ms = found.triton_ms[best]
        figures = f"kernel {kernel_ms:.3f} ms, BLAS by slices {found.blas_ms:.3f} ms"
        if self.asked == "triton":
            return Decision("triton", best, f"asked for; {figures}", found)
        if kernel_ms <= found.blas_ms:
            return Decision("triton", best, f"measured: {figures}", found)
        return Decision("blas", None, f"measured: {figures}", found)

    def _key(self, problem: Problem, device: torch.device) -> str:
        triton = _triton_version()
        words = [
            f"{problem.op} {problem.tokens} x {problem.columns} x {list(problem.rows)}",
            f"{problem.dtype} -> {problem.out_dtype} bias={problem.has_bias} vectored={problem.vectored} tf32={problem.tf32}",
            problem.layout or "no operand transposed",
            f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton}, kernels {_source_hash()}",
        ]
        return "; ".join(words)

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            log.info(message)
