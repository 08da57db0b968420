"""MPI jobs for tests: starting one, and the conformance suite inside of one.

MPI ranks cannot be threads of a process. So the suite itself runs as an MPI job: every process runs the same pytest, a test's
`cluster.run(world_size, body)` runs the body on the first ranks, and all ranks learn how all of them ended. The session that
started the job reports case by case what rank 0 reported (tests/conformance/transports/conftest.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from commfuse_dp.mpi_launch import mpich_segments
from commfuse_dp.transport.base import Transport
from tests.support.threads import ExchangeFn

ROOT = Path(__file__).resolve().parents[2]
JOB_VARIABLE = "COMMFUSE_TEST_MPI_JOB"
_JOB_S = 400.0
_CASE_S = 120
_SEGMENT = "shared memory of MPI: "  # in the output of a job, before a file


def mpiexec() -> str | None:
    """The launcher beside this interpreter, else that of PATH. None: MPI is not installed, its tests are skipped."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def start_job(
    processes: int, command: Sequence[str], environment: Mapping[str, str] | None = None, *, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`mpiexec options -n processes python command...` in the repository's folder, leader of a process group of its own."""
    launcher = mpiexec()
    assert launcher is not None
    return subprocess.Popen(
        [launcher, *options, "-n", str(processes), sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run_job(
    processes: int,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    options: Sequence[str] = (),
    leaves_segments: bool = True,
) -> tuple[int, str]:
    """(exit code, output of all ranks). Raises AssertionError with the output if the job does not end in time, or leaves shared
    memory of MPI although it should not."""
    job = start_job(processes, command, environment, options=options)
    late, output = False, ""
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        late = True
        end_job(job)
        output, _ = job.communicate()
    finally:
        end_job(job)
        left = [segment for segment in told_segments(output) if segment.exists()]
        for segment in left:
            segment.unlink(missing_ok=True)
    assert not late, f"the MPI job did not end within {timeout_s} s:\n{output[-6000:]}"
    assert leaves_segments or (told_segments(output) and not left), f"the MPI job left {left}:\n{output[-6000:]}"
    return job.returncode, output


def end_job(job: subprocess.Popen[str]) -> None:
    """The launcher ends its ranks, whatever process groups it has put them into; then it is ended itself."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(5.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def told_segments(output: str) -> list[Path]:
    """By ranks that have called `tell_segments`."""
    return [Path(name) for name in re.findall(f"^{_SEGMENT}(/dev/shm/\\S+)$", output, re.MULTILINE)]


# ---- inside the job ----------------------------------------------------------------------------------------------------
def tell_segments() -> None:
    """For programs whose ranks do not come to MPI's own end, which removes its shared memory: `run_job` removes it instead."""
    print("".join(f"{_SEGMENT}{segment}\n" for segment in mpich_segments()), end="", flush=True)


class _Post:
    """Objects between the processes of the job, received by patient polling: MPI's own waits would spin on the few cores."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._box: dict[tuple[int, int, int], Any] = {}  # (run, round, source)
        self._failed: set[int] = set()  # runs
        self._sending: list[Any] = []
        self.run = 0

    def send(self, peers: Sequence[int], number: int, item: Any) -> None:
        self._sending = [request for request in self._sending if not request.Test()]
        letter = pickle.dumps((self.run, number, item))
        for peer in peers:
            if peer != self.rank:
                self._sending.append(self._comm.Isend([letter, len(letter)], peer, 0))
        self._box[self.run, number, self.rank] = item

    def wait(self, peers: Sequence[int], number: int, timeout_s: float) -> list[Any]:
        """The items of that round in the order of `peers`. Raises BrokenBarrierError if a rank has failed in this run."""
        from mpi4py import MPI

        limit = time.monotonic() + timeout_s
        status = MPI.Status()
        while not all((self.run, number, peer) in self._box for peer in peers):
            while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
                letter = bytearray(status.Get_count(MPI.BYTE))
                source = status.Get_source()
                self._comm.Recv([letter, MPI.BYTE], source, 0)
                run, round_number, item = pickle.loads(letter)
                if round_number == _FAILED:
                    self._failed.add(run)
                else:
                    self._box[run, round_number, source] = item
            if number >= 0 and self.run in self._failed:
                raise threading.BrokenBarrierError
            if time.monotonic() > limit:
                raise TimeoutError(f"rank {self.rank}: nothing from some of {list(peers)} in round {number}")
            time.sleep(2e-4)
        return [self._box.pop((self.run, number, peer)) for peer in peers]


_OUTCOME, _FAILED = -1, -2
_post: _Post | None = None


def job_size() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def run_on_ranks(world_size: int, main: Any, timeout_s: float) -> list[Any]:
    """`main(rank, exchange)` on the first ranks of the job; what threads.run_ranks does for threads."""
    global _post
    _post = post = _post if _post is not None else _Post()
    assert world_size <= post.size, f"the job has {post.size} processes"
    post.run += 1
    members, everyone = range(world_size), range(post.size)
    rounds = iter(range(1_000_000))

    def exchange(item: Any) -> list[Any]:
        number = next(rounds)
        post.send(members, number, item)
        return post.wait(members, number, timeout_s)

    outcome: tuple[Any, float, str] = (None, 0.0, "")
    own: BaseException | None = None
    if post.rank in members:
        try:
            outcome = (main(post.rank, exchange), 0.0, "")
        except BaseException as error:
            own = error
            outcome = (None, time.monotonic(), f"rank {post.rank}: {traceback.format_exc()}")
            post.send(members, _FAILED, None)
    post.send(everyone, _OUTCOME, outcome)
    outcomes = post.wait(everyone, _OUTCOME, timeout_s)
    failures = sorted((when, text) for _, when, text in outcomes if text)
    if failures:
        raise AssertionError("\n".join(text for _, text in failures)) from own
    return [outcomes[rank][0] for rank in members]


class _Recorder:
    """Outcome of every case, for the session that started the job."""

    def __init__(self) -> None:
        self.cases: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.cases[report.nodeid] = (report.outcome, report.longreprtext)


def _suite(folder: Path) -> int:
    cases = (folder / "cases.txt").read_text().splitlines()
    recorder = _Recorder()
    # All ranks run the same cases in the same order.
    options = [
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        f"--timeout={_CASE_S}",
        "--timeout-method=thread",
    ]
    code = int(pytest.main([*options, *cases], plugins=[recorder]))
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(recorder.cases))
    return code


# ---- outside -----------------------------------------------------------------------------------------------------------
class SuiteJob:
    """The conformance suite as an MPI job, run when the first of its cases is asked for."""

    def __init__(self, cases: Sequence[str], processes: int) -> None:
        self._cases = cases
        self._processes = processes
        self._report: dict[str, tuple[str, str]] | None = None
        self._output = ""

    def outcome(self, case: str) -> tuple[str, str]:
        """("passed", "failed" or "skipped", text)"""
        if self._report is None:
            self._run()
        assert self._report is not None
        return self._report.get(case, ("failed", f"the MPI job ended before this case:\n{self._output[-6000:]}"))

    def _run(self) -> None:
        self._report = {}
        with tempfile.TemporaryDirectory(prefix="mpi-suite-") as name:
            folder = Path(name)
            (folder / "cases.txt").write_text("\n".join(self._cases))
            try:
                _, self._output = run_job(
                    self._processes, ["-m", "tests.support.mpi", name], {JOB_VARIABLE: "1"}, timeout_s=_JOB_S
                )
            except AssertionError as error:
                self._output = str(error)
            with contextlib.suppress(FileNotFoundError):
                self._report = json.loads((folder / "report.json").read_text())


def open_mpi(rank: int, world_size: int, exchange: ExchangeFn, inbox_bytes: int, deadline_s: float) -> Transport:
    from commfuse_dp.transport.two_sided.mpi import MpiTransport

    return MpiTransport(rank, world_size, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s)


if __name__ == "__main__":
    import tests.support.mpi  # this file again, by the name under which the suite imports it

    sys.exit(tests.support.mpi._suite(Path(sys.argv[1])))
