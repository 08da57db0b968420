"""Slices of few rows, put together until a GEMM over them is worth its call.

At N ranks a slice has 1/N of the weight's rows, and BLAS needs some hundred rows to be fast: one core of an EPYC (MKL, float32,
256 or 1,024 tokens) takes 1.4 to 1.8 times as long for 32 slices of 24 rows as for all 768 rows at once, and 2.7 to 3.6 times
for 64 of 12. The more tokens, the more rows: with 4,096 of them 32 slices of 96 rows take 1.27 times as long, four to a block
1.02 times; with 256 the copies cost more than that gains (benchmarks/results/2026-11-25_slices-alone.md). On GPUs the numbers
below have not been measured.

Joining delays a slice by less than one such GEMM. What is computed is the same, but for the order in which a GEMM adds
up. Which slices come together depends on the program's order, never on time, so results stay bitwise equal from run to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

MANY_TOKENS = 1024


class Joining(NamedTuple):
    few: int  # slices of fewer rows are joined: three or four at least to a block
    most: int  # rows of a joined block


@lru_cache  # then a call is no frame
def joining(rows: int, tokens: int) -> Joining:
    """rows: of the whole weight. Of two or three slices there is little to join."""
    few, most = (128, 384) if tokens >= MANY_TOKENS else (64, 192)
    return Joining(min(few, rows // 4 + 1), min(most, rows))


class JoinedRows:
    """Collects adjacent rows of a weight, upwards or downwards (rings). A block, (first row, [rows, columns]), is to be used
    before the next `put`."""

    __slots__ = ("_high", "_low", "_most", "_origin", "_rows", "_spare")

    def __init__(self, most: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        """most: rows of a block. columns: of the weight."""
        self._most = most
        self._rows = torch.empty(2 * self._most, columns, dtype=dtype, device=device)  # the first rows lie in the middle
        self._spare: torch.Tensor | None = None
        self._low = self._high = self._origin = 0

    def put(self, row: int, weight: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """weight: [rows < `Joining.few`, columns], any dtype; copied. The block before, if these rows do not go with it."""
        end, block = row + weight.shape[0], None
        low, high = min(row, self._low), max(end, self._high)
        if high - low > self._most or (row != self._high and end != self._low):
            if self._high > self._low:
                block = self.take()
                if self._spare is None:
                    self._spare = torch.empty_like(self._rows)
                self._rows, self._spare = self._spare, self._rows
            low, high, self._origin = row, end, row - self._most
        self._rows[row - self._origin : end - self._origin].copy_(weight)
        self._low, self._high = low, high
        return block

    def take(self) -> tuple[int, torch.Tensor]:
        """What has been collected, not yet handed out."""
        return self._low, self._rows[self._low - self._origin : self._high - self._origin]


class JoinedPartials:
    """dW = left.T @ right for slices of few rows, computed for several at once, ahead of the order in which they leave."""

    __slots__ = ("_before", "_block", "_done", "_high", "_left", "_low", "_most", "_right")

    def __init__(self, left: torch.Tensor, right: torch.Tensor, most: int) -> None:
        """left: [tokens, rows], right: [tokens, columns]. most: rows of a block."""
        self._left, self._right, self._most = left, right, most
        self._block = right.new_empty(most, right.shape[1])
        self._done = bytearray(left.shape[1])  # 1: computed
        self._low = self._high = 0
        self._before: int | None = None  # row of the slice before: which way the order goes

    def fill(self, row: int, out: torch.Tensor) -> None:
        """out [rows, columns], any dtype = dW from `row` on."""
        at, end = row, row + out.shape[0]
        while at < end:
            if not self._low <= at < self._high:
                self._compute(at, end)
            high = min(end, self._high)
            out[at - row : high - row].copy_(self._block[at - self._low : high - self._low])
            at = high
        self._before = row

    def _compute(self, low: int, high: int) -> None:
        # The first slice alone: it does not show which way the order goes. And not what was computed before: ranks begin beside
        # their own rows, and what lies on these' other side comes last.
        high = min(high, low + self._most)
        if self._before is not None and not self._done[low]:
            if low > self._before:
                found = self._done.find(1, low, low + self._most)
                high = found if found >= 0 else min(low + self._most, len(self._done))
            else:
                start = max(high - self._most, 0)
                low = max(self._done.rfind(1, start, low) + 1, start)
        torch.mm(self._left[:, low:high].t(), self._right, out=self._block[: high - low])
        self._done[low:high] = b"\1" * (high - low)
        self._low, self._high = low, high


__all__ = ["JoinedPartials", "JoinedRows", "Joining", "joining"]
