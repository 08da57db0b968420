"""Unmodified scripts that shard or replicate a model by torch alone: COMMFUSE=1, and `python -m commfuse_dp.run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cells import slow
from tests.support.launching import launch

SCRIPT = str(Path(__file__).parent / "programs" / "train.py")
TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port", "{port}"]
FSDP2 = "CommFuse: 2 ranks"
SAYS = {
    "fsdp2": FSDP2,
    "blocks": FSDP2,
    "composable": FSDP2,
    "compiled": FSDP2,
    "fsdp1": "CommFuse for FSDP1: 2 ranks",
    "ddp": "CommFuse for DDP: 2 ranks",
    "methods": "nothing in this process has used it",
}


@pytest.mark.parametrize("kind", ["fsdp2", *(slow(kind) for kind in SAYS if kind != "fsdp2")])
def test_trains_as_stock(tmp_path: Path, kind: str) -> None:
    stock, err = launch([*TORCHRUN, SCRIPT, kind], tmp_path)
    assert "CommFuse" not in err and len(stock.split()) == 4
    out, err = launch([*TORCHRUN, SCRIPT, kind], tmp_path, COMMFUSE="1")
    assert out == stock
    assert err.count(SAYS[kind]) == 1 and err.count("CommFuse") == err.count("CommFuse's") + 1, err


@pytest.mark.slow
def test_the_launcher_module_does_the_same(tmp_path: Path) -> None:
    stock, _ = launch([*TORCHRUN, SCRIPT, "fsdp2"], tmp_path)
    words = [*TORCHRUN, "-m", "commfuse_dp.run", "--commfuse-transport", "tcp", SCRIPT, "fsdp2"]
    out, err = launch(words, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert out == stock and "CommFuse: 2 ranks, transport tcp" in err, err


@pytest.mark.slow
def test_settings_that_cannot_be_met_are_errors(tmp_path: Path) -> None:
    for variables, said in (
        ({"COMMFUSE_TRANSPORT": "smoke"}, "COMMFUSE_TRANSPORT='smoke'"),
        ({"COMMFUSE_FUSE": "always"}, "fuse='always'"),
    ):
        with pytest.raises(AssertionError, match=said):
            launch([*TORCHRUN, SCRIPT, "ddp"], tmp_path, COMMFUSE="1", **variables)
