"""The demo's parts that need no ranks: corpus, batches, figures, table, options."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from commfuse_dp.examples.demo import corpus, load, worker
from commfuse_dp.examples.demo import run as demo_run
from commfuse_dp.examples.demo.corpus import TRAIN, VALIDATION, Batches, is_held_out, write_corpus
from commfuse_dp.examples.demo.model import ByteGPT, next_byte_loss
from commfuse_dp.examples.demo.results import summarise, write_json
from commfuse_dp.examples.demo.settings import DemoSettings
from commfuse_dp.examples.demo.view import Progression, result_table, sparkline
from rich.console import Console
from typer.testing import CliRunner

from commfuse_dp.cli import main
from commfuse_dp.config import CommFuseConfig
from commfuse_dp.errors import CommFuseError
from commfuse_dp.launch import netns

SETTINGS = DemoSettings(
    corpus="", result="", steps=4, block=2, world_size=2, transport="auto", order="pairwise", device="cpu", seed=1, threads=1,
    started_at_s=0.0, budget_s=90.0, warmup=1,
)  # fmt: skip


# ---- text ----------------------------------------------------------------------------------------------------------------
def library(root: Path) -> dict[str, bytes]:
    files = {f"pkg/module{i}.py": f"x{i} = {i}\n".encode() for i in range(60)}
    skipped = {"site-packages/other.py": b"no", "pkg/__pycache__/c.py": b"no", "pkg/data.txt": b"no"}
    for name, text in {**files, **skipped}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return files


def test_corpus_is_all_library_source_split_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MINIMUM_BYTES", 1)
    files = library(tmp_path / "lib")
    outs = []
    for name in ("a", "b"):
        out = tmp_path / name
        out.mkdir()
        info = write_corpus(out, tmp_path / "lib")
        outs.append(((out / TRAIN).read_bytes(), (out / VALIDATION).read_bytes(), info))
    assert outs[0] == outs[1], "the same text every time"
    train, validation, info = outs[0]
    held = {name for name in files if is_held_out(name)}
    assert 0 < len(held) < len(files) // 4
    assert sorted(validation.split(b"\0")[:-1]) == sorted(files[name] for name in held)
    assert sorted(train.split(b"\0")[:-1]) == sorted(text for name, text in files.items() if name not in held)
    assert info.train_files + info.validation_files == len(files)
    assert info.train_bytes == len(train)


def test_a_library_without_source_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CommFuseError, match="not zipped or stripped"):
        write_corpus(tmp_path, tmp_path / "nothing")


def test_batches_are_windows_of_the_text_and_differ_by_rank_and_number(tmp_path: Path) -> None:
    text = bytes(range(256)) * 4
    (tmp_path / "t").write_bytes(text)
    make = [Batches(tmp_path / "t", context=16, batch=3, rank=rank, world_size=2, seed=5) for rank in (0, 1)]
    inputs, targets = make[0](7)
    assert inputs.shape == targets.shape == (3, 16) and inputs.dtype == torch.int64
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert bytes([*row, target[-1]]) in text
        assert row[1:] == target[:-1]
    assert torch.equal(make[0](7)[0], inputs), "the same number gives the same batch"
    assert not torch.equal(make[0](8)[0], inputs)
    assert not torch.equal(make[1](7)[0], inputs)


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"short")
    with pytest.raises(CommFuseError, match="too few"):
        Batches(tmp_path / "t", context=16, batch=1, rank=0, world_size=1, seed=0)


def test_model_starts_at_the_loss_of_a_guess_and_is_causal() -> None:
    torch.manual_seed(0)
    model = ByteGPT(width=32, layers=2, heads=4, context=16)
    text = torch.randint(0, 256, (2, 17))
    assert next_byte_loss(model, text[:, :-1], text[:, 1:]).item() == pytest.approx(5.545, abs=0.15)  # ln 256
    changed = text.clone()
    changed[:, 10] += 1
    changed %= 256
    assert torch.equal(model(text[:, :10]), model(changed[:, :10]))
    before, after = model(text[:, :16]), model(changed[:, :16])
    assert torch.allclose(before[:, :10], after[:, :10]), "no byte sees a later one"
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_default_model_has_about_25_million_parameters() -> None:
    with torch.device("meta"):
        model = ByteGPT(width=SETTINGS.width, layers=SETTINGS.layers, heads=SETTINGS.heads, context=SETTINGS.context)
    assert 24e6 < sum(p.numel() for p in model.parameters()) < 27e6


# ---- figures -------------------------------------------------------------------------------------------------------------
def raw_results() -> dict[str, Any]:
    def rank(shift: float) -> dict[str, Any]:
        def variant(wall: float, loss: float) -> dict[str, Any]:
            return {
                "losses": [5.0 + shift, 4.0 + loss, 3.0, 2.0],
                "wall_ms": [999.0, wall, wall + 10, wall + 20 + 2 * shift],
                "exposed_ms": [500.0, wall / 10, wall / 10, wall / 10],
                "received": [0, 2000, 2000, 2000],
                "wire": [[2, 4000 + int(shift)], [2, 4200]],
            }

        variants = {"fsdp2": variant(200, 0), "commfuse": variant(100, 1e-5), "compute_only": variant(90, 0)}
        peaks = {"fsdp2": 50 + int(shift), "commfuse": 5}
        return {"variants": variants, "validation": {"fsdp2": 2.0 + shift, "commfuse": 2.0}, "peaks": peaks}

    return {"ranks": [rank(0.0), rank(1.0)], "conditions": "made up", "trained": 3}


READY = {"minimum_bytes": 1900, "transport": "shm", "transport_reason": "one host", "parameters": 123}
CORPUS = corpus.CorpusInfo("/lib", 10, 100, 1, 10, "abc")


def test_summary_takes_the_mean_of_ranks_and_the_median_of_steps_without_warm_up() -> None:
    summary = summarise(raw_results(), READY, SETTINGS, CORPUS)
    assert summary["step_ms"] == {"fsdp2": 210, "commfuse": 110, "compute_only": 100}
    assert summary["exposed_ms"] == {"fsdp2": 20, "commfuse": 10}
    assert summary["ratio_fsdp2_over_commfuse"] == pytest.approx(210 / 110)
    assert summary["ratio_commfuse_over_compute_only"] == pytest.approx(1.1)
    assert summary["loss_max_abs_diff"] == pytest.approx(1e-5)
    assert summary["losses"]["fsdp2"][0] == 5.5
    assert summary["bytes_per_step"] == {"fsdp2": 2000, "commfuse": 2000}
    assert summary["peak_unsharded_bytes"] == {"fsdp2": 51, "commfuse": 5}
    assert summary["validation_loss"] == {"fsdp2": 2.5, "commfuse": 2.0}
    assert {"minimum_bytes_per_step", "transport", "world_size", "seed", "versions"} <= set(summary)
    assert {"torch", "python", "commfuse_dp", "cpu"} == set(summary["versions"])


def test_on_a_link_the_bytes_are_those_of_the_interface() -> None:
    summary = summarise(raw_results(), READY, replace(SETTINGS, interface="cf0", link="1gbit"), CORPUS)
    assert summary["bytes_per_step"]["commfuse"] == (4000 + 4200 + 4001 + 4200) / 8
    assert "interface" in summary["bytes_source"]


def test_stock_on_cuda_has_no_exposed_time_and_still_a_table() -> None:
    summary = summarise(raw_results(), READY, replace(SETTINGS, device="cuda"), CORPUS)
    assert summary["exposed_ms"] == {"fsdp2": None, "commfuse": 10}
    assert "not measured" in rendered(summary)


def rendered(summary: dict[str, Any], width: int = 120) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(result_table(summary))
    return capture.get()


def test_the_table_says_how_much_faster_and_how_equal() -> None:
    text = rendered(summarise(raw_results(), READY, SETTINGS, CORPUS))
    for piece in ("1.91 x as fast", "differ by 1e-05", "210 ms", "110 ms", "10.0 ms (9.1 %)", "1.10 x", "2.5000"):
        assert piece in text, piece


def test_the_table_does_not_call_a_slower_run_faster() -> None:
    summary = summarise(raw_results(), READY, SETTINGS, CORPUS)
    summary["ratio_fsdp2_over_commfuse"] = 0.8
    assert "1.25 x slower" in rendered(summary)


def test_sparkline() -> None:
    assert sparkline([3, 2, 1]) == "█▅▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=24)) == 24


STEP = {"event": "step", "loss": 1.0, "wall_ms": 100.0, "exposed_ms": 0.0}


def turn(progress: Progression, done: int) -> None:
    for name, wall in (("fsdp2", 200.0), ("commfuse", 100.0), ("compute_only", 90.0)):
        step = {**STEP, "variant": name, "step": done, "loss": 5.0 - done, "wall_ms": wall, "exposed_ms": wall / 10}
        progress.take(step)
    progress.take({"event": "turn", "steps": done})


def test_progress_in_a_log_is_one_aligned_line_per_turn_under_one_head() -> None:
    console = Console(width=40, force_terminal=False)
    with console.capture() as capture, Progression(console, replace(SETTINGS, started_at_s=time.monotonic())) as progress:
        turn(progress, 1)
        turn(progress, 2)
        progress.take({"event": "stage", "text": "validating"})
        progress._silent_since -= 60
        for number in (3, 4):
            progress.take({**STEP, "variant": "commfuse", "step": number})
    names, heads, first, second, stage, alive = capture.get().splitlines()
    assert [column.strip() for column in names.split("|")] == ["", "FSDP2 (stock)", "CommFuse", "compute only"]
    assert {tuple(i for i, c in enumerate(line) if c == "|") for line in (names, heads, first, second)} == {(15, 52, 89)}
    assert [column.split() for column in second.split("|")] == [
        ["0:00", "2/4"],
        ["3.0000", f"{SETTINGS.tokens / 0.2:.0f}", "200", "20"],
        ["3.0000", f"{SETTINGS.tokens / 0.1:.0f}", "100", "10"],
        ["90"],
    ]
    assert stage.split() == ["0:00", "validating"]
    assert alive.split() == ["0:00", "CommFuse:", "step", "3", "trained"], "a sign of life after a silence, and one only"


def test_progress_on_a_terminal_shows_both_variants_and_how_far_it_is() -> None:
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as capture, Progression(console, replace(SETTINGS, started_at_s=time.monotonic())) as progress:
        turn(progress, 1)
        turn(progress, 2)
    shown = capture.get()
    assert "step 2 of 4" in shown and "of at most 1:30" in shown
    (row,) = [line for line in shown.splitlines() if "CommFuse" in line][-1:]
    assert row.split()[1:5] == ["3.0000", f"{SETTINGS.tokens / 0.1:.0f}", "100", "10"]
    assert max(map(len, shown.splitlines())) <= 90, "nothing wraps on a terminal of 80 columns (control characters aside)"


# ---- time ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("done", "spare_s", "expected"),
    [
        (0, 100.0, 1),  # shows what a step costs
        (1, -5.0, 1),  # a warm one, however late it is
        (1, 100.0, 1),  # the rest of the warm-up
        (2, -5.0, 0),
        (4, 0.9, 0),  # no step fits
        (4, 2.5, 2),
        (4, 100.0, 3),  # a block
        (9, 100.0, 1),  # what is left
        (10, 100.0, 0),
    ],
)
def test_a_turn_is_as_long_as_the_time_allows(
    done: int, spare_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.dist, "broadcast", lambda tensor, source: None)
    monkeypatch.setattr(worker.time, "monotonic", lambda: 1000.0)
    rank = object.__new__(worker.DemoRank)
    rank.settings = replace(SETTINGS, steps=10, block=3, warmup=2, started_at_s=0.0, budget_s=1007.0 + spare_s)
    rank.trained = done
    monkeypatch.setattr(rank, "_closing_s", lambda: 7.0)
    assert rank._affordable(cost_s=1.0) == expected


def test_other_load_is_what_neither_this_process_nor_its_children_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    cores = len(os.sched_getaffinity(0))
    each = "".join(f"cpu{i} 0 0 0 0\n" for i in range(cores))
    stat.write_text(f"cpu {3 * ticks} {ticks} {2 * ticks} 999999 0 55 55\n{each}intr 5\n")
    assert load._busy_s(stat) == 6.0
    stat.write_text(f"cpu 1 1 1 1\n{each}cpu{cores} 0 0 0 0\n")
    assert load._busy_s(stat) is None, "a host with more cores than are ours"
    assert load._busy_s(tmp_path / "none") is None

    readings = {"_busy_s": [100.0, 116.0], "_own_s": [1.0, 9.0]}
    for name, values in readings.items():
        monkeypatch.setattr(load, name, iter(values).__next__)
    clock = iter([0.0, 4.0])
    monkeypatch.setattr(load.time, "monotonic", clock.__next__)
    assert load.OtherLoad().cores() == 2.0


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


# ---- options -------------------------------------------------------------------------------------------------------------
def run(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, ["demo", *arguments])


def test_help_shows_every_option() -> None:
    result = CliRunner().invoke(main.app, ["demo", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--steps", "--world-size", "--transport", "--order", "--link", "--seed", "--device", "--out"):
        assert option in result.output


def test_choices_are_those_of_the_configuration() -> None:
    fields = CommFuseConfig.model_fields
    # The demo starts its ranks itself, on the CPU; those of MPI are started by its launcher.
    assert {t.value for t in main.Transport} == set(get_args(fields["transport"].annotation)) - {"mpi", "symmetric"}
    assert {o.value for o in main.Order} == set(get_args(fields["order"].annotation))


def test_a_link_without_root_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/bin/{tool}")
    result = run("--link", "1gbit", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "needs root" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--link", "fast"], "1gbit"),
        (["--link", "1gbit", "--transport", "shm"], "share no memory"),
        (["--link", "1gbit", "--world-size", "1"], "at least 2 ranks"),
        (["--link", "50mbit"], "Use a faster link, or --minutes 6"),
        (["--device", "cuda", "--world-size", "64"], "GPUs are visible"),
    ],
)
def test_bad_combinations_are_refused_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netns, "check_requirements", lambda: None)
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert says in result.output
    assert not list(tmp_path.glob("out/*"))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--out", str(tmp_path / "file" / "demo"))
    assert result.exit_code == 1
    assert "cannot be written" in result.output and "--out" in result.output


def test_more_ranks_than_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "_RANK_BYTES", 1 << 50)
    result = run("--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "Lower --world-size" in result.output and not (tmp_path / "out").exists()


def test_the_folders_of_killed_runs_are_swept_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run.tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {owner: f"{demo_run.SCRATCH}{owner}-x1" for owner in (gone.pid, os.getpid(), "other")}
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_text("x")
    demo_run._sweep_scratch()
    assert {p.name for p in tmp_path.iterdir()} == {names[os.getpid()], names["other"]}


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--world-size", "0"], ["--transport", "rdma"], ["--minutes", "0"]])
def test_bad_values_are_refused_by_name(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.output


@pytest.mark.parametrize(
    ("ending", "status", "says"), [(KeyboardInterrupt(), 130, "stopped"), (SystemExit(143), 143, "signal")]
)
def test_a_run_that_is_ended_from_outside_says_so(
    ending: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(**_: Any) -> None:
        raise ending

    monkeypatch.setattr(demo_run, "run_demo", ended)
    result = run()
    assert result.exit_code == status
    assert says in result.output and "all ranks have been ended" in result.output


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run("--port", str(server.getsockname()[1]), "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "cannot be used" in result.output
