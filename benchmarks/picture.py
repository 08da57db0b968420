"""Step time of every variant over link speed, with the bound under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {
    "compute": "#888888",
    "fsdp2": "#e8a87c",
    "fsdp2-best": "#d95f02",
    "ddp": "#7570b3",
    "commfuse": "#1b9e77",
    "commfuse-unfused": "#a6d8c4",
}


def draw(cases: list[dict[str, Any]], path: Path) -> bool:
    """Draw the cases that share the first one's class of bytes; False (and no file) when fewer than two are left.

    The case without a link stands at the right end, as the link of infinite speed that shared memory is.
    """
    drawn = [case for case in cases if case["keep"] == cases[0]["keep"]]
    if len(drawn) < 2:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn.sort(key=lambda case: case["link"]["rate_gbit"] if case["link"] else float("inf"))
    labels = [f"{case['link']['rate_gbit']:.2g} Gbit/s" if case["link"] else "one host" for case in drawn]
    places = list(range(len(drawn)))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    bounds = [case["summary"]["bound_ms"] for case in drawn]
    if all(bounds):
        axes.fill_between(places, 0, [b["p50"] for b in bounds], color="#000000", alpha=0.07, label="bound: max(compute, wire)")
    names = dict.fromkeys(name for case in drawn for name in case["summary"]["variants"])
    for name in names:
        points = [
            (i, case["summary"]["variants"][name]["step_ms"])
            for i, case in enumerate(drawn)
            if name in case["summary"]["variants"]
        ]
        xs, middle = [i for i, _ in points], [t["p50"] for _, t in points]
        low, high = [t["p50"] - t["p20"] for _, t in points], [t["p80"] - t["p50"] for _, t in points]
        style = "--" if name == "compute" else "-"
        axes.errorbar(xs, middle, yerr=[low, high], label=name, color=COLOURS.get(name), linestyle=style, marker="o", capsize=3)
    axes.set_xticks(places, labels)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a step (median, p20-p80)")
    axes.set_xlabel("link between the ranks, each way")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
