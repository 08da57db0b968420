"""The demo from end to end on a small model: two ranks, both variants, all files; and a rank killed in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commfuse_dp.examples.demo.run import run_demo
from rich.console import Console

from commfuse_dp.launch.ranks import RankDied

SMALL = {"width": 64, "layers": 2, "heads": 4, "context": 32, "validation_batches": 1, "warmup": 1}


def run(out: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "steps": 6, "world_size": 2, "transport": "auto", "order": "pairwise", "link": "none", "seed": 3, "device": "cpu",
        "out": out, "port": 0, "minutes": 2.0, "console": Console(width=110, force_terminal=False), "shape": SMALL,
    }  # fmt: skip
    return run_demo(**{**options, **changes})


@pytest.mark.slow
def test_demo_compares_both_variants_and_writes_its_files(tmp_path: Path) -> None:
    summary = run(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["summary.json", "timeline.png", "trace.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["steps_compared"] == 6 + 3 + 1, "timed steps, recorded ones, and the one that looks at the weights"
    assert summary["loss_max_abs_diff"] < 1e-4
    assert len(set(summary["losses"]["commfuse"])) == 10, "it trains"
    assert summary["validation_loss"]["commfuse"] == pytest.approx(summary["validation_loss"]["fsdp2"], abs=1e-4)
    minimum = summary["minimum_bytes_per_step"]
    assert 0 < summary["bytes_per_step"]["commfuse"] <= 1.03 * minimum
    assert summary["bytes_per_step"]["fsdp2"] > 1.2 * minimum, "gloo's reduce-scatter moves twice the bytes"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"{variant} rank {rank}" for variant in ("FSDP2 (stock)", "FSDP2 + CommFuse") for rank in (0, 1)}


@pytest.mark.slow
def test_one_rank_alone_communicates_nothing_and_training_stops_when_the_time_is_used_up(tmp_path: Path) -> None:
    summary = run(tmp_path, world_size=1, steps=400, minutes=0.001)
    assert summary["minimum_bytes_per_step"] == 0
    assert summary["bytes_per_step"] == {"fsdp2": 0, "commfuse": 0}
    assert summary["loss_max_abs_diff"] < 1e-4
    assert (summary["steps_trained"], summary["steps_asked"]) == (2, 400), "a cold one and a warm one, however late"
    assert summary["steps_timed"]["fsdp2"] == summary["steps_timed"]["commfuse"] == 1
    assert len(summary["losses"]["fsdp2"]) == len(summary["losses"]["commfuse"]) == 2 + 1 + 1


def ranks_of(pid: int) -> list[int]:
    """Pids of the demo's ranks that were started by process `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX" and b"demo.worker" in command:
            found.append(int(stat.parent.name))
    return sorted(found)


def assert_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Log(io.StringIO):
    """Calls `then` when the first steps have been reported."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then: Callable[[], None] | None = then

    def write(self, text: str) -> int:
        if "/100000 |" in text and self._then is not None:
            self._then, then = None, self._then
            then()
        return super().write(text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    ranks: list[int] = []

    def kill_one() -> None:
        ranks.extend(ranks_of(os.getpid()))
        os.kill(ranks[1], signal.SIGKILL)

    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        run(tmp_path, steps=100_000, console=Console(width=110, file=Log(kill_one)))
    assert len(ranks) == 2
    assert_gone(ranks)
    assert not list(tmp_path.iterdir()), "no half-written result"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "commfuse_dp.cli.main", "demo", "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    for line in parent.stdout:
        if "model:" in line:
            break
    ranks = ranks_of(parent.pid)
    assert len(ranks) == 2
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert "stopped" in said and "Traceback" not in said
    assert_gone(ranks)
    assert not list(tmp_path.iterdir()), "no half-written result"
    assert not list(Path(tempfile.gettempdir()).glob(f"commfuse-demo-{parent.pid}-*"))
