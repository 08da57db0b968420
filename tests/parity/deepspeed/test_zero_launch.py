"""Unmodified programs with nothing but the block in their JSON: DeepSpeed's way, and the Hugging Face Trainer's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.parity.deepspeed.pair import adamw
from tests.support.launching import launch

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def write(path: Path, stage: int, **more: Any) -> str:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 40} if stage == 3 else {})}
    content = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "commfuse": {"transport": "tcp"}, **more}
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("against_stock", [False, True])
def test_a_deepspeed_script(tmp_path, against_stock):
    file = write(tmp_path / "ds.json", 3, optimizer=adamw())
    command = [*TORCHRUN, str(PROGRAMS / "train.py"), "--deepspeed_config", file]
    out, err = launch(command, tmp_path)
    assert "CommFuse: 2 ranks, transport tcp (asked for" in err and re.search(r"  0,2\.weight +fused", err), err[-3000:]
    assert err.count("CommFuse: 2 ranks") == 1  # rank 0 says it
    losses = [float(loss) for loss in re.findall(r"loss \d (\S+)", out)]
    assert len(losses) == 4
    if against_stock:
        stock_out, stock_err = launch(command, tmp_path, COMMFUSE="0")
        assert "CommFuse" not in stock_err
        assert losses == pytest.approx([float(loss) for loss in re.findall(r"loss \d (\S+)", stock_out)], rel=1e-6)


def trainer(tmp_path: Path, stage: int, **variables: str) -> tuple[list[tuple[float, float]], str]:
    """[(loss, gradient norm) of every step], stderr"""
    file = write(tmp_path / "ds.json", stage, **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"))
    folder = tmp_path / f"{stage}{len(variables)}"
    folder.mkdir()
    out, err = launch([*TORCHRUN, str(PROGRAMS / "trainer.py"), file, str(folder)], tmp_path, **variables)
    found = re.findall(r"'loss': '?([\d.e-]+)'?, 'grad_norm': '?([\d.e-]+)", out)
    return [(float(loss), float(norm)) for loss, norm in found], err


@pytest.mark.slow
def test_a_trainer(tmp_path):
    results = {}
    for stage in (2, 3):
        results[stage], err = trainer(tmp_path, stage)
        assert "CommFuse: 2 ranks, transport tcp" in err and re.search(r"q_proj.weight +fused", err), err[-3000:]
        assert len(results[stage]) == 6
    stock, err = trainer(tmp_path, 3, COMMFUSE="0")
    assert "CommFuse" not in err
    for found in results.values():
        for (loss, norm), (stock_loss, stock_norm) in zip(found, stock, strict=True):  # printed with four digits
            assert loss == pytest.approx(stock_loss, rel=1e-3) and norm == pytest.approx(stock_norm, rel=1e-3)
