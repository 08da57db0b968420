"""Unmodified scripts with tensor parallelism: COMMFUSE=1, and `python -m commfuse_dp.run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import launch

SCRIPT = str(Path(__file__).parent / "programs" / "sequence_parallel_script.py")


@pytest.mark.slow
def test_an_unmodified_script(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", "--master-port", "{port}"]
    stock, err = launch([*command, SCRIPT], tmp_path)
    assert "CommFuse" not in err and len(stock.split()) == 4
    for words, environment in (
        ([*command, SCRIPT], {"COMMFUSE": "1"}),
        ([*command, "-m", "commfuse_dp.run", SCRIPT], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    ):
        out, err = launch(words, tmp_path, **environment)
        assert out == stock
        assert "  column " in err and "  row " in err and "  stock " not in err, err


@pytest.mark.slow
def test_an_unmodified_script_of_two_dimensions(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "programs" / "two_dimensional_script.py")
    command = ["torchrun", "--nproc-per-node", "4", "--master-port", "{port}", script]
    stock, err = launch(command, tmp_path)
    assert "CommFuse" not in err and len(stock.split()) == 4
    out, err = launch(command, tmp_path, COMMFUSE="1")
    assert out == stock
    assert "over tensor parallelism: 2 ranks" in err, err
    assert all(f"  {path} " in err for path in ("column", "row", "hooks")), err
