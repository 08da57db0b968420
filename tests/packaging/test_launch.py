"""The launcher: who died is named, nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commfuse_dp import ports
from commfuse_dp.errors import CommFuseError
from commfuse_dp.launch import ranks as launch
from commfuse_dp.launch.ranks import RankDied, Ranks, RanksLate
from commfuse_dp.ports import check_port, free_port

SLEEP = "import time; print('up', flush=True); time.sleep(120)"


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pid: int, seconds: float = 60.0) -> bool:
    limit = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    return not is_alive(pid)


def test_lines_of_all_ranks_and_their_environment() -> None:
    code = "import os; print(os.environ['RANK'], os.environ['X']); print('second')"
    with Ranks([program(code)] * 2, [{"RANK": str(r), "X": "y"} for r in range(2)]) as ranks:
        lines = list(ranks.lines())
    for rank in range(2):
        assert [line.text for line in lines if line.rank == rank] == [f"{rank} y", "second"]


def test_a_rank_that_fails_is_named_with_its_last_lines_and_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)  # what rank 0 does with it is nothing
    bad = "import sys; [print('line', i, file=sys.stderr) for i in range(40)]; sys.exit('the reason')"
    with Ranks([program(SLEEP), program(bad)], [{}, {}]) as ranks:
        with pytest.raises(RankDied) as caught:
            list(ranks.lines())
        pids = ranks.pids()
    message = str(caught.value)
    assert "rank 1 ended with exit status 1" in message
    assert "the reason" in message and "line 39" in message
    assert "line 3\n" not in message, "the last lines only"
    assert "rank 0" not in message, "rank 0 did nothing wrong"
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("output", ["open", "closed"])
def test_ranks_that_are_late_are_ended(output: str) -> None:
    close = "" if output == "open" else "import os; os.close(1); os.close(2); "
    with Ranks([program(close + "import time; time.sleep(120)")] * 2, [{}, {}]) as ranks:
        with pytest.raises(RanksLate, match="rank 0 was killed by SIGTERM"):
            list(ranks.lines(1.0))
        assert not any(is_alive(pid) for pid in ranks.pids())


def test_a_killed_rank_is_named_before_those_that_failed_because_of_it(tmp_path: Path) -> None:
    last = repr(str(tmp_path / "last"))
    victim = f"import os, signal; open({last}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    mourner = f"import os, sys, time\nwhile not os.path.exists({last}): time.sleep(0.01)\ntime.sleep(1)\nsys.exit('lost')"
    with Ranks([program(mourner), program(victim)], [{}, {}]) as ranks, pytest.raises(RankDied) as caught:
        list(ranks.lines())
    message = str(caught.value)
    assert message.startswith("rank 1 was killed by SIGKILL")
    assert "rank 0 ended with exit status 1" in message and "lost" in message


def test_ranks_that_ignore_sigterm_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.3)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(120)"
    with Ranks([program(stubborn)], [{}]) as ranks:
        assert next(ranks.lines()).text == "up"
        (pid,) = ranks.pids()
    assert not is_alive(pid)


def test_a_command_that_does_not_exist_leaves_no_rank_behind() -> None:
    started: list[int] = []
    original = subprocess.Popen.__init__

    def remember(self: subprocess.Popen, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        started.append(self.pid)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr(subprocess.Popen, "__init__", remember)
        Ranks([program(SLEEP), ["/no/such/program"]], [{}, {}])
    assert started and not is_alive(started[0])


PARENT = """
import sys
from commfuse_dp.launch.ranks import Ranks
child = (
    "from commfuse_dp.launch.ranks import die_with_parent; import os, time; die_with_parent();"
    "print(os.getpid(), flush=True); time.sleep(120)"
)
with Ranks([[sys.executable, "-c", child]] * 2, [{}, {}]) as ranks:
    for line in ranks.lines():
        print(line.text, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen(program(PARENT), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(is_alive(pid) for pid in pids)
    os.kill(parent.pid, number)
    parent.wait(60)
    assert all(wait_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("main", "status", "error"),
    [
        ("lambda: None", 0, ""),
        ("lambda: 3", 3, ""),
        ("lambda: exit(4)", 4, ""),
        ("lambda: 1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_rank_ends_without_the_interpreters_finalization(main: str, status: int, error: str) -> None:
    """Else threads of gloo that outlive its group abort the process now and then."""
    text = f"""
import atexit
from commfuse_dp.launch.ranks import run_as_rank
atexit.register(print, "finalized")
print("printed", end="")
run_as_rank({main})
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(program(text), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        printed, said = rank.stdout.read(), rank.stderr.read()  # not `communicate`, which ends its input first
        assert rank.wait() == status
    assert printed == "printed"
    assert said.strip().endswith(error) and (error or not said)


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CommFuseError, match=rf"port {port} cannot be used .*--port"):
            check_port(port)
    free = free_port()
    check_port(free)


def test_a_free_port_is_none_that_the_kernel_gives_to_others(monkeypatch, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = server.getsockname()[1]
    first, last = ports._ephemeral()
    assert first <= given <= last
    assert not any(first <= free_port() <= last for _ in range(200))
    narrow = tmp_path / "range"
    monkeypatch.setattr(ports, "_EPHEMERAL", narrow)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        narrow.write_text(f"10000\t{taken - 1}\n")
        monkeypatch.setattr(ports, "_LAST", taken)  # one is left, and somebody has it
        assert free_port() != taken
    narrow.write_text("1024\t65535\n")  # none is left
    check_port(free_port())
