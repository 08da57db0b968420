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


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.conformance.kernels.interpreted"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("cell", list(CELLS))
def test_cell(cell: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[cell] is None, outcomes[cell]
