"""From what the ranks measured to summary.json; pure Python."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

from commfuse_dp.examples.demo.corpus import CorpusInfo
from commfuse_dp.examples.demo.settings import DemoSettings

FSDP2, COMMFUSE, COMPUTE_ONLY = "fsdp2", "commfuse", "compute_only"
_PAIR = (FSDP2, COMMFUSE)


def summarise(raw: dict[str, Any], ready: dict[str, Any], settings: DemoSettings, corpus: CorpusInfo) -> dict[str, Any]:
    """`raw`: what rank 0 wrote; `ready`: its first event. Times in ms, sizes in bytes, a rank and step each.

    A figure of a step is the mean of the ranks; over the steps the median is taken, without the warm-up.
    """
    ranks = raw["ranks"]
    wall = {name: _timed(ranks, name, "wall_ms", settings.warmup) for name in (*_PAIR, COMPUTE_ONLY)}
    exposed = {name: _timed(ranks, name, "exposed_ms", settings.warmup) for name in _PAIR}
    losses = {name: _mean_of_ranks(ranks, name, "losses") for name in _PAIR}
    step_ms = {name: median(values) for name, values in wall.items()}
    on_wire = bool(settings.interface)
    received = {
        name: _wire_bytes(ranks, name) if on_wire else median(_timed(ranks, name, "received", settings.warmup))
        for name in _PAIR
    }
    on_cpu = settings.device == "cpu"
    return {
        "loss_max_abs_diff": max(abs(a - b) for a, b in zip(losses[FSDP2], losses[COMMFUSE], strict=True)),
        "step_ms": step_ms,
        "step_ms_p20_p80": {name: [_quantile(values, 0.2), _quantile(values, 0.8)] for name, values in wall.items()},
        "exposed_ms": {name: median(exposed[name]) if on_cpu or name == COMMFUSE else None for name in _PAIR},
        "bytes_per_step": received,
        "bytes_source": "received by a rank, read off its network interface"
        if on_wire
        else "payload received by a rank, counted",
        "minimum_bytes_per_step": ready["minimum_bytes"],
        "ratio_fsdp2_over_commfuse": step_ms[FSDP2] / step_ms[COMMFUSE],
        "ratio_commfuse_over_compute_only": step_ms[COMMFUSE] / step_ms[COMPUTE_ONLY],
        "tokens_per_s": {name: settings.tokens / step_ms[name] * 1e3 for name in _PAIR},
        "peak_unsharded_bytes": {name: max(rank["peaks"][name] for rank in ranks) for name in _PAIR},
        "validation_loss": {name: fmean(rank["validation"][name] for rank in ranks) for name in _PAIR},
        "losses": losses,
        "steps_compared": len(losses[FSDP2]),  # the recorded ones too
        "steps_trained": raw["trained"],
        "steps_asked": settings.steps,
        "steps_timed": {name: len(values) for name, values in wall.items()},
        "transport": ready["transport"],
        "transport_reason": ready["transport_reason"],
        "order": settings.order,
        "link": settings.link,
        "world_size": settings.world_size,
        "seed": settings.seed,
        "parameters": ready["parameters"],
        "conditions": raw["conditions"],
        "corpus": asdict(corpus),
        "versions": versions(),
    }


def versions() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "commfuse_dp": metadata.version("commfuse_dp"),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Atomically: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=2) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _mean_of_ranks(ranks: Sequence[dict[str, Any]], name: str, key: str) -> list[float]:
    return [fmean(values) for values in zip(*(rank["variants"][name][key] for rank in ranks), strict=True)]


def _timed(ranks: Sequence[dict[str, Any]], name: str, key: str, warmup: int) -> list[float]:
    values = _mean_of_ranks(ranks, name, key)
    return values[min(warmup, len(values) - 1) :]  # a very short run has nothing but warm-up: then its last step


def _wire_bytes(ranks: Sequence[dict[str, Any]], name: str) -> float:
    """Mean of the ranks, over all blocks."""
    blocks = [block for rank in ranks for block in rank["variants"][name]["wire"]]
    return sum(nbytes for _, nbytes in blocks) / sum(steps for steps, _ in blocks)


def _quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
