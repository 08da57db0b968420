"""The GEMM kernels as machine code for sm_90 and sm_80, compiled without a GPU: no spilled registers, and what makes them right
(acquire, release, fences) and fast (tensor cores, asynchronous wide loads) is in the code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SHARED_LIMIT = {90: 227 << 10, 80: 163 << 10}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def compiled(folder: Path) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.conformance.kernels.compiling"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=1500,  # for what hangs
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def check(item: dict[str, Any]) -> None:
    # Unaligned operands are loaded by elements; their addresses may take more registers than there are.
    assert item["stack"] <= (0 if item["even"] else 512), item
    assert item["registers"] <= 255 and item["shared"] <= SHARED_LIMIT[item["arch"]], item
    assert bool(item["acquires"]) == (item["op"] != "wgrad"), item
    assert bool(item["releases"]) == (item["op"] == "wgrad"), item
    assert item["joined"], f"threads' stores are not joined before they are counted: {item}"
    tma = "tma" in item["config"]
    assert bool(item["tma_loads"]) == tma, item
    assert bool(item["proxy_fences"]) == (tma and item["op"] != "wgrad"), item
    if item["even"]:
        assert item["wide_stores"], item
        if item["arch"] == 90:
            # Operands of tf32 are rounded in registers before every product.
            assert item["wgmma"] and item["overlapped"] == (item["dtype"] != "fp32"), item
        if item["dtype"] != "fp32":  # tf32 products want operands the other way round: narrower copies
            assert tma or item["wide_copies"], item


def but_for_the_bias(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("row_bias", "registers")}


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_configurations(tmp_path: Path) -> None:
    found = compiled(tmp_path)
    assert len(found) > 60
    assert {(item["arch"], item["op"]) for item in found} == {(a, op) for a in (90, 80) for op in ("forward", "dgrad", "wgrad")}
    for item in found:
        check(item)
    biased = [item for item in found if item["row_bias"]]
    plain = [item for item in found if not item["row_bias"] and item["op"] == "forward" and item["layout"] == "y.T"]
    assert biased and list(map(but_for_the_bias, biased)) == list(map(but_for_the_bias, plain)), "tiles are chosen without it"
