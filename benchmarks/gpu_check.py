"""Proves CommFuse's CUDA side on the GPU at hand, in at most ten minutes: `make gpu-check`.

    python -m benchmarks.gpu_check [--parts kernels_check,timings] [--budget-s 595] [--save FOLDER] [--strict]

Parts, each a program of its own (`python -m benchmarks.gpu.<part> --help`):

    kernels_check   all kernels against float64 and against torch, with slices that come late
    training        2 and 4 processes on the one GPU: FSDP2, tensor parallelism and both + apply() against one process
    sanitizer       compute-sanitizer and TORCH_CUDA_SANITIZER on small runs
    timings         against cuBLAS, against max(GEMM, copies), against the copy bandwidth; host time
    peers           against torch's symm_mem fused ops
    multiprocessors copies and words end while a kernel holds every multiprocessor
    overlap         a step of one rank, peers in the host's memory: against max(compute, transfers)

Exit status: 0 if everything that ran is right; 1 if anything is wrong or was not done in time; 2 without a GPU. Targets that
are missed are shown, and count as wrong with --strict. The record (JSON and a page) goes to benchmarks/results/gpu.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import checkout, record
from benchmarks.gpu.budget import GRACE_S, Share, limit_for
from benchmarks.gpu.part import Outcome, no_gpu

SHARES = (
    Share("kernels_check", 110.0),
    Share("training", 160.0),
    Share("sanitizer", 120.0),
    Share("timings", 110.0),
    Share("peers", 30.0),
    Share("multiprocessors", 20.0),
    Share("overlap", 40.0),
)
BUDGET_S = 595.0
OVERHEAD_S = 10.0  # of this program: imports, facts, the record


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    problem = no_gpu() if given.device == "cuda" else None
    if problem is not None:
        print(problem, file=sys.stderr)
        return 2
    command = "python -m benchmarks.gpu_check " + " ".join(sys.argv[1:] if arguments is None else arguments)
    facts = record.about(command.strip())
    print(f"GPU check on {facts['device']}: {', '.join(share.name for share in given.shares)}", flush=True)
    extra = ["--device", given.device, "--jobs", str(given.jobs), *(["--small"] if given.small else [])]
    advice = checkout.advice() if any(share.name == "training" for share in given.shares) else None
    if advice is not None:
        print(advice, flush=True)
    outcomes, problems = run_parts(given.shares, given.budget_s - OVERHEAD_S, extra)
    date = datetime.date.today().isoformat()
    for path in record.write_somewhere(given.save, facts, outcomes, problems, date):
        print(f"wrote {path}")
    return verdict(outcomes, problems, strict=given.strict)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [share.name for share in SHARES]
    parser = argparse.ArgumentParser(prog="gpu_check", description="Proves CommFuse's CUDA side on the GPU at hand.")
    parser.add_argument("--parts", default=",".join(names), help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--save", type=Path, default=checkout.ROOT / "benchmarks" / "results" / "gpu", help="folder")
    parser.add_argument("--strict", action="store_true", help="targets that are missed count as wrong")
    parser.add_argument("--small", action="store_true", help="small shapes only: a rehearsal")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearses the program, proves nothing")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile kernels")
    given = parser.parse_args(arguments)
    chosen = [name.strip() for name in given.parts.split(",") if name.strip()]
    unknown = sorted(set(chosen) - set(names))
    if unknown or not chosen:
        parser.error(f"--parts {given.parts}: {', '.join(unknown) or 'none'} unknown; known: {', '.join(names)}")
    given.shares = [share for share in SHARES if share.name in chosen]
    if given.budget_s < OVERHEAD_S + 2 * GRACE_S * len(given.shares):
        parser.error(f"--budget-s {given.budget_s:g}: too little for {len(given.shares)} parts")
    return given


def run_parts(
    shares: Sequence[Share], budget_s: float, extra: Sequence[str], now: Callable[[], float] = time.monotonic
) -> tuple[list[Outcome], list[str]]:
    """(what the parts found, parts that could not be run to their end)."""
    end = now() + budget_s
    outcomes, problems = [], []
    for index, share in enumerate(shares):
        limit = limit_for(shares, index, end - now())
        if limit is None:
            problems.append(f"{share.name}: not started, {max(end - now(), 0):.0f} s were left")
            continue
        print(f"\n== {share.name}, at most {limit:.0f} s ==", flush=True)
        outcome, problem = run_one(share.name, limit, extra)
        outcomes.append(outcome)
        if problem is not None:
            problems.append(f"{share.name}: {problem}")
            print(f"{share.name}: {problem}", flush=True)
    return outcomes, problems


def run_one(name: str, limit_s: float, extra: Sequence[str]) -> tuple[Outcome, str | None]:
    """One part in a process of its own; (its outcome as far as it came, why it did not end as it should)."""
    with tempfile.TemporaryDirectory(prefix="commfuse-gpu-check-") as folder:
        out = Path(folder, "outcome.json")
        command = [
            sys.executable,
            "-u",
            "-m",
            f"benchmarks.gpu.{name}",
            "--out",
            str(out),
            "--limit-s",
            f"{limit_s:.1f}",
            *extra,
        ]
        process = subprocess.Popen(
            command,
            cwd=checkout.ROOT,
            env={**os.environ, **checkout.environment()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        problem = None
        try:
            code = process.wait(limit_s + GRACE_S)
            if code not in (0, 1):
                problem = f"ended with exit status {code}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_s:.0f} s, ended"
        finally:
            _end(process)
        outcome = Outcome.load(out) if out.exists() else Outcome(name)
        if problem is None and not outcome.finished:
            problem = "left no outcome"
    return outcome, problem


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part's whole process group; ranks, in sessions of their own, leave when their parent is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(outcomes: Sequence[Outcome], problems: Sequence[str], *, strict: bool) -> int:
    """Prints what is wrong; the exit status."""
    failures = [f"{outcome.part}: {text}" for outcome in outcomes for text in outcome.failures]
    missed = [target for outcome in outcomes for target in outcome.targets if not target.met]
    for text in (*problems, *failures):
        print(f"WRONG  {text}")
    for target in missed:
        print(f"MISSED {target.name}: {target.value:.3g} {target.unit}, wanted {target.limit:g}")
    wrong = bool(problems or failures or (strict and missed))
    print("gpu-check: " + ("something is wrong" if wrong else "all that ran is right"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
