"""For this folder: blocks of attention are small here, and torch's kernel computes them all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commfuse_dp.ops.attention import block


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "LEAST_KEYS", 0)
        yield
