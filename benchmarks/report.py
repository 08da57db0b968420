"""From blocks to figures: medians, bound, distance to it, ratio to the best stock variant; as JSON and as Markdown."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import Block, CaseResult, VariantRecord
from commfuse_dp.observe.skew import skew_ns

Summary = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "fsdp2-best"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile (linear interpolation)."""
    ordered = sorted(values)

    def quantile(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"p20": quantile(0.2), "p50": statistics.median(ordered), "p80": quantile(0.8)}


def step_seconds(record: VariantRecord, steps: int) -> list[float]:
    """Seconds per step of every round: the slowest rank's."""
    return [max(block.wall_s for block in ranks) / steps for ranks in record.blocks]


def summarize(result: CaseResult, *, steps: int, link_bytes_per_s: float | None) -> Summary:
    """Figures of one case. `link_bytes_per_s`: measured goodput, None without a link (communication then costs no time).

    The bound of a round is max(compute of the same round, minimum bytes / goodput); distances and ratios are paired by
    round and then summarized, so that drift of the machine cancels.
    """
    by_name = {record.name: record for record in result.variants}
    times = {name: step_seconds(record, steps) for name, record in by_name.items()}
    wire = result.minimum_bytes / link_bytes_per_s if link_bytes_per_s else 0.0
    compute = times.get("compute")
    bounds = [max(spent, wire) for spent in compute] if compute else None
    reference = times.get(REFERENCE)
    rows: dict[str, Summary] = {}
    for name, record in by_name.items():
        own = times[name]
        row: Summary = {"step_ms": spread([1e3 * t for t in own]), "rounds_step_ms": [1e3 * t for t in own]}
        if bounds:
            row["over_bound"] = spread([t / b for t, b in zip(own, bounds, strict=True)])
        if compute:
            row["over_compute"] = spread([t / c for t, c in zip(own, compute, strict=True)])
        if reference:
            row["speedup_over_fsdp2_best"] = spread([r / t for r, t in zip(reference, own, strict=True)])
        stock = times.get(name.split("-")[0]) if name.startswith("zero") else reference
        if stock:
            row["speedup_over_stock"] = spread([r / t for r, t in zip(stock, own, strict=True)])
        row["exposed_ms"] = _exposed(record, steps)
        row["skew_ms"] = _skew(record)
        moved = row["bytes_per_step"] = _bytes(record, steps)
        row["bytes_over_minimum"] = moved / result.minimum_bytes if result.minimum_bytes and moved is not None else None
        row["cpu"] = _cpu(record, by_name.get("compute"), steps)
        row["notes"] = record.notes
        row["first_loss"], row["last_loss"] = record.losses[0], record.losses[-1]
        rows[name] = row
    return {
        "parameter_bytes": result.layer_bytes + result.root_bytes,
        "minimum_bytes_per_step": result.minimum_bytes,
        "link_goodput_gbit": link_bytes_per_s * 8 / 1e9 if link_bytes_per_s else None,
        "wire_ms": 1e3 * wire,
        "bound_ms": spread([1e3 * b for b in bounds]) if bounds else None,
        "variants": rows,
        "warnings": _warnings(by_name, rows, link_bytes_per_s is not None),
    }


def _bytes(record: VariantRecord, steps: int) -> float | None:
    """Of the busiest rank's busier direction, median over rounds; None where nobody counted."""
    rounds = []
    for ranks in record.blocks:
        ways = [way for block in ranks for way in (block.tx_bytes, block.rx_bytes)]
        if None in ways:
            return None
        rounds.append(max(way for way in ways if way is not None) / steps)
    return statistics.median(rounds)


def _exposed(record: VariantRecord, steps: int) -> dict[str, float] | None:
    """Milliseconds per step in which the most delayed rank's compute was blocked."""
    rounds = []
    for ranks in record.blocks:
        blocked = [block.exposed_s for block in ranks if block.exposed_s is not None]
        if not blocked:
            return None
        rounds.append(1e3 * max(blocked) / steps)
    return spread(rounds)


def _skew(record: VariantRecord) -> dict[str, float] | None:
    """Of what `_exposed` has: milliseconds per step in which that rank waited for one that was behind, at most."""
    rounds = []
    for ranks in record.blocks:
        if any(block.exposed_s is None or block.ends is None for block in ranks):
            return None
        delayed = max(range(len(ranks)), key=lambda rank: ranks[rank].exposed_s or 0.0)
        steps = zip(*(block.ends or [] for block in ranks), strict=True)
        rounds.append(statistics.mean(skew_ns(ends)[delayed] for ends in steps) / 1e6)
    return spread(rounds)


def _cpu(record: VariantRecord, compute: VariantRecord | None, steps: int) -> Summary:
    """CPU seconds per step and rank (median over blocks); `network` is what this variant needs beyond compute's.

    Soft interrupts are counted by the kernel for the whole host: their share per rank.
    """

    def per_step(blocks: list[list[Block]], pick: str) -> float:
        return statistics.median(getattr(block, pick) / steps for ranks in blocks for block in ranks)

    names = {name for ranks in record.blocks for block in ranks for name in block.threads_cpu_s}
    every = [block for ranks in record.blocks for block in ranks]
    out: Summary = {
        "process_s": per_step(record.blocks, "cpu_s"),
        "main_thread_s": per_step(record.blocks, "main_cpu_s"),
        "other_threads_s": {
            name: statistics.fmean(block.threads_cpu_s.get(name, 0.0) / steps for block in every) for name in sorted(names)
        },
        "softirq_s": statistics.median(ranks[0].softirq_s / steps / len(ranks) for ranks in record.blocks),
    }
    if compute is not None:
        out["network_s"] = out["process_s"] - per_step(compute.blocks, "cpu_s")
    return out


def _warnings(records: dict[str, VariantRecord], rows: dict[str, Summary], linked: bool) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    for name, row in rows.items():
        share = row["bytes_over_minimum"]
        if linked and name != "compute" and share is not None and share < 0.5:
            found.append(f"{name} moved only {share:.2f} of the minimum bytes over the link: it took another way.")
        if row["notes"].get("tried") == []:
            found.append(f"{name} is not stock at its best: its settings were not searched for (--search-rounds 0).")
    if "compute" in rows:
        idle = sum(rows["compute"]["cpu"]["other_threads_s"].values()) * 1e3 / rows["compute"]["step_ms"]["p50"]
        if idle > 0.02:
            busiest = rows["compute"]["cpu"]["other_threads_s"]
            found.append(
                f"other threads used {idle:.1%} of a core while `compute` ran alone: {busiest}; every variant paid for it."
            )
    for name, row in rows.items():
        times = row["step_ms"]
        if times["p80"] > 1.15 * times["p20"]:
            found.append(f"{name}: p80 is {times['p80'] / times['p20']:.2f} x p20; the machine was not quiet.")
    return found


# ---- conditions ------------------------------------------------------------------------------------------------------
def conditions(command_line: str) -> Summary:
    """What a reader needs to judge or repeat the run."""
    import torch

    return {
        "device": device_name(),
        "cores": _cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "load_average_at_start": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "congestion_control": _first_line(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "commit": _commit(),
        "command": command_line,
    }


def device_name() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_line(path: Path) -> str:
    try:
        return path.read_text().split("\n")[0]
    except OSError:
        return "unknown"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed
    except OSError:
        return "unknown"


# ---- for people ------------------------------------------------------------------------------------------------------
def markdown(record: Summary) -> str:
    """The whole run as one page. `record` is what train_step stores: {"conditions", "settings", "cases": [...]}."""
    from benchmarks import report_job  # which needs this module's figures

    about, settings = record["conditions"], record["settings"]
    lines = [
        f"# Training step, {settings['world_size']} ranks: {record['date']}",
        "",
        f"{about['device']}, {about['cores']} cores; torch {about['torch']}, Python {about['python']}, kernel {about['kernel']}"
        f", the host's TCP {about['congestion_control']}; commit {about['commit']}.",
        "",
        f"    {about['command']}",
        "",
        f"Model {settings['model']}, {settings['tokens']} tokens a rank, {_precision(settings)}, AdamW "
        f"({settings['optimizer']}), seed {settings['seed']}; {_sleeping(settings)}"
        f"{settings['rounds']} rounds of {settings['steps']} steps, "
        f"{'' if settings.get('job') else 'variants alternating in rotated order; '}a step's time is the slowest rank's; "
        "p50 (p20-p80).",
    ]
    for case in record["cases"]:
        lines += ["", f"## {case['title']}", "", *(report_job.lines(case) if "job" in case else _case_lines(case))]
    if record.get("picture"):
        lines += ["", f"![step time over link speed]({record['picture']})"]
    return "\n".join(lines) + "\n"


def _precision(settings: Summary) -> str:
    """Records from before there was a choice are fp32."""
    words = settings.get("precision", "fp32")
    if settings.get("sequence"):
        words += f", sequences of {settings['sequence']}"
    return words + (", activations recomputed" if settings.get("checkpoint_activations") else "")


def _sleeping(settings: Summary) -> str:
    gflops = settings.get("sleep_gflops")
    return f"**compute replaced by sleeping** ({gflops:g} GFLOP/s a rank); " if gflops else ""


def _case_lines(case: Summary) -> list[str]:
    summary, link = case["summary"], case["link"]
    who = "host" if link and link.get("ranks_per_host", 1) > 1 else "rank"
    facts = [f"Minimum {summary['minimum_bytes_per_step'] / 1e6:.1f} MB a step and {who}, each way"]
    if link:
        facts.append(
            f"link {link['rate_gbit']:.3f} Gbit/s (mtu {link['mtu']}, bucket {link['burst'] >> 10} KB, {link['congestion']}), "
            f"measured goodput {summary['link_goodput_gbit']:.3f} Gbit/s both ways at once, so "
            f"{summary['wire_ms']:.0f} ms on the wire"
            + (f"; {link['ranks_per_host']} ranks behind each end" if who == "host" else "")
        )
    if summary["bound_ms"]:
        facts.append(f"bound {spread_text(summary['bound_ms'])} ms")
    lines = [
        "; ".join(facts) + ".",
        "",
        "| variant | step ms | x bound | x compute | x faster than stock at its best | exposed ms | of it for a rank behind | "
        "bytes / minimum | CPU s beyond compute | softirq s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in summary["variants"].items():
        cells = [
            name,
            spread_text(row["step_ms"]),
            spread_text(row.get("over_bound"), 2),
            spread_text(row.get("over_compute"), 2),
            spread_text(row.get("speedup_over_stock"), 2),
            spread_text(row["exposed_ms"]),
            spread_text(row["skew_ms"]),
            "" if row["bytes_over_minimum"] is None else f"{row['bytes_over_minimum']:.2f}",
            f"{row['cpu']['network_s']:.2f}" if "network_s" in row["cpu"] else "n/a",
            f"{row['cpu']['softirq_s']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    chosen = [f"{name}: {row['notes']['settings']}" for name, row in summary["variants"].items() if "tried" in row["notes"]]
    chosen += [
        f"{name}: transport {row['notes']['transport']}, window at most {row['notes']['window_bytes_peak'] / 1e6:.1f} MB"
        for name, row in summary["variants"].items()
        if "transport" in row["notes"]
    ]
    if chosen:
        lines += ["", "Settings found or used: " + "; ".join(chosen) + "."]
    lines += [f"\nWarning: {text}" for text in summary["warnings"]]
    return lines


def spread_text(values: dict[str, float] | None, digits: int = 0) -> str:
    """The median, with the range from p20 to p80."""
    if values is None:
        return "n/a"
    return f"{values['p50']:.{digits}f} ({values['p20']:.{digits}f}-{values['p80']:.{digits}f})"
