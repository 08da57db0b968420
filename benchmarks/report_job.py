"""Figures of a job that torchrun started: tokens a second, memory, utilisation; as JSON and as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import models_llama
from benchmarks.case import Case, CaseResult, VariantRecord
from benchmarks.report import spread, spread_text, step_seconds

Summary = dict[str, Any]
_BASES = ("fsdp2-best", "fsdp2")  # what the others are compared with: the first that ran


def extend(summary: Summary, result: CaseResult, case: Case) -> None:
    """Add a job's figures to `report.summarize`'s, in place. A rank is a device."""
    flops = None
    if case.model in models_llama.SHAPES:
        flops = models_llama.flops_per_token(models_llama.SHAPES[case.model], case.sequence)
    times = {record.name: step_seconds(record, case.steps) for record in result.variants}
    base = next((name for name in _BASES if name in times), None)
    for record in result.variants:
        own, row = times[record.name], summary["variants"][record.name]
        row["tokens_per_s"] = spread([case.tokens / t for t in own])
        row["mfu"] = None
        if flops is not None and case.peak_tflops is not None:
            row["mfu"] = spread([flops * case.tokens / t / (case.peak_tflops * 1e12) for t in own])
        if base is not None:
            row["speedup_over_base"] = spread([r / t for r, t in zip(times[base], own, strict=True)])
        row["host_ms"] = _host(record, case.steps)
        row["memory_bytes"] = _memory(record)
    summary["base"] = base
    summary["left_out"] = result.left_out
    summary["flops_per_token"] = flops


def _host(record: VariantRecord, steps: int) -> dict[str, float] | None:
    """Milliseconds a step until the slowest rank's host had enqueued it: near the step's time, the host is what limits it."""
    rounds = []
    for ranks in record.blocks:
        spent = [block.host_s for block in ranks if block.host_s is not None]
        if not spent:
            return None
        rounds.append(1e3 * max(spent) / steps)
    return spread(rounds)


def _memory(record: VariantRecord) -> dict[str, int] | None:
    """`held` between steps and `beside` torch's allocator (both rank 0's; the first variant's includes the communicator that
    most share), `peak` above that in a step (the largest rank's)."""
    peaks = [max(block.peak_bytes or 0 for block in ranks) for ranks in record.blocks]
    if "memory" not in record.notes:
        return None
    held, beside = record.notes["memory"]["allocated_bytes"], record.notes["memory"]["beside_bytes"]
    peak = round(statistics.median(peaks))
    return {"held": held, "beside": beside, "peak": peak, "total": held + beside + peak}


# ---- for people ------------------------------------------------------------------------------------------------------
def lines(case: Summary) -> list[str]:
    """The Markdown of one part of a job."""
    summary, facts = case["summary"], case["job"]
    about = [f"{facts['parameters'] / 1e6:,.1f} M parameters", facts["schedule"]]
    if facts["devices"]:
        about.insert(0, f"{' and '.join(facts['devices'])}, CUDA {facts['cuda']}, NCCL {facts['nccl']}")
    found = [
        "; ".join(about) + ".",
        "",
        f"| variant | step ms | tokens/s a device | MFU | x faster than {summary['base'] or 'n/a'} | host ms | "
        "memory GB: held + beside torch + peak |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in summary["variants"].items():
        memory = row["memory_bytes"]
        cells = [
            name,
            spread_text(row["step_ms"], 1),
            spread_text(row["tokens_per_s"], 0),
            spread_text(row["mfu"], 3),
            spread_text(row.get("speedup_over_base"), 3),
            spread_text(row["host_ms"], 1),
            "n/a" if memory is None else " + ".join(f"{memory[key] / 1e9:.1f}" for key in ("held", "beside", "peak")),
        ]
        found.append("| " + " | ".join(cells) + " |")
    found += [f"\nLeft out: {name}: {reason}." for name, reason in summary["left_out"].items()]
    for name, row in summary["variants"].items():
        notes = row["notes"]
        if "transport" in notes:
            found.append(f"\n{name}: transport {notes['transport']} ({notes['transport_reason']}).")
        for key in ("separate_group", "copy_engines"):
            if key in notes:
                found.append(f"\n{name}: {key.replace('_', ' ')}: {notes[key]}.")
        if "tried" in notes:
            found.append(f"\n{name}: {notes['settings']}.")
    return found + [f"\nWarning: {text}" for text in summary["warnings"]]
