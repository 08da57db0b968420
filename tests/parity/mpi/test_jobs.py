"""Real MPI jobs: mpiexec -n N python -m commfuse_dp.run program.py."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.support.mpi import mpiexec, run_job

PROGRAM = str(Path(__file__).with_name("program.py"))
CHECKS = sorted(re.findall(r"^def (check_\w+)", Path(PROGRAM).read_text(), re.MULTILINE))

IN_TIME_S = 240.0
"""For what hangs: the ranks that a job must end sleep longer, and a busy machine may take a minute to start one."""

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and mpiexec (pip install mpi4py mpich)")


def job(processes: int, what: str, *, leaves_segments: bool = False) -> tuple[int, str]:
    command = ["-m", "commfuse_dp.run", PROGRAM, what]
    return run_job(processes, command, timeout_s=IN_TIME_S, leaves_segments=leaves_segments)


def checked(processes: int) -> dict[str, str]:
    """Check -> what was wrong; "exit": of the job itself."""
    code, output = job(processes, "checks")
    print(output)
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    assert found is not None, output[-6000:]
    result: dict[str, str] = json.loads(found.group(1))
    result["exit"] = "" if code == 0 else f"the job ended with {code}:\n{output[-6000:]}"
    return result


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return checked(4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHECKS, "exit"])
def test_four_ranks(outcomes: dict[str, str], name: str) -> None:
    text = outcomes.get(name, "not run: an earlier check failed")
    if text:
        pytest.fail(text, pytrace=False)


def test_two_ranks() -> None:
    """What a job is told, and that it trains."""
    found = checked(2)
    assert len(found) == 3 and not any(found.values()), found


def _gone(output: str, processes: int) -> None:
    pids = [int(pid) for pid in re.findall(r"rank \d pid (\d+)", output)]
    assert len(pids) == processes, output
    left = pids
    limit = time.monotonic() + 60.0
    while left and time.monotonic() < limit:
        left = [pid for pid in left if os.path.exists(f"/proc/{pid}") and not _is_zombie(pid)]
        time.sleep(0.05)
    assert not left, f"processes {left} outlived the job:\n{output}"


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job() -> None:
    """Without MPI_Abort, ranks 0 and 1 would wait in MPI_Finalize for rank 2, which knows of nothing."""
    code, output = job(3, "raise")
    assert code != 0
    assert "ValueError: on purpose" in output, output
    lost = re.search(r"PeerLostError: rank 0: rank 1 .* has closed its transport mpi", output)
    assert lost is not None, output
    _gone(output, 3)


@pytest.mark.slow
def test_a_rank_that_exits_with_a_status_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nfrom tests.support.mpi import tell_segments\ntell_segments()\n"
        "print('rank', os.environ['RANK'], 'has started', flush=True)\n"
        "if os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n"
    )
    code, output = run_job(2, ["-m", "commfuse_dp.run", str(script)], timeout_s=IN_TIME_S, leaves_segments=False)
    assert code != 0 and "rank 1 has started" in output, output


@pytest.mark.slow
def test_a_killed_rank_ends_the_job() -> None:
    """That is the launcher's doing; ours is that no process stays."""
    code, output = job(2, "die", leaves_segments=True)
    assert code != 0
    _gone(output, 2)


@pytest.mark.slow
def test_a_stuck_rank_is_named_and_the_job_ends() -> None:
    code, output = job(2, "stop")
    assert code != 0
    assert "DeadlineError: rank 0 waited 1 s for rank 1: to send Tag(" in output, output
    _gone(output, 2)
