"""Part (c): small runs under CUDA's and torch's sanitizers.

* compute-sanitizer memcheck: the kernels read and write inside their tensors, nothing is leaked or misaligned.
* compute-sanitizer racecheck: no hazards in shared memory.
* TORCH_CUDA_SANITIZER=1: torch's own check that streams are ordered wherever they share a tensor; it sees torch's operations.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.gpu import checkout
from benchmarks.gpu.part import Options, Reporter, run_part
from commfuse_dp.launch.ranks import python_module

BANNER = "COMPUTE-SANITIZER"
FOUND = 99  # exit status of compute-sanitizer where it found something
RUN_S = 25.0  # a run needs at least that: 11 s were too few on an H200


def run(report: Reporter, options: Options) -> None:
    """compute-sanitizer on the kernels, torch's sanitizer on training."""
    if options.device != "cuda":
        report.skip("sanitizers need a GPU")
        return
    # Tools may make a launch wait for its end, so what a kernel waits for must be on its way before.
    small = ["--small", "--ahead"]
    tool = _compute_sanitizer()
    runs: list[tuple[str, list[str], dict[str, str]]] = []
    if tool is None:
        report.skip("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    else:
        for check in ("memcheck", "racecheck"):
            prefix = [tool, "--tool", check, "--error-exitcode", str(FOUND), "--print-limit", "10"]
            runs.append((check, [*prefix, *python_module("benchmarks.gpu.kernels_check"), *small], {}))
    stream_check = {"TORCH_CUDA_SANITIZER": "1"}
    runs.append(("torch sanitizer, kernels", [*python_module("benchmarks.gpu.kernels_check"), *small], stream_check))
    advice = checkout.advice()
    if advice is not None:
        report.skip(f"torch sanitizer, training: {advice}")
    else:
        runs.append(("torch sanitizer, training", [*python_module("benchmarks.gpu.training"), *small], stream_check))
    for number, (name, command, extra) in enumerate(runs):
        if not report.enough(RUN_S, name):
            continue
        limit = (report.clock.left - 2.0) / (len(runs) - number)
        with report.guarded(name):
            code, output = run_limited([*command, "--limit-s", f"{limit:.0f}"], extra, limit)
            refusal = refused(output)
            if refusal is not None:
                report.skip(f"{name}: {refusal}")
                continue
            problem = judge(code, output)
            report.row(kind="sanitizer", name=name, ok=problem is None, exit_status=code, tail=output[-1500:])
            if problem is not None:
                report.fail(f"{name}: {problem}")


def _compute_sanitizer() -> str | None:
    places = (None, "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    return next((found for place in places if (found := shutil.which("compute-sanitizer", path=place)) is not None), None)


def run_limited(command: Sequence[str], extra: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """(exit status, output); status None: not done in time, and ended with everything that it had started."""
    process = subprocess.Popen(
        list(command),
        cwd=checkout.ROOT,
        env={**os.environ, **checkout.environment(), **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output


REFUSALS = ("Device not supported", "Unable to find a GPU", "not supported on this system", "Insufficient driver")


def refused(output: str) -> str | None:
    """The tool's own words, if it is the tool that does not serve this GPU, driver or machine."""
    lines = [line.strip() for line in output.splitlines() if line.startswith(("=========", "Error"))]
    found = [line for line in lines if any(text.lower() in line.lower() for text in REFUSALS)]
    return f"the sanitizer does not serve this machine: {found[0]}" if found else None


def judge(code: int | None, output: str) -> str | None:
    """What is wrong, or None."""
    last = " / ".join(line.strip() for line in output.strip().splitlines()[-3:])
    found = [line.strip() for line in output.splitlines() if line.startswith("=========") and BANNER not in line]
    told = " ".join(found[:6])
    if code is None:
        return f"not done in time: {last}" + (f"; errors found: {told}" if told else "")
    if code == FOUND:
        return f"errors found: {told}"
    if "CUDASanitizerErrors" in output or "SynchronizationError" in output:
        return f"streams are not ordered: {last}"
    return None if code == 0 else f"exit status {code}: {last}"


if __name__ == "__main__":
    sys.exit(run_part("sanitizer", run))
