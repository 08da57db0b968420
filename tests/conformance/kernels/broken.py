"""Device code that is wrong on purpose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def no_wait(line, epoch, HAS_EXACT: tl.constexpr, TMA: tl.constexpr, INTERPRETED: tl.constexpr):
    """Instead of device_code.await_word."""
    pass


@triton.jit
def counts(ahead, exact):
    """Instead of device_code.misses: an exact word counts as others do."""
    return ahead < 0
