"""When slices come: copies of such a size that they end one after the other over a given part of a GEMM's time.

The copies are real ones, from and to pinned host memory by a copy engine, as large as the schedule asks for and not as the
slices are: so one schedule ("the last slice comes at 90 % of the GEMM") can be set on any machine, whatever its links. The
slices' data lies there already; that a kernel reads it only after its word is checked elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_BYTES = 4096  # a copy takes some microseconds however small it is


@dataclass(frozen=True)
class Schedule:
    """`copies` transfers of `nbytes` each, one behind the other."""

    copies: int
    nbytes: int
    planned_ms: float


def spread_over(gemm_ms: float, part: float, copies: int, bytes_per_ms: float, most_bytes: int) -> Schedule:
    """So that `copies` transfers together take `part` of `gemm_ms` at `bytes_per_ms` (measured on transfers of that kind).

    The size is a multiple of 256 bytes and at most `most_bytes`. Raises ValueError on values that are not positive.
    """
    if min(gemm_ms, part, copies, bytes_per_ms) <= 0:
        raise ValueError(f"gemm_ms={gemm_ms}, part={part}, copies={copies}, bytes_per_ms={bytes_per_ms}: must be positive")
    wanted = gemm_ms * part * bytes_per_ms / copies
    nbytes = min(max(int(wanted) // 256 * 256, LEAST_BYTES), most_bytes)
    return Schedule(copies, nbytes, copies * nbytes / bytes_per_ms)


def bound_ms(gemm_ms: float, copies_ms: float, slices: int) -> float:
    """No order is faster: of so many equal slices one needs no transfer, and the last transferred one is still to be computed
    when it comes (wgrad: the first one is computed before anything leaves)."""
    if slices < 2:
        return gemm_ms
    part = gemm_ms / slices
    return max(gemm_ms, copies_ms + part, copies_ms / (slices - 1) + gemm_ms - part)
