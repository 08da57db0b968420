"""Finding the best settings of the stock variants on this machine and link, by a short alternating measurement."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.case import Case
from benchmarks.clock import clock_of
from benchmarks.models import Batch
from benchmarks.models_llama import SHAPES
from benchmarks.variants import Ddp, Fsdp2, Variant

Settings = dict[str, Any]
Make = Callable[[Settings], Variant]


def best_fsdp2(case: Case, batches: list[Batch], say: Callable[[str], None]) -> tuple[Settings, list[dict[str, Any]]]:
    """The fastest of FSDP2's public settings with the same class of bytes, and what each candidate took.

    First what is gathered at once, then prefetch lists and the last group kept gathered, on the best grouping.
    """

    def make(settings: Settings) -> Variant:
        return Fsdp2("fsdp2-best", case, batches, **settings)

    groupings: list[Settings] = [{"grouping": name} for name in ("layer", "linear", "two-layers", "model")]
    best, first = fastest(make, groupings, case, say)
    refined: list[Settings] = [best, {**best, "prefetch": True}]
    if not case.keep:
        refined += [{**best, "keep_last": True}, {**best, "prefetch": True, "keep_last": True}]
    if best["grouping"] == "model":  # one group: nothing to prefetch, and keeping the last would keep everything
        return best, first
    best, second = fastest(make, refined, case, say)
    return best, first + second


def best_ddp(case: Case, batches: list[Batch], say: Callable[[str], None]) -> tuple[Settings, list[dict[str, Any]]]:
    """The fastest bucket size of DDP (static graph, gradients as bucket views), and what each candidate took."""

    def make(settings: Settings) -> Variant:
        return Ddp("ddp", case, batches, **settings)

    return fastest(make, [{"bucket_mb": size} for size in (25, 50, 100)], case, say)


def fastest(
    make: Make, candidates: list[Settings], case: Case, say: Callable[[str], None]
) -> tuple[Settings, list[dict[str, Any]]]:
    """Alternating steps of each candidate, the quickest of each counts (a disturbance only ever adds time).

    A step's time is the slowest rank's, so that all ranks choose alike. A model that is filled after sharding is a large one:
    its candidates are built, timed and freed one by one. Without rounds to search in, the first one is taken as it is.
    """
    if case.search_rounds == 0:
        return candidates[0], []
    clock = clock_of(case.device)

    def timed(settings: list[Settings]) -> list[list[float]]:
        variants = [make(one) for one in settings]
        for variant in variants:
            for _ in range(2):  # DDP rebuilds its buckets after the first step
                variant.step()
        times: list[list[float]] = [[] for _ in variants]
        for turn in range(case.search_rounds):
            for i in range(len(variants)):
                k = (i + turn) % len(variants)
                clock.settle()
                dist.all_reduce(torch.zeros(1))  # a barrier of the hosts
                clock.start()
                variants[k].step()
                spent = torch.tensor(clock.stop().wall_s, dtype=torch.float64)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                times[k].append(spent.item())
        for variant in variants:
            variant.finish()
        return times

    times: list[list[float]] = []
    for some in [[one] for one in candidates] if case.model in SHAPES else [candidates]:
        times += timed(some)
        gc.collect()
    quickest = [min(line) for line in times]
    tried = [{**settings, "step_ms": round(1e3 * spent, 1)} for settings, spent in zip(candidates, quickest, strict=True)]
    for line in tried:
        say(f"  tried {line}")
    return candidates[quickest.index(min(quickest))], tried
