"""DeepSpeed ZeRO-1, 2 and 3, stock and with CommFuse, as variants of the training-step benchmark.

| name | parameters | communication |
| --- | --- | --- |
| zero1, zero2, zero3 | ZeRO of that stage | stock, the fastest of its settings here, found by `best_zero` |
| zero1-commfuse, ... | the same with the block "commfuse" | fused |
| zero1-commfuse-deferred, zero2-... | "defer_gather", round_robin_gradients | fused, all-gather under the next forward |

ZeRO-1 and 2 need one all-gather and one reduce-scatter a step, the bytes of `--keep`; ZeRO-3 two all-gathers.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.case import DEFERRED, BenchmarkError, Case
from benchmarks.models import Batch
from benchmarks.search import Settings, fastest
from benchmarks.variants import Variant
from commfuse_dp.config import CommFuseConfig


def stage_of(name: str) -> int:
    return int(name[len("zero")])


class Zero(Variant):
    """Stock DeepSpeed; `settings` go into its block "zero_optimization"."""

    def __init__(self, name: str, case: Case, batches: list[Batch], settings: Settings) -> None:
        stage = stage_of(name)
        if (stage == 3) == case.keep:
            needed = "does not keep" if case.keep else "keeps"
            raise BenchmarkError(
                f"variant {name!r}: ZeRO-{stage} {needed} the parameters whole after forward; its bound is that of a run "
                f"{'without' if case.keep else 'with'} --keep"
            )
        os.environ.setdefault("DS_ACCELERATOR", case.device)
        self.settings = {"stage": stage, **settings}
        self._meter: Any = None
        super().__init__(name, case, batches)
        self.notes["settings"] = settings

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import deepspeed
        from commfuse_dp.integrations.deepspeed.backend import leave_alone

        # An op of inference alone: compiling it takes a minute, under a lock that a rank that is killed leaves behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = super().make_optimizer(parameters)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": self.settings,
            **self.extra(),
        }
        self.engine, _, _, _ = deepspeed.initialize(
            model=self.module, model_parameters=parameters, optimizer=optimizer, config=config, dist_init_required=False
        )
        if type(self) is Zero:
            leave_alone(self.engine)  # whether or not autoload is on
        return optimizer

    def extra(self) -> dict[str, Any]:
        return {"commfuse": {"enabled": False}}

    def step(self) -> None:
        loss = self.task.loss(self.engine, self.batches[len(self.losses) % len(self.batches)])
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.detach())

    def exposed_ns(self) -> int | None:
        return None  # DeepSpeed waits in handles of its own

    def finish(self) -> None:
        self.engine.destroy()


class ZeroCommFuse(Zero):
    """DeepSpeed with the block that a user adds, and otherwise its defaults."""

    def extra(self) -> dict[str, Any]:
        block: dict[str, Any] = {"transport": self.case.transport, "order": self.case.order, "deadline_s": self.case.deadline_s}
        if self.case.prefetch_bytes is not None:
            block["prefetch_bytes"] = self.case.prefetch_bytes
        if self.name in DEFERRED:
            block["defer_gather"] = True
        self.config = CommFuseConfig(**block)
        return {"commfuse": {"enabled": True, **block}}

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        from commfuse_dp.integrations.deepspeed import apply_to_engine, engine_of, report_of

        optimizer = super().make_optimizer(parameters)
        if engine_of(self.engine) is None:  # autoload is off, or the package is not installed
            apply_to_engine(self.engine, self.config)
        self.report = report_of(self.engine)
        return optimizer

    def exposed_ns(self) -> int | None:
        return self.report.probe.counters.exposed_ns if self.report is not None else None

    def end(self) -> tuple[int, int] | None:
        return self.report.probe.step_end if self.report is not None else None

    def finish(self) -> None:
        from commfuse_dp.integrations.deepspeed import remove

        assert self.report is not None
        counters = self.report.probe.counters
        self.notes["transport"] = self.report.transport
        self.notes["window_bytes_peak"] = counters.window_bytes_peak
        self.notes["order_misses"] = counters.order_misses
        self.notes["report_minimum_bytes"] = self.report.minimum_bytes_per_step
        remove(self.engine)
        super().finish()


def make_zero(name: str, case: Case, batches: list[Batch], say: Callable[[str], None]) -> Variant:
    if "-commfuse" in name:
        # Owners alternate from layer to layer, so that both directions of the link carry slices all the time.
        return ZeroCommFuse(name, case, batches, {"round_robin_gradients": True} if name in DEFERRED else {})
    best, tried = best_zero(name, case, batches, say)
    gc.collect()  # the candidates' models
    variant = Zero(name, case, batches, best)
    variant.notes["tried"] = tried
    return variant


def best_zero(name: str, case: Case, batches: list[Batch], say: Callable[[str], None]) -> tuple[Settings, list[dict[str, Any]]]:
    """The fastest of DeepSpeed's settings: overlap with backward or not, and the size of what is communicated at once."""

    def make(settings: Settings) -> Variant:
        return Zero(name, case, batches, settings)

    sizes = (500_000_000, 20_000_000, 5_000_000)  # elements; the first is DeepSpeed's default, which is one bucket here
    candidates: list[Settings] = [
        {"overlap_comm": overlap, "reduce_bucket_size": size} for overlap in (True, False) for size in sizes
    ]
    best, first = fastest(make, candidates, case, say)
    if stage_of(name) != 3:
        best, second = fastest(make, [best, {**best, "round_robin_gradients": True}], case, say)
        return best, first + second
    refined = [best, *({**best, "stage3_prefetch_bucket_size": size} for size in (0, 5_000_000))]
    best, second = fastest(make, refined, case, say)
    return best, first + second
