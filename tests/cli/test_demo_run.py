"""The demo from end to end on a small model: two ranks, both variants, all files; and a rank killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commfuse_dp.cli.demo import run_demo

SMALL = {"width": 64, "layers": 2, "heads": 4, "context": 32, "validation_batches": 1, "warmup": 1}


def run(out: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "steps": 6, "world_size": 2, "transport": "auto", "order": "pairwise", "link": "none", "seed": 3, "device": "cpu",
        "out": out, "port": 0, "minutes": 2.0, "console": Console(width=110, force_terminal=False), "shape": SMALL,
    }  # fmt: skip
    return run_demo(**{**options, **changes})


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


def test_one_rank_alone_communicates_nothing_and_training_stops_when_the_time_is_used_up(tmp_path: Path) -> None:
    summary = run(tmp_path, world_size=1, steps=400, minutes=0.001)
    assert summary["minimum_bytes_per_step"] == 0
    assert summary["bytes_per_step"] == {"fsdp2": 0, "commfuse": 0}
    assert summary["loss_max_abs_diff"] < 1e-4
    assert summary["steps_trained"] == SMALL["warmup"] + 2, "the fewest that give a figure"
    assert summary["steps_timed"]["fsdp2"] == summary["steps_timed"]["commfuse"] == 2
    assert len(summary["losses"]["fsdp2"]) == len(summary["losses"]["commfuse"])


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return sorted(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("who", ["rank", "parent"])
def test_a_killed_rank_is_named_and_ctrl_c_ends_all(who: str, tmp_path: Path) -> None:
    code = (
        "import sys; from tests.cli.test_demo_run import run; from pathlib import Path\n"
        "try: run(Path(sys.argv[1]), steps=100000)\n"
        "except Exception as error: sys.exit(str(error))\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    for line in parent.stdout:
        if "/100000 |" in line:
            break
    ranks = children(parent.pid)
    assert len(ranks) == 2
    os.kill(ranks[1] if who == "rank" else parent.pid, signal.SIGKILL if who == "rank" else signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode != 0
    if who == "rank":
        assert "rank 1 was killed by SIGKILL" in said
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list(tmp_path.iterdir()), "no half-written result"
