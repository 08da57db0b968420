"""Whole programs under `accelerate launch --commfuse` on two processes: those of Accelerate's own wheel, and a Trainer's."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(importlib.util.find_spec("accelerate").origin).parent / "test_utils" / "scripts"  # type: ignore[union-attr, arg-type]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
TWO = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
TWO += ["--mixed_precision", "no", "--dynamo_backend", "no"]  # else the launcher warns of its defaults


def launch(*words: str, timeout: float = 240.0, **variables: str) -> str:
    """Output of a launch that succeeds."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COMMFUSE", "ACCELERATE"))}
    process = subprocess.Popen(
        [*LAUNCH, *words],
        env={**kept, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its workers
        output = process.communicate(timeout=30)[0]
        raise AssertionError(f"not done in {timeout} s:\n{output[-4000:]}") from None
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "accelerate"])
def test_hooks_are_set_whatever_is_imported_first(first):
    """accelerate imports torch, whose autoload then runs in the middle of accelerate's own import."""
    code = (
        f"import {first}, torch, accelerate; from accelerate import Accelerator, accelerator, utils; "
        "found = Accelerator.prepare_model, Accelerator.__init__, accelerator.fsdp2_prepare_model, utils.fsdp2_prepare_model; "
        "print([hasattr(function, '_commfuse') for function in found])"
    )
    for asked in ("1", ""):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "COMMFUSE": asked},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert result.stdout.strip() == str([bool(asked)] * 4), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_scripts_of_accelerate_pass(script):
    output = launch(*TWO, "--commfuse", str(SCRIPTS / f"{script}.py"))
    assert "CommFuse for DDP: 2 ranks, transport shm" in output


@pytest.mark.slow
def test_a_trainer_learns_the_same(tmp_path):
    found = {}
    for words in ([], ["--commfuse", "--commfuse_transport", "tcp"]):
        folder = tmp_path / str(len(words))
        folder.mkdir()
        output = launch(*TWO, *words, str(Path(__file__).parent / "trainer_script.py"), str(folder))
        said = "CommFuse for DDP: 2 ranks, transport tcp (asked for by the configuration"
        assert (said in output) == bool(words), output[-4000:]
        found[len(words)] = (
            json.loads((folder / "result.json").read_text()),
            (folder / "model" / "model.safetensors").read_bytes(),
        )
    fused = found[3]
    assert fused[0]["world_size"] == 2 and len(fused[0]["loss"]) == 6
    stock = found[0]
    assert fused[0] == stock[0]  # two ranks: the same sums, to the bit
    assert torch.equal(*(torch.frombuffer(bytearray(model), dtype=torch.uint8) for model in (fused[1], stock[1])))
