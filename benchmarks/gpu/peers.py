"""Part (e): CommFuse's gather and scatter of one linear against torch's symm_mem fused ops, in processes that share the GPU.

Two processes on one GPU take turns on it, so the times stand for nothing but each other. Where torch's ops refuse (they are
made for GPUs of their own), that is recorded and not a failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Options, Reporter, run_part
from benchmarks.gpu.ranks.launching import run_ranks

SIZE = 2
# bfloat16 products of unit-variance operands over 4096 to 8192 terms, rounded once: half a unit in the last place of the
# largest result, and torch's partial sums, rounded to bfloat16 before they are added.
ALLOWED = {"gather": 0.05, "scatter": 4.0}


def run(report: Reporter, options: Options) -> None:
    """CommFuse against torch's fused_all_gather_matmul and fused_matmul_reduce_scatter."""
    if options.device != "cuda":
        report.skip("symmetric memory needs a GPU")
        return

    def collect(folder: Path) -> list[dict[str, Any]]:
        return json.loads(Path(folder, "peers.json").read_text())

    environment = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for side, share in (("commfuse", 0.5), ("torch", 1.0)):  # in processes of their own: torch's may hang or crash
        arguments = ["1" if options.small else "0", side]
        limit = max(share * (report.clock.left - 2.0), 5.0)
        try:
            ranks = run_ranks("benchmarks.gpu.ranks.peers", SIZE, arguments, limit_s=limit, extra=environment, collect=collect)
        except RuntimeError as error:
            if side == "commfuse":
                raise
            report.skip(f"torch's fused ops do not run here: {str(error).strip().splitlines()[0]}")
            continue
        compare(report, ranks)


def compare(report: Reporter, ranks: list[dict[str, Any]]) -> None:
    """Rows of what all ranks found."""
    for name in ranks[0]:
        results = [rank[name] for rank in ranks]
        if "problem" in results[0]:
            report.row(kind="peer", name=name, problem=results[0]["problem"])
            if name.endswith("torch"):
                report.skip(f"{name}: {results[0]['problem']}")
            else:
                report.fail(f"{name}: {results[0]['problem']}")
            continue
        worst = max(result["error"] for result in results)
        report.row(kind="peer", name=name, ms=max(result["ms"] for result in results), error=worst)
        if name.endswith("commfuse") and not worst <= ALLOWED[name.split("_")[0]]:
            report.fail(f"{name}: error {worst:.3g} against float64")


if __name__ == "__main__":
    sys.exit(run_part("peers", run))
