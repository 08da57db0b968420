"""The benchmark as ranks of a job that torchrun has started: no ranks launched, no links made. On GPUs not yet run.

[Note: Parts]
    torchrun --+-- rank 0 (this process) --+-- part 0: worker of rank 0 --+  then part 1: worker of rank 0 --+
               |                           |                              |                                  |
               +-- rank 1 (this process) --+-- part 0: worker of rank 1 --+  then part 1: worker of rank 1 --+
Variants that cannot live in one process (cuda_variants.py says why) are measured in parts, each beside the same reference.
With one part every rank measures in its own process. With more it only starts the workers of its rank, one part after
another; these find each other as ranks of the job, under a prefix of its store that names the part.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report, report_job
from benchmarks.case import BenchmarkError, Case, CaseResult
from benchmarks.worker import PART, PROGRESS, work
from commfuse_dp.errors import ConfigError
from commfuse_dp.launch.ranks import python_module

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "fsdp2"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Job:
    """This process's place in a job."""

    rank: int
    world_size: int
    local_rank: int


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job that a launcher describes by RANK, WORLD_SIZE and LOCAL_RANK; None if not all are set."""
    found = [environment.get(name, "") for name in _VARIABLES]
    if not all(found):
        return None
    try:
        rank, world_size, local_rank = (int(text) for text in found)
    except ValueError:
        raise ConfigError(f"{', '.join(map('='.join, zip(_VARIABLES, found, strict=True)))}: must be integers.") from None
    return Job(rank, world_size, local_rank)


def check(case: Case, job: Job, *, link: str, suite: str | None, world_size: int | None) -> None:
    """Raises ConfigError for what a job cannot do, and BenchmarkError if this rank's device is not there."""
    if suite is not None or link.strip().lower() != "none":
        what = f"--suite {suite}" if suite is not None else f"--link {link}"
        raise ConfigError(
            f"{what} under torchrun: links are made between ranks that the benchmark starts by itself, on one host. Leave it "
            "out (--link none), or start with `python benchmarks/train_step.py`."
        )
    if world_size not in (None, job.world_size):
        raise ConfigError(f"--world-size {world_size}: torchrun started {job.world_size} ranks. Leave it out.")
    if case.device != "cuda":
        return
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no GPU or has no NCCL here. Use --device cpu.")
    if job.local_rank >= torch.cuda.device_count():
        raise BenchmarkError(
            f"rank {job.rank} would be GPU {job.local_rank} of this host, which has {torch.cuda.device_count()}: NCCL needs a "
            f"GPU for every rank. Use --nproc-per-node {torch.cuda.device_count()}."
        )


def parts_of(case: Case, apart: Sequence[str] | None) -> list[Case]:
    """The case cut into parts. `apart`: variants in processes of their own, each beside the reference; None: fsdp2-symm,
    where CommFuse may need symmetric memory of another backend."""
    if apart is None:
        ours = any(name.startswith("commfuse") for name in case.variants)
        apart = ("fsdp2-symm",) if case.device == "cuda" and ours and case.transport != "p2p" else ()
    unknown = [name for name in apart if name not in case.variants]
    if unknown and apart != ("fsdp2-symm",):
        raise ConfigError(f"--apart {','.join(unknown)}: not among --variants {','.join(case.variants)}.")
    together = tuple(name for name in case.variants if name not in apart)
    beside = (REFERENCE,) if REFERENCE in together else ()
    groups = [together, *((*beside, name) for name in case.variants if name in apart)]
    return [replace(case, variants=names) for names in groups if names]


def run(case: Case, job: Job, apart: Sequence[str] | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All parts of the case on this rank: their records on rank 0, an empty list elsewhere."""
    parts = parts_of(case, apart)
    tell = say if job.rank == 0 else (lambda text: None)
    records = []
    for number, part in enumerate(parts):
        tell(f"== part {number + 1} of {len(parts)}: {', '.join(part.variants)}" if len(parts) > 1 else "== one job")
        result = work(part, tell) if len(parts) == 1 else _in_a_process_of_its_own(part, job, number, tell)
        if result is not None and job.rank == 0:
            records.append(_record(part, result, number if len(parts) > 1 else None))
    return records


def _in_a_process_of_its_own(case: Case, job: Job, number: int, tell: Callable[[str], None]) -> CaseResult | None:
    """Raises BenchmarkError if this rank's worker fails; its own words are on stderr already."""
    with tempfile.TemporaryDirectory(prefix="commfuse-bench-") as folder:
        case_file, result_file = Path(folder, "case.json"), Path(folder, "result.json")
        case.save(case_file)
        process = subprocess.Popen(
            [*python_module("benchmarks.worker"), str(case_file), str(result_file)],
            env={
                **os.environ,
                PART: str(number),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
            stdin=subprocess.PIPE,  # never written to: its end tells the worker that this process is gone
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(PROGRESS):
                    tell(line.rstrip("\n")[len(PROGRESS) :])
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if status != 0:
            raise BenchmarkError(f"rank {job.rank}: its worker for {', '.join(case.variants)} ended with status {status}.")
        return CaseResult.load(result_file) if job.rank == 0 else None


def _record(case: Case, result: CaseResult, part: int | None) -> dict[str, Any]:
    hosts = result.facts["hosts"]
    title = f"{case.world_size} ranks on {'one host' if hosts == 1 else f'{hosts} hosts'}"
    if part is not None:
        title += f", part {part + 1}: {', '.join(case.variants)}"
    summary = report.summarize(result, steps=case.steps, link_bytes_per_s=None)
    report_job.extend(summary, result, case)
    return {"title": title, "keep": case.keep, "link": None, "job": result.facts, "summary": summary}
