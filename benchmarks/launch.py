"""Starts the ranks of one case, watches them, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.case import BenchmarkError, Case, CaseResult
from benchmarks.worker import PROGRESS
from commfuse_dp.cli.netns import ShapedWorld

ROOT = Path(__file__).resolve().parent.parent
_LAST_LINES = 15
_POLL_S = 0.1
_GRACE_S = 10.0  # for survivors of a dead rank to say in their own logs what they saw


def run_case(
    case: Case,
    world: ShapedWorld | None,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    command: Callable[[Path, Path], list[str]] | None = None,
) -> CaseResult:
    """Run the ranks in `world` (None: this host) and return what they measured.

    `command(case file, result file)` is what every rank executes; the default is the worker.
    Raises BenchmarkError with the rank and its last lines when one dies, or when timeout_s have passed.
    """
    with tempfile.TemporaryDirectory(prefix="commfuse-bench-") as folder:
        case_file, result_file = Path(folder, "case.json"), Path(folder, "result.json")
        case.save(case_file)
        default = [sys.executable, "-m", "benchmarks.worker", str(case_file), str(result_file)]
        logs = [Path(folder, f"rank{rank}.log") for rank in range(case.world_size)]
        with _ranks(case.world_size, world, command(case_file, result_file) if command else default, logs) as processes:
            _watch(processes, logs, time.monotonic() + timeout_s, timeout_s, say)
        if not result_file.exists():
            raise BenchmarkError(f"rank 0 ended without a result; its last lines:\n{_tail(logs[0])}")
        return CaseResult.load(result_file)


@contextlib.contextmanager
def _ranks(
    size: int, world: ShapedWorld | None, command: list[str], logs: list[Path]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = 29500 if world is not None else _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            env = {**os.environ, **_environment(rank, size, port, world)}
            prefix = world.command_prefix(rank) if world is not None else []
            with logs[rank].open("wb") as log:
                # A session of its own: Ctrl-C reaches the launcher alone, which then ends the ranks.
                processes.append(
                    subprocess.Popen(
                        prefix + command,
                        env=env,
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _environment(rank: int, size: int, port: int, world: ShapedWorld | None) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size))
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if world is not None:
        return {**variables, **world.environment(rank), "BENCH_INTERFACE": world.interface(rank)}
    return {**variables, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def _watch(
    processes: list[subprocess.Popen[bytes]], logs: list[Path], limit: float, timeout_s: float, say: Callable[[str], None]
) -> None:
    shown = 0
    while True:
        codes = [process.poll() for process in processes]
        shown = _pass_on(logs[0], shown, say)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise BenchmarkError(_obituary(failed, processes, logs))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > limit:
            late = [rank for rank, code in enumerate(codes) if code is None]
            tails = "\n".join(f"rank {rank}:\n{_tail(logs[rank])}" for rank in late)
            raise BenchmarkError(f"ranks {late} were not done after {timeout_s:g} s (--timeout); their last lines:\n{tails}")
        time.sleep(_POLL_S)


def _obituary(first: list[int], processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> str:
    """Who died first and what all ranks said last (survivors are given a moment to notice)."""
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
    lines = [f"rank {rank} {_fate(processes[rank].returncode)}; its last lines:\n{_tail(logs[rank])}" for rank in first]
    for rank, process in enumerate(processes):
        if rank not in first and process.poll() != 0:
            fate = "was still running" if process.poll() is None else f"then {_fate(process.returncode)}"
            lines.append(f"rank {rank} {fate}; its last lines:\n{_tail(logs[rank])}")
    return "\n".join(lines)


def _fate(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LAST_LINES:]) or "    (nothing)"


def _pass_on(log: Path, shown: int, say: Callable[[str], None]) -> int:
    """Hand rank 0's new progress lines to `say`; returns how many lines of the log have been seen."""
    text = log.read_text(errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    for line in lines[shown:]:
        if line.startswith(PROGRESS):
            say(line[len(PROGRESS) :])
    return len(lines)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
