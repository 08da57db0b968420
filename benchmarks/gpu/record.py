"""The record of a whole check: JSON for machines, a page for people."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Outcome, Target
from benchmarks.report import conditions

PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "numpy", "pydantic", "nvidia-nccl-cu13", "nvidia-cublas")


def about(command: str) -> dict[str, Any]:
    """Device, driver, versions, commit: what a reader needs to judge or repeat the run."""
    import torch

    found = conditions(command)
    found["host"] = {"processor": found.pop("device"), "cores": found.pop("cores")}
    found.pop("congestion_control", None)
    found["device"] = "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / (1 << 30), 1),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    found["packages"] = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    found["platform"] = platform.platform()
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def slug(name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def as_json(facts: dict[str, Any], outcomes: Sequence[Outcome], problems: Sequence[str], date: str) -> dict[str, Any]:
    return {
        "date": date,
        "ok": not problems and not any(outcome.failures for outcome in outcomes),
        "conditions": facts,
        "problems": list(problems),
        "targets_met": sum(target.met for outcome in outcomes for target in outcome.targets),
        "targets": sum(len(outcome.targets) for outcome in outcomes),
        "parts": [asdict(outcome) for outcome in outcomes],
    }


def markdown(facts: dict[str, Any], outcomes: Sequence[Outcome], problems: Sequence[str], date: str) -> str:
    """One page: verdict, targets, tables, what failed, what was skipped, conditions."""
    failures = [f"{outcome.part}: {text}" for outcome in outcomes for text in outcome.failures]
    verdict = "all that ran is right" if not failures and not problems else f"{len(failures) + len(problems)} things are wrong"
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    lines = [
        f"# GPU check, {facts['device']}: {date}",
        "",
        f"**{verdict[0].upper()}{verdict[1:]}.** Driver, clock and power limit: {facts.get('driver')}; "
        f"CUDA {facts.get('cuda')}, {packages}; Python {facts['python']}, {facts['platform']}; commit {facts['commit']}.",
        "",
        f"    {facts['command']}",
        "",
        "Times by events, medians (20th to 80th percentile), variants taking turns, L2 flushed before each run, random data; "
        "bfloat16. Copy bandwidth counts bytes read and written, in the same run.",
    ]
    targets = [target for outcome in outcomes for target in outcome.targets]
    if targets:
        lines += ["", "| target | measured | wanted | met |", "| --- | --- | --- | --- |", *map(_target_line, targets)]
    for outcome in outcomes:
        lines += _part_lines(outcome)
    if problems:
        lines += ["", "## Not done", "", *(f"* {text}" for text in problems)]
    if failures:
        lines += ["", "## Wrong", "", *(f"* {text}" for text in failures)]
    skipped = [f"{outcome.part}: {text}" for outcome in outcomes for text in outcome.skipped]
    if skipped:
        lines += ["", "## Skipped", "", *(f"* {text}" for text in skipped)]
    return "\n".join(lines) + "\n"


def _target_line(target: Target) -> str:
    sign = ">=" if target.at_least else "<="
    digits = 0 if target.unit == "us" else 3
    wanted = f"{sign} {target.limit:g} {target.unit}"
    return f"| {target.name} | {target.value:.{digits}f} {target.unit} | {wanted} | {'yes' if target.met else '**no**'} |"


def _part_lines(outcome: Outcome) -> list[str]:
    state = "" if outcome.finished else ", not finished"
    lines = ["", f"## {outcome.part} ({outcome.seconds:.0f} s{state})", ""]
    if outcome.notes:
        lines += ["; ".join(f"{name} {_number(value)}" for name, value in outcome.notes.items()) + ".", ""]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in outcome.rows:
        by_kind.setdefault(row["kind"], []).append(row)
    for kind, rows in by_kind.items():
        if kind == "gemm":
            good = sum(row["ok"] for row in rows)
            worst = max((row["error"] / row["allowed"] for row in rows if row.get("error") is not None), default=0.0)
            lines.append(f"{good} of {len(rows)} products right against float64; largest error {worst:.2f} of what is allowed.")
            lines.append("")
        else:
            lines += [f"{kind}:", "", *_table(rows), ""]
    if not outcome.rows:
        lines.append("No rows.")
    return lines


_HIDDEN = ("kind", "report", "tail", "failed", "copy_bytes", "doubtful")


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _HIDDEN]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for row in rows:
        lines.append("| " + " | ".join(_number(row.get(name, "")) for name in names) + " |")
    return lines


def _number(value: Any) -> str:
    if isinstance(value, dict):
        if "p20" in value:
            return f"{value['p50']:.3g} ({value['p20']:.3g}-{value['p80']:.3g})"
        return ", ".join(f"{name} {_number(inner)}" for name, inner in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def write_somewhere(
    folder: Path, facts: dict[str, Any], outcomes: Sequence[Outcome], problems: Sequence[str], date: str
) -> list[Path]:
    """As `write`; where the folder cannot be written to, into a fresh temporary one: the run is over and must not be lost."""
    try:
        return write(folder, facts, outcomes, problems, date)
    except OSError as error:
        print(f"{folder} cannot be written to ({error})")
        return write(Path(tempfile.mkdtemp(prefix="commfuse-gpu-check-")), facts, outcomes, problems, date)


def write(folder: Path, facts: dict[str, Any], outcomes: Sequence[Outcome], problems: Sequence[str], date: str) -> list[Path]:
    """`<date>_<device>.json` and `.md`; a second run of the day gets a number."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{date}_{slug(facts['device'])}", 1
    while (folder / f"{stem}.json").exists():
        number += 1
        stem = f"{date}_{slug(facts['device'])}_{number}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(as_json(facts, outcomes, problems, date), indent=1) + "\n")
    paths[1].write_text(markdown(facts, outcomes, problems, date))
    return paths
