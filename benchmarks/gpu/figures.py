"""Figures from times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.report import spread

__all__ = ["doubtful", "gib_per_s", "paired_ratio", "spread", "teraflops"]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of one time over another of the same round, so that drift of the clocks cancels."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def gib_per_s(nbytes: float, milliseconds: float) -> float:
    return nbytes / milliseconds * 1e3 / (1 << 30)


def teraflops(operations: float, milliseconds: float) -> float:
    return operations / milliseconds * 1e3 / 1e12


def doubtful(times: dict[str, list[float]], most: float = 1.15) -> list[str]:
    """Names whose 80th percentile is far from the 20th: the device was not quiet."""
    found = []
    for name, values in times.items():
        about = spread(values)
        if about["p80"] > most * about["p20"]:
            found.append(f"{name}: p80 is {about['p80'] / about['p20']:.2f} x p20")
    return found
