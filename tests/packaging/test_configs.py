"""The files in configs/: each is run, or loaded by the framework that it is for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commfuse_dp import CommFuseConfig
from tests.packaging.lines import CONFIGS, PROGRAMS, run_line
from tests.parity.deepspeed.pair import Case, Net, Result, both

LINES = re.findall(r"^((?:deepspeed|torchrun|mpiexec|accelerate) .*)$", (CONFIGS / "launch.md").read_text(), re.MULTILINE)


def test_every_file_is_named_in_the_readme():
    text = (CONFIGS / "README.md").read_text()
    for path in CONFIGS.iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in text, path.name


def test_commfuse_json_has_every_setting_with_its_default(monkeypatch):
    content = json.loads((CONFIGS / "commfuse.json").read_text())
    monkeypatch.setenv("COMMFUSE_CONFIG", str(CONFIGS / "commfuse.json"))
    assert CommFuseConfig.from_environment() == CommFuseConfig()
    assert content.keys() == CommFuseConfig.model_fields.keys()


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------
def deepspeed_file(rank: int, world_size: int, name: str) -> tuple[Result, Result]:
    content = json.loads((CONFIGS / name).read_text())
    block = content.pop("commfuse")
    if content["zero_optimization"]["stage"] == 3:  # of a small model the default keeps everything whole
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    return both(rank, world_size, Case(content, make=Net, block=block))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_files_train_as_stock_does(workers, stage):
    for stock, ours in workers(2).run(deepspeed_file, f"deepspeed_zero{stage}.json", timeout=60):
        assert ours.losses == pytest.approx(stock.losses, rel=6e-3)  # bf16
        assert ours.paths["head.weight"] == "fused"


# ---- Accelerate ------------------------------------------------------------------------------------------------------
# What Accelerate's launcher makes of the file is what its workers build their plugin from.
EXPECTED: dict[str, dict[str, Any]] = {
    "accelerate_fsdp2.yaml": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": False},
    "accelerate_fsdp1.yaml": {"fsdp_version": 1, "use_orig_params": True, "sync_module_states": True},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_fsdp_files_are_read_by_accelerate(name):
    """Accelerate runs FSDP on accelerators only (see tests/parity/accelerate for the way that its own code is run here)."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--commfuse", "--config_file", str(CONFIGS / name), "train.py"]
    device = mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True)  # fsdp_sync_module_states asks
    with mock.patch.dict(os.environ), device, mock.patch("torch.cuda.current_device", return_value=0):
        args, config, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        assert args.use_fsdp and args.commfuse and args.num_processes == 2 and config.distributed_type == "FSDP"
        os.environ.update(prepare_multi_gpu_env(args))
        plugin = FullyShardedDataParallelPlugin()
    for key, value in EXPECTED[name].items():
        assert getattr(plugin, key) == value, key


# ---- lines -----------------------------------------------------------------------------------------------------------
def test_lines_are_found():
    assert {shlex.split(line)[0] for line in LINES} == {"deepspeed", "torchrun", "mpiexec", "accelerate"} and len(LINES) == 6


@pytest.mark.slow  # tests/parity and tests/packaging start most launchers, too
@pytest.mark.parametrize("line", LINES)
def test_launch_lines(tmp_path, line):
    if line.startswith("mpiexec"):
        pytest.importorskip("mpi4py")
    for path in CONFIGS.iterdir():
        shutil.copy(path, tmp_path)
    script = "accelerate_script.py" if line.startswith("accelerate") else "deepspeed_script.py"
    shutil.copy(PROGRAMS / script, Path(tmp_path) / "train.py")
    out, err = run_line(line, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 4 and losses[-1] < losses[0], (losses, err[-3000:])
    if "ddp" in line:
        assert "CommFuse for DDP: 2 ranks" in err
    else:
        assert re.search(r"CommFuse: 2 ranks, transport (shm|mpi)", err), err[-3000:]
        assert re.search(r"  0(,2)?\.weight +fused", err), err[-3000:]
    if line.startswith("mpiexec"):
        assert "transport mpi" in err
