"""Lines of configs/launch.md, run as they stand but for the port, which must be free, and the CPU."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.support.launching import launch

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PROGRAMS = Path(__file__).parent / "programs"


def run_line(line: str, folder: Path, timeout_s: float = 150.0) -> tuple[str, str]:
    """(stdout, stderr)"""
    words = shlex.split(line)
    variables: dict[str, str] = {}
    if words[0] == "deepspeed":
        words[1:1] = ["--master_port", "{port}"]
    elif words[0] == "accelerate":
        words[2:2] = ["--main_process_port", "{port}"]
        if "accelerate_deepspeed.yaml" not in words:
            variables["ACCELERATE_USE_CPU"] = "1"
    if "commfuse_dp.run" in words and words[0] != "mpiexec":
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return launch(words, folder, timeout_s=timeout_s, **variables)
