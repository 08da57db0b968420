"""One rank of the benchmark: builds all variants, lets them alternate in rotated order, hands the figures to rank 0.

Started by `launch.run_case` as `python -m benchmarks.worker CASE.json RESULT.json`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import search
from benchmarks.case import DEEPSPEED, BenchmarkError, Block, Case, CaseResult, VariantRecord, minimum_bytes
from benchmarks.models import Batch, batches
from benchmarks.variants import CommFuse, Compute, Ddp, Fsdp2, Variant
from commfuse_dp.cli.launch import die_with_parent
from commfuse_dp.observe.interface import InterfaceBytes, read_interface

PROGRESS = "[bench] "  # lines of rank 0 that the launcher passes on
_LOSS_TOLERANCE = 2e-3  # relative; sums in another order differ by 1e-6, AdamW's normalisation enlarges that over the steps


def main(case_file: str, result_file: str) -> None:
    die_with_parent()
    case = Case.load(Path(case_file))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend = "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=case.deadline_s))
    try:
        result = measure(case, rank, say=lambda text: print(PROGRESS + text, flush=True) if rank == 0 else None)
        if rank == 0:
            result.save(Path(result_file))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(case: Case, rank: int, say: Callable[[str], None]) -> CaseResult:
    """All rounds of all variants on this rank; the result is complete on rank 0 and partial elsewhere."""
    data = batches(case.model, tokens=case.tokens, rank=rank, seed=case.seed, device=case.device)
    variants = [_make(name, case, data, rank, say) for name in case.variants]
    task = variants[0].task
    layer_bytes = sum(_bytes(layer) for layer in task.layers)
    root_bytes = _bytes(task.model) - layer_bytes
    for variant in variants:
        for _ in range(case.warmup):
            variant.step()
    say(f"warm: {', '.join(case.variants)}")
    mine: list[list[Block]] = [[] for _ in variants]
    for turn in range(case.rounds):
        for i in range(len(variants)):
            k = (i + turn) % len(variants)
            mine[k].append(_block(variants[k], case))
        shown = ", ".join(f"{v.name} {1e3 * mine[k][-1].wall_s / case.steps:.0f}" for k, v in enumerate(variants))
        say(f"round {turn + 1}/{case.rounds}, ms a step: {shown}")
    for variant in variants:
        variant.finish()
    check_losses(variants, rank)
    everyone: list[Any] = [None] * case.world_size
    dist.all_gather_object(everyone, mine)
    records = [
        VariantRecord(
            name=variant.name,
            blocks=[[everyone[r][k][turn] for r in range(case.world_size)] for turn in range(case.rounds)],
            notes=variant.notes,
            losses=[float(loss) for loss in variant.losses],
        )
        for k, variant in enumerate(variants)
    ]
    least = minimum_bytes(layer_bytes, root_bytes, case.world_size, keep=case.keep)
    return CaseResult(layer_bytes=layer_bytes, root_bytes=root_bytes, minimum_bytes=least, variants=records)


def _bytes(module: torch.nn.Module) -> int:
    """Of the whole parameters: a sharded parameter's numel counts all ranks' shards."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _make(name: str, case: Case, data: list[Batch], rank: int, say: Callable[[str], None]) -> Variant:
    say(f"building {name}")
    if name == "compute":
        return Compute(case, data, rank)
    if name == "fsdp2":
        return Fsdp2(name, case, data)
    if name in ("commfuse", "commfuse-unfused"):
        return CommFuse(name, case, data, fuse="auto" if name == "commfuse" else "never")
    if name in DEEPSPEED:
        from benchmarks.deepspeed_variants import make_zero

        return make_zero(name, case, data, say)
    if name not in ("fsdp2-best", "ddp"):
        raise BenchmarkError(f"unknown variant {name!r}")
    finder = search.best_fsdp2 if name == "fsdp2-best" else search.best_ddp
    settings, tried = finder(case, data, say)
    gc.collect()  # the candidates' models
    variant: Variant = Fsdp2(name, case, data, **settings) if name == "fsdp2-best" else Ddp(name, case, data, **settings)
    variant.notes["tried"] = tried
    return variant


def _block(variant: Variant, case: Case) -> Block:
    """`case.steps` steps from a common start; this rank's time ends with its own last step."""
    sync = torch.cuda.synchronize if case.device == "cuda" else (lambda: None)
    gc.collect()
    gc.disable()  # a collection would hit some variant at random
    try:
        with variant.measured():
            sync()
            dist.barrier()
            link, exposed, threads, softirq = _link(), variant.exposed_ns(), _threads(), _softirq()
            cpu, main_cpu, start = time.process_time(), time.thread_time(), time.perf_counter()
            for _ in range(case.steps):
                variant.step()
            sync()
            wall = time.perf_counter() - start
            main_cpu, cpu = time.thread_time() - main_cpu, time.process_time() - cpu
            blocked = variant.exposed_ns()
            spent = {name: used - threads.get(name, 0.0) for name, used in _threads().items()}
            dist.barrier()  # what this rank still had to send has left before the next variant starts
            moved = _link().since(link)
            softirq = _softirq() - softirq
    finally:
        gc.enable()
    return Block(
        wall_s=wall,
        exposed_s=None if blocked is None or exposed is None else (blocked - exposed) / 1e9,
        cpu_s=cpu,
        main_cpu_s=main_cpu,
        threads_cpu_s={name: used for name, used in sorted(spent.items()) if used > 1e-3},
        softirq_s=softirq,
        tx_bytes=moved.sent,
        rx_bytes=moved.received,
    )


def check_losses(variants: list[Variant], rank: int) -> None:
    """All variants that communicate must train alike; a fast variant that computes something else is worth nothing."""
    judged = [variant for variant in variants if not isinstance(variant, Compute)]
    for variant in judged[1:]:
        ours, theirs = torch.stack(variant.losses).double(), torch.stack(judged[0].losses).double()
        worst = ((ours - theirs).abs() / theirs.abs().clamp_min(1e-12)).max().item()
        variant.notes[f"loss_max_relative_difference_to_{judged[0].name}"] = worst
        if not worst <= _LOSS_TOLERANCE:
            raise BenchmarkError(
                f"rank {rank}: {variant.name} does not train like {judged[0].name}: losses differ by up to {worst:.2e} "
                f"relative (allowed {_LOSS_TOLERANCE:g}); its times mean nothing."
            )


# ---- counters of this process and host (Linux; zero where they do not exist) -----------------------------------------
def _link() -> InterfaceBytes:
    """This rank's shaped interface; on one host its part of the loopback, which all ranks (and everybody else) share."""
    if own := os.environ.get("BENCH_INTERFACE"):
        return read_interface(own)
    shared, ranks = read_interface("lo"), int(os.environ["WORLD_SIZE"])
    return InterfaceBytes(received=shared.received // ranks, sent=shared.sent // ranks)


def _threads() -> dict[str, float]:
    """CPU seconds of this process's other threads, summed by thread name (scheduler's clock, nanoseconds)."""
    spent: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == os.getpid():
            continue
        try:
            name = (task / "comm").read_text().strip()
            used = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (OSError, IndexError):
            continue  # ended meanwhile, or a kernel without scheduler statistics
        spent[name] = spent.get(name, 0.0) + used
    return spent


def _softirq() -> float:
    """Seconds that all cores of the host have spent in soft interrupts: packets' way through the kernel."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[7]) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])
