"""benchmarks/tensor_parallel.py, in small: all variants compute the same (the benchmark compares), and what it stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tensor_parallel
from tests.support.links import needs_link

SMALL = ["--tokens", "64", "--width", "32", "--hidden", "64", "--heads", "4", "--link", "none", "--transport", "shm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "passes", "variants"),
    [
        ("mlp", "forward", "compute,vanilla,slicing-2,commfuse,dtensor"),
        ("attention", "forward", "vanilla,slicing-4,commfuse-row,commfuse,dtensor"),
        ("block", "both", "compute,vanilla,commfuse,commfuse-gathered,dtensor"),
    ],
)
def test_variants_compute_the_same(op: str, passes: str, variants: str, tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    arguments = ["--op", op, "--pass", passes, "--variants", variants, "--rounds", "2", "--steps", "1", "--json", str(target)]
    assert tensor_parallel.main([*SMALL, *arguments]) == 0
    (case,) = json.loads(target.read_text())["cases"]
    rows = case["summary"]["variants"]
    assert list(rows) == variants.split(",")
    assert all(row["step_ms"]["p50"] > 0 for row in rows.values())
    assert rows["commfuse"]["exposed_ms"] is not None and rows["dtensor"]["exposed_ms"] is None
    assert "| commfuse |" in target.with_suffix(".md").read_text()


@pytest.mark.slow
@needs_link
def test_a_link_is_chosen_by_what_vanilla_waits_for(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    shape = ["--width", "512", "--hidden", "512", "--heads", "4", "--sleep", "4", "--burst", str(1 << 18)]
    arguments = ["--link", "0.5x", "--variants", "vanilla,commfuse", "--rounds", "1", "--steps", "1", "--warmup", "1"]
    arguments += ["--congestion", "reno", *shape, "--json", str(target)]
    assert tensor_parallel.main([*arguments, "--tokens", "512"]) == 0
    (case,) = json.loads(target.read_text())["cases"]
    assert case["link"]["rate_gbit"] > 0 and case["link"]["congestion"] == "reno" and case["link"]["burst"] == 1 << 18
    assert "TCP with reno" in target.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_step_of_tensor_and_data_parallelism(tmp_path: Path) -> None:
    """Computed, so that losses are compared; asleep, so that the link can be chosen and what sleeps is known."""
    target = tmp_path / "record.json"
    grid = ["--op", "llama", "--world-size", "4", "--dp", "2", "--vocabulary", "32", "--json", str(target)]
    grid += ["--rounds", "1", "--steps", "1"]
    assert tensor_parallel.main([*SMALL, *grid]) == 0
    (case,) = json.loads(target.read_text())["cases"]
    rows = case["summary"]["variants"]
    assert list(rows) == ["compute", "dtensor", "dtensor-keep", "commfuse", "commfuse-keep"]
    assert {"column", "row"} <= set(rows["commfuse"]["notes"]["paths"])
    assert rows["commfuse"]["first_loss"] > rows["commfuse"]["last_loss"] > 0

    variants = ["--variants", "dtensor,commfuse", "--sleep", "1"]
    assert tensor_parallel.main([*SMALL, *grid, *variants]) == 0
    (case,) = json.loads(target.read_text())["cases"]
    one, other = case["summary"]["variants"].values()
    assert 0 < one["notes"]["slept_ms"] == pytest.approx(other["notes"]["slept_ms"])
    assert one["step_ms"]["p50"] > one["notes"]["slept_ms"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "vanila"], "vanilla"),
        (["--pass", "both", "--variants", "slicing-2"], "forward only"),
        (["--tokens", "63"], "divisible"),
        (["--link", "0x"], "above 0"),
        (["--link", "0.5x"], "less --burst"),
        (["--heads", "3"], "divisible"),
        (["--dp", "2"], "llama"),
        (["--op", "llama", "--dp", "2"], "two or more"),
        (["--op", "llama", "--plan", "mixtral", "--link", "1.0x"], "takes a rate"),
        (["--op", "llama", "--vocabulary", "33"], "vocabulary"),
        (["--sleep", "0"], "above 0"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tensor_parallel.main([*SMALL, *arguments]) == 1
    assert words in capsys.readouterr().err
