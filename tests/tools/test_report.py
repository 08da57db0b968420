"""Figures from made-up blocks, against values worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import picture, report
from benchmarks.case import Block, Case, CaseResult, VariantRecord, minimum_bytes


def _block(wall_s: float, *, exposed_s: float | None = 0.0, cpu_s: float = 1.0, tx: int = 0, **other: Any) -> Block:
    fields = {"main_cpu_s": cpu_s, "threads_cpu_s": {}, "softirq_s": 0.0, "tx_bytes": tx, "rx_bytes": tx // 2, **other}
    return Block(wall_s=wall_s, exposed_s=exposed_s, cpu_s=cpu_s, **fields)


def _record(name: str, rounds: list[tuple[float, float]], **fields: Any) -> VariantRecord:
    return VariantRecord(name, [[_block(a, **fields), _block(b, **fields)] for a, b in rounds], losses=[2.0, 1.0])


def _result(*records: VariantRecord) -> CaseResult:
    return CaseResult(layer_bytes=80, root_bytes=20, minimum_bytes=100_000_000, variants=list(records))


def test_minimum_bytes() -> None:
    assert minimum_bytes(1000, 0, 2, keep=False) == 1500
    assert minimum_bytes(1000, 0, 4, keep=True) == 1500
    assert minimum_bytes(1000, 300, 2, keep=False) == 1800
    assert minimum_bytes(1000, 300, 1, keep=False) == 0


def test_spread_interpolates() -> None:
    assert report.spread([5.0, 1.0, 2.0, 3.0, 4.0, 0.0]) == {"p20": 1.0, "p50": 2.5, "p80": 4.0}
    assert report.spread([7.0]) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}


def test_slowest_rank_pairs_by_round_and_bound() -> None:
    # Two steps a block. The machine is twice as slow in round 2; paired ratios must not see that.
    result = _result(
        _record("compute", [(1.0, 2.0), (4.0, 2.0), (2.0, 2.0)]),
        _record("fsdp2-best", [(6.0, 1.0), (1.0, 12.0), (6.0, 6.0)], exposed_s=3.0, tx=400_000_000),
        _record("commfuse", [(3.0, 2.0), (6.0, 6.0), (2.0, 3.0)], exposed_s=0.5, tx=220_000_000, cpu_s=1.6),
    )
    wide = report.summarize(result, steps=2, link_bytes_per_s=1e9)  # 0.1 s on the wire: bound = compute
    commfuse = wide["variants"]["commfuse"]
    assert commfuse["step_ms"]["p50"] == 1500.0
    assert commfuse["speedup_over_fsdp2_best"] == {"p20": 2.0, "p50": 2.0, "p80": 2.0}
    assert commfuse["over_bound"] == {"p20": 1.5, "p50": 1.5, "p80": 1.5}
    assert commfuse["exposed_ms"]["p50"] == 250.0
    assert commfuse["bytes_per_step"] == 110_000_000
    assert commfuse["bytes_over_minimum"] == pytest.approx(1.1)
    assert commfuse["cpu"]["network_s"] == pytest.approx(0.3)
    assert wide["bound_ms"]["p50"] == 1000.0

    narrow = report.summarize(result, steps=2, link_bytes_per_s=1e8 / 1.25)  # 1.25 s on the wire
    assert narrow["wire_ms"] == pytest.approx(1250.0)
    # Bounds by round: 1.25, 2.0 (compute), 1.25; commfuse: 1.5, 3.0, 1.5.
    assert narrow["variants"]["commfuse"]["over_bound"]["p50"] == pytest.approx(1.2)
    assert narrow["variants"]["compute"]["over_bound"]["p50"] == pytest.approx(0.8)


def test_without_link_bound_is_compute() -> None:
    figures = report.summarize(_result(_record("compute", [(2.0, 1.0)])), steps=1, link_bytes_per_s=None)
    assert figures["bound_ms"]["p50"] == 2000.0
    assert figures["link_goodput_gbit"] is None


def test_unobservable_exposure_is_not_zero() -> None:
    figures = report.summarize(_result(_record("ddp", [(2.0, 1.0)], exposed_s=None)), steps=1, link_bytes_per_s=None)
    assert figures["variants"]["ddp"]["exposed_ms"] is None


def test_warnings() -> None:
    shortcut = _record("commfuse", [(1.0, 1.0)], tx=1000)
    spinning = _record("compute", [(1.0, 1.0)], threads_cpu_s={"spinner": 0.5})
    noisy = _record("fsdp2", [(1.0, 1.0), (2.0, 1.0), (1.0, 1.5)], tx=150_000_000)
    found = "\n".join(report.summarize(_result(spinning, shortcut), steps=1, link_bytes_per_s=1e9)["warnings"])
    assert re.search(r"commfuse moved only 0\.00 of the minimum", found)
    assert re.search(r"50\.0% of a core.*spinner", found)
    found = "\n".join(report.summarize(_result(noisy), steps=1, link_bytes_per_s=1e9)["warnings"])
    assert re.search(r"fsdp2: p80 is .* not quiet", found)
    untried = VariantRecord("fsdp2-best", [[_block(1.0)]], losses=[2.0, 1.0], notes={"settings": {}, "tried": []})
    found = "\n".join(report.summarize(_result(untried), steps=1, link_bytes_per_s=None)["warnings"])
    assert "fsdp2-best is not stock at its best" in found
    quiet = report.summarize(_result(_record("compute", [(1.0, 1.0)])), steps=1, link_bytes_per_s=1e9)
    assert quiet["warnings"] == []


def test_markdown_and_files_survive_a_round_trip(tmp_path: Path) -> None:
    result = _result(_record("compute", [(1.0, 1.0)]), _record("ddp", [(1.0, 2.0)], exposed_s=None, tx=70_000_000))
    result.save(tmp_path / "result.json")
    assert CaseResult.load(tmp_path / "result.json") == result
    case = Case(variants=("ddp",), prefetch_bytes=7)
    case.save(tmp_path / "case.json")
    assert Case.load(tmp_path / "case.json") == case
    link = {"rate_gbit": 1.0, "mtu": 65000, "burst": 1 << 19, "congestion": "reno"}
    cases = [
        {"title": "narrow", "keep": False, "link": link, "summary": report.summarize(result, steps=1, link_bytes_per_s=1e8)},
        {"title": "one host", "keep": False, "link": None, "summary": report.summarize(result, steps=1, link_bytes_per_s=None)},
    ]
    record = {
        "date": "2026-01-01 00:00 UTC",
        "conditions": report.conditions("python benchmarks/train_step.py"),
        "settings": {**case.__dict__},
        "cases": cases,
        "picture": "x.png",
    }
    text = report.markdown(json.loads(json.dumps(record)))
    assert "| ddp | 2000 (2000-2000) | 2.00 (2.00-2.00) |" in text
    assert "measured goodput 0.800 Gbit/s" in text
    assert picture.draw(cases, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert not picture.draw(cases[:1], tmp_path / "y.png")


def test_the_wait_for_a_rank_behind_is_told_apart() -> None:
    early, late = (
        _block(1.0, exposed_s=0.5, ends=[(0, 9_000_000), (0, 4_000_000)]),
        _block(1.0, ends=[(6_000_000, 9_000_000)] * 2),
    )
    record = VariantRecord("commfuse", [[early, late]], losses=[2.0, 1.0])
    row = report.summarize(_result(record), steps=2, link_bytes_per_s=None)["variants"]["commfuse"]
    assert row["skew_ms"]["p50"] == pytest.approx((6 + 4) / 2)
    unknown = VariantRecord("commfuse", [[early, _block(1.0)]], losses=[2.0, 1.0])
    assert report.summarize(_result(unknown), steps=2, link_bytes_per_s=None)["variants"]["commfuse"]["skew_ms"] is None
