"""The benchmark end to end: what it counts on a link, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import launch, train_step
from benchmarks.case import BenchmarkError, Case
from benchmarks.models import HIDDEN, PAIRS, WIDTH
from benchmarks.worker import check_losses
from commfuse_dp.errors import ConfigError
from commfuse_dp.launch import netns
from tests.support.links import needs_link

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "benchmarks" / "train_step.py")


def _silent(text: str) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [["--keep", "--variants", "zero1,zero1-commfuse,zero2-commfuse-deferred"], ["--variants", "zero3-commfuse"]]
)
def test_variants_of_deepspeed_run(what: list[str], tmp_path: Path) -> None:
    """Also where a rank that was killed while DeepSpeed compiled has left the lock of its op behind."""
    target, lock = tmp_path / "run.json", tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    small = ["--steps", "1", "--rounds", "1", "--warmup", "1", "--search-rounds", "0", "--tokens", "16", "--timeout", "300"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *small, *what, "--json", str(target)],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]  # nothing was compiled
    assert set(json.loads(target.read_text())["cases"][0]["summary"]["variants"]) == set(what[-1].split(","))


@pytest.mark.slow
@needs_link
def test_bytes_on_the_link_are_those_of_the_algorithms(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    small = ["--steps", "1", "--rounds", "1", "--warmup", "1", "--search-rounds", "1", "--tokens", "16"]
    what = ["--variants", "compute,fsdp2,ddp", "--link", "2gbit", "--json", str(target), "--quiet"]
    done = subprocess.run([sys.executable, SCRIPT, *small, *what], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    case = json.loads(target.read_text())["cases"][0]
    rows = case["summary"]["variants"]
    # gloo's reduce-scatter is an all-reduce: 2 + 2 halves where the minimum is 2 + 1; DDP's all-reduce is 2.
    assert rows["fsdp2"]["bytes_over_minimum"] == pytest.approx(4 / 3, rel=0.03)
    assert rows["compute"]["bytes_over_minimum"] < 0.001
    assert rows["fsdp2"]["exposed_ms"]["p50"] > 0.5 * case["summary"]["wire_ms"]
    assert rows["fsdp2"]["step_ms"]["p50"] > rows["compute"]["step_ms"]["p50"]
    assert 0.5 < case["summary"]["link_goodput_gbit"] < 2.05  # a busy machine does not fill the link
    assert rows["ddp"]["bytes_over_minimum"] == pytest.approx(2 / 3, rel=0.03)
    assert rows["ddp"]["notes"]["tried"][0]["bucket_mb"] == 25
    assert target.with_suffix(".md").read_text() == done.stdout[:-1]


@pytest.mark.slow
def test_products_sleep_as_long_as_a_device_of_that_speed_computes(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    small = ["--steps", "2", "--rounds", "1", "--warmup", "1", "--tokens", "16", "--world-size", "3"]
    what = ["--sleep", "20", "--variants", "compute,commfuse", "--json", str(target), "--quiet"]
    done = subprocess.run([sys.executable, SCRIPT, *small, *what], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "compute replaced by sleeping** (20 GFLOP/s" in done.stdout
    multiplied = 16 * WIDTH * HIDDEN * 2 * PAIRS  # in a pass; no dgrad of the first layer
    least_ms = 1e3 * 2 * (3 * multiplied - 16 * WIDTH * HIDDEN) / 20e9
    for name, row in json.loads(target.read_text())["cases"][0]["summary"]["variants"].items():
        assert row["step_ms"]["p50"] > 0.99 * least_ms, (name, row["step_ms"])  # a sleep that was too long shortens the next


# The script with ranks that only say that they run, or with its own, which import torch first.
STAND_IN = """
import sys
from benchmarks import launch, train_step, worker
rank = "import sys, time; print(sys.argv[1], flush=True); time.sleep(300)"
launch.python_module = lambda name: [sys.executable, "-c", rank, worker.PROGRESS + "round 1/5000"]
sys.exit(train_step.main(sys.argv[1:]))
"""


@needs_link
@pytest.mark.slow
@pytest.mark.parametrize("own_ranks", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(number: int, own_ranks: bool) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            *([SCRIPT] if own_ranks else ["-c", STAND_IN]),
            "--variants",
            "compute",
            "--link",
            "1gbit",
            "--rounds",
            "5000",
            "--tokens",
            "8",
            "--steps",
            "1",
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("round 1/"):
            break
    owned = [name for name in os.listdir("/run/netns") if name.startswith(f"commfuse-{process.pid}-")]
    assert len(owned) == 2
    ranks = _children(process.pid)
    assert len(ranks) == 2
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode in (130, 128 + number)
    assert not [name for name in os.listdir("/run/netns") if name in owned]
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import os, sys; sys.exit('out of paper' if os.environ['RANK'] == '1' else 0)",
            r"rank 1 ended with exit status 1(?s:.*)out of paper",
        ),
        (
            "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)",
            r"rank 1 was killed by SIGKILL",
        ),
        ("pass", r"stored no result"),
    ],
)
def test_dead_rank_is_named(program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commfuse_dp.launch.ranks._GRACE_S", 0.3)  # the other rank sleeps
    with pytest.raises(BenchmarkError, match=words):
        launch.run_case(Case(), None, timeout_s=60, say=_silent, program=[sys.executable, "-c", program])


def test_timeout_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match=r"not done after 1 s"):
        launch.run_case(Case(), None, timeout_s=1, say=_silent, program=[sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "fast"], "link rate 'fast'"),
        (["--link", "0x"], "factor above 0"),
        (["--link", "1x", "--world-size", "1"], "at least two ranks"),
        (["--variants", "fsdp3"], "fsdp3"),
        (["--sleep", "0"], "above 0"),
        (["--variants", "ddp,ddp"], "at most once"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "run_case", lambda *a, **k: pytest.fail("started"))
    assert train_step.main(arguments) == 1
    assert words in capsys.readouterr().err


def test_link_without_root(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert train_step.main(["--link", "1gbit"]) == 1
    assert "sudo" in capsys.readouterr().err


def test_relative_rates() -> None:
    calibration = train_step.Calibration(compute_s=0.5, layer_bytes=100_000_000, root_bytes=0)
    # 150 MB a step in 1.5 x 0.5 s: 200 MB/s.
    assert netns.parse_rate(calibration.rate(1.5, Case(world_size=2))) == 1_600_000_000
    assert netns.parse_rate(calibration.rate(0.5, Case(world_size=2, keep=True))) == 3_200_000_000


class _Trained:
    def __init__(self, name: str, losses: list[float]) -> None:
        self.name, self.losses = name, [torch.tensor(loss) for loss in losses]
        self.notes: dict[str, float] = {}


def test_variants_must_train_alike() -> None:
    good = _Trained("fsdp2", [2.0, 1.5])
    check_losses([good, _Trained("ddp", [2.0, 1.5001])], 0)  # type: ignore[list-item]
    for losses in ([2.0, 1.6], [2.0, float("nan")]):
        with pytest.raises(BenchmarkError, match="does not train like fsdp2"):
            check_losses([good, _Trained("commfuse", losses)], 0)  # type: ignore[list-item]


def test_unknown_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        train_step._case(train_step._parse(["--variants", ""]))
