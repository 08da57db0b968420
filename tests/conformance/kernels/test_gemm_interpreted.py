"""The three GEMM kernels against float64, in Triton's interpreter: one process runs all cells of interpreted.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.kernels.interpreted import CELLS

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


SLOW = {  # more shapes, layouts and dtypes of what others have
    "cell_layouts_even",
    "cell_layouts_ragged",
    "cell_layouts_ragged_fp16_in_halves",
    "cell_layouts_tma_with_tails",
    "cell_mutation_of_strides_is_caught",
    "cell_products_of_tensor_parallelism",
    "cell_row_bias",
    "cell_whole_sequences",
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Of those cells that are asked for."""
    params = (getattr(item, "callspec", None) and item.callspec.params for item in request.session.items)  # type: ignore[attr-defined]
    names = [found["cell"] for found in params if found and found.get("cell") in CELLS]
    result = subprocess.run(
        [sys.executable, "-m", "tests.conformance.kernels.interpreted", *names],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("cell", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CELLS])
def test_cell(cell: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[cell] is None, outcomes[cell]
