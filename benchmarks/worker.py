"""One rank of the benchmark: builds all variants, lets them alternate in rotated order, hands the figures to rank 0.

Started by `launch.run_case` as `python -m benchmarks.worker CASE.json RESULT.json`; under torchrun job.py calls `work`.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks import search
from benchmarks.case import DEEPSPEED, FLAT, SEPARATE, BenchmarkError, Block, Case, CaseResult, VariantRecord, minimum_bytes
from benchmarks.clock import Clock, Footprint, clock_of
from benchmarks.cuda_variants import Fsdp2SeparateGroup, Fsdp2Symmetric, resident_bytes, why_not
from benchmarks.models import Batch, batches
from benchmarks.sleeping import SleepingDevice
from benchmarks.variants import CommFuse, Compute, Ddp, Fsdp2, Variant, gathered_bytes
from commfuse_dp.launch.ranks import run_as_rank
from commfuse_dp.observe.clock import clock_domain
from commfuse_dp.observe.interface import InterfaceBytes, read_interface

PROGRESS = "[bench] "  # lines of rank 0 that the launcher passes on
PART = "BENCH_PART"  # variable: which part of a job this worker measures (job.py)
# Relative. Sums in another order differ by 1e-6 (bf16: activations by 4e-3, a loss by less); AdamW's normalisation enlarges
# that over the steps.
_LOSS_TOLERANCE = {"fp32": 2e-3, "bf16": 1e-2}
_RESIDENT_SHARE = 0.5  # of a GPU's memory that all variants may hold between steps: the rest is for one's activations
TRIED = ("fsdp2-symm",)  # variants that may fail: whether this machine can run them shows only when they run


def main(case_file: str, result_file: str) -> None:
    rank = int(os.environ["RANK"])
    result = work(Case.load(Path(case_file)), lambda text: print(PROGRESS + text, flush=True) if rank == 0 else None)
    if rank == 0:
        result.save(Path(result_file))


def work(case: Case, say: Callable[[str], None]) -> CaseResult:
    """Join the job that the environment describes (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_...), measure, leave it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if case.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=case.deadline_s)
    if PART in os.environ:  # the job's store outlives the part: what an earlier one wrote must not be found
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        prefixed = dist.PrefixStore(f"part{os.environ[PART]}", store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    device = SleepingDevice(case.sleep_gflops) if case.sleep_gflops else None  # its kernels live as long as it does
    try:
        result = measure(case, dist.get_rank(), say)
        meet()
    except BaseException:
        if case.device == "cpu":  # NCCL would wait for collectives that the others may never join: the process's end is quicker
            dist.destroy_process_group()
        raise
    del device
    dist.destroy_process_group()
    return result


def meet() -> None:
    """A barrier of the hosts: goes over gloo also where GPUs have NCCL."""
    dist.all_reduce(torch.zeros(1))


@dataclass
class Trial:
    """One variant on this rank: the variant while it lives, its blocks, and what is left when it was freed."""

    name: str
    variant: Variant | None
    notes: dict[str, Any]
    blocks: list[Block] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def finish(self) -> None:
        assert self.variant is not None
        self.variant.finish()
        self.losses = [loss.float().cpu() for loss in self.variant.losses]

    def free(self) -> None:
        """Let go of the model and the optimizer."""
        self.variant = None
        _collect()


def measure(case: Case, rank: int, say: Callable[[str], None]) -> CaseResult:
    """All rounds of all variants on this rank; the result is complete on rank 0 and partial elsewhere."""
    data = batches(case, rank)
    together, schedule = _schedule(case)
    say(f"schedule: {schedule}")
    trials: list[Trial] = []
    left_out: dict[str, str] = {}
    sizes, parameters = (0, 0), 0
    for name in case.variants:
        trial, reason = _start(name, case, data, rank, say)
        if trial is None:
            left_out[name] = reason
            say(f"left out {name}: {reason}")
            continue
        assert trial.variant is not None
        trials.append(trial)
        task = trial.variant.task
        layer_bytes = sum(gathered_bytes(layer, case) for layer in task.layers)
        sizes = (layer_bytes, gathered_bytes(task.model, case) - layer_bytes)
        parameters = sum(parameter.numel() for parameter in task.model.parameters())
        del task
        if not together:
            run_rounds([trial], case, say)
            trial.finish()
            trial.free()
    if not trials:
        raise BenchmarkError(f"no variant can run here: {'; '.join(f'{name}: {why}' for name, why in left_out.items())}")
    if together:
        say(f"warm: {', '.join(trial.name for trial in trials)}")
        run_rounds(trials, case, say)
        for trial in trials:
            trial.finish()
    check_losses(trials, rank, tolerance=_LOSS_TOLERANCE[case.precision])
    everyone = gather_objects([trial.blocks for trial in trials])
    if len(set(gather_objects(clock_domain()))) > 1:  # ranks on several hosts
        everyone = [[[replace(block, ends=None) for block in blocks] for blocks in rank] for rank in everyone]
    records = [
        VariantRecord(
            name=trial.name,
            blocks=[[everyone[r][k][turn] for r in range(case.world_size)] for turn in range(case.rounds)],
            notes=trial.notes,
            losses=[float(loss) for loss in trial.losses],
        )
        for k, trial in enumerate(trials)
    ]
    least = minimum_bytes(*sizes, case.world_size, keep=case.keep, ranks_per_host=case.ranks_per_host)
    facts = {"parameters": parameters, "schedule": schedule, **facts_of(case)}
    return CaseResult(*sizes, minimum_bytes=least, variants=records, left_out=left_out, facts=facts)


def _schedule(case: Case) -> tuple[bool, str]:
    """(all variants live at once and their blocks alternate?, in words). All ranks come to the same."""
    if case.schedule != "auto" or case.device == "cpu":
        together = case.schedule != "one-by-one"
        return together, "alternating blocks" if together else "one variant after another"
    needed = resident_bytes(case)
    total = torch.tensor(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MIN)
    together = needed < _RESIDENT_SHARE * total.item()
    figures = f"all variants hold {needed / 1e9:.1f} GB a GPU of {total.item() / 1e9:.1f} GB between steps"
    return together, f"{'alternating blocks' if together else 'one variant after another'} ({figures})"


def _start(name: str, case: Case, data: list[Batch], rank: int, say: Callable[[str], None]) -> tuple[Trial | None, str]:
    """Build and warm up a variant; (None, reason) if one of the ranks cannot run it."""
    reason = _anyone(why_not(name, case))
    if reason is not None:
        return None, reason
    before = Footprint.now() if case.device == "cuda" else None
    variant, failure = None, None
    try:
        variant = _make(name, case, data, rank, say)
        for _ in range(case.warmup):
            variant.step()
    except RuntimeError as error:
        if name not in TRIED:
            raise
        failure = f"it was tried and failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    if name in TRIED:
        failure = _anyone(failure)
    if variant is None or failure is not None:
        variant = None
        _collect()
        return None, failure or ""
    if before is not None:
        variant.notes["memory"] = Footprint.now().since(before)
    return Trial(name, variant, variant.notes), ""


def run_rounds(trials: list[Trial], case: Case, say: Callable[[str], None]) -> None:
    """All timed blocks of these variants, in rotated order."""
    clock = clock_of(case.device)
    for turn in range(case.rounds):
        for i in range(len(trials)):
            trial = trials[(i + turn) % len(trials)]
            assert trial.variant is not None
            trial.blocks.append(_block(trial.variant, case, clock))
        shown = ", ".join(f"{trial.name} {1e3 * trial.blocks[-1].wall_s / case.steps:.0f}" for trial in trials)
        say(f"round {turn + 1}/{case.rounds}, ms a step: {shown}")


def gather_objects(item: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, item)
    return everyone


def _anyone(reason: str | None) -> str | None:
    """The first rank's reason that has one, on all ranks."""
    reasons = gather_objects(reason)
    found = [(rank, text) for rank, text in enumerate(reasons) if text is not None]
    if not found:
        return None
    return found[0][1] if len(found) == len(reasons) else f"rank {found[0][0]}: {found[0][1]}"


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def facts_of(case: Case) -> dict[str, Any]:
    """What the ranks ran on. Collective."""
    places = gather_objects((platform.node(), torch.cuda.get_device_name() if case.device == "cuda" else None))
    facts: dict[str, Any] = {
        "hosts": len({host for host, _ in places}),
        "devices": sorted({device for _, device in places if device}),
    }
    if case.device == "cuda":
        facts["cuda"], facts["nccl"] = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _make(name: str, case: Case, data: list[Batch], rank: int, say: Callable[[str], None]) -> Variant:
    say(f"building {name}")
    if name == "compute":
        return Compute(case, data, rank)
    if name == "fsdp2":
        return Fsdp2(name, case, data)
    if name in SEPARATE:
        return (Fsdp2Symmetric if name == "fsdp2-symm" else Fsdp2SeparateGroup)(name, case, data)
    if name in ("commfuse", "commfuse-unfused", FLAT):
        order = "pairwise" if name == FLAT else case.order
        return CommFuse(name, case, data, fuse="never" if name == "commfuse-unfused" else "auto", order=order)
    if name in DEEPSPEED:
        from benchmarks.deepspeed_variants import make_zero

        return make_zero(name, case, data, say)
    if name not in ("fsdp2-best", "ddp"):
        raise BenchmarkError(f"unknown variant {name!r}")
    finder = search.best_fsdp2 if name == "fsdp2-best" else search.best_ddp
    settings, tried = finder(case, data, say)
    _collect()  # the candidates' models
    variant: Variant = Fsdp2(name, case, data, **settings) if name == "fsdp2-best" else Ddp(name, case, data, **settings)
    variant.notes["tried"] = tried
    return variant


def _block(variant: Variant, case: Case, clock: Clock) -> Block:
    """`case.steps` steps from a common start; this rank's time ends with its own last step."""
    gc.collect()
    gc.disable()  # a collection would hit some variant at random
    try:
        with variant.measured():
            clock.settle()
            meet()
            link, exposed, threads, softirq = _link(case), variant.exposed_ns(), _threads(), _softirq()
            cpu, main_cpu = time.process_time(), time.thread_time()
            clock.start()
            ends = []
            for _ in range(case.steps):
                variant.step()
                ends.append(variant.end())
            reading = clock.stop()
            main_cpu, cpu = time.thread_time() - main_cpu, time.process_time() - cpu
            blocked = variant.exposed_ns()
            spent = {name: used - threads.get(name, 0.0) for name, used in _threads().items()}
            meet()  # what this rank still had to send has left before the next variant starts
            after = _link(case)
            moved = after.since(link) if after is not None and link is not None else None
            softirq = _softirq() - softirq
    finally:
        gc.enable()
    return Block(
        wall_s=reading.wall_s,
        exposed_s=None if blocked is None or exposed is None else (blocked - exposed) / 1e9,
        cpu_s=cpu,
        main_cpu_s=main_cpu,
        threads_cpu_s={name: used for name, used in sorted(spent.items()) if used > 1e-3},
        softirq_s=softirq,
        tx_bytes=None if moved is None else moved.sent,
        rx_bytes=None if moved is None else moved.received,
        host_s=reading.host_s,
        ends=[end for end in ends if end is not None] if None not in ends else None,
        peak_bytes=reading.peak_bytes,
    )


class Trained(Protocol):
    """What is left of a variant to judge it by."""

    name: str
    losses: list[torch.Tensor]
    notes: dict[str, Any]


def check_losses(variants: Sequence[Trained], rank: int, tolerance: float = 2e-3) -> None:
    """All variants that communicate must train alike; a fast variant that computes something else is worth nothing."""
    judged = [variant for variant in variants if variant.name != "compute"]
    for variant in judged[1:]:
        ours, theirs = torch.stack(variant.losses).double(), torch.stack(judged[0].losses).double()
        worst = ((ours - theirs).abs() / theirs.abs().clamp_min(1e-12)).max().item()
        variant.notes[f"loss_max_relative_difference_to_{judged[0].name}"] = worst
        if not worst <= tolerance:
            raise BenchmarkError(
                f"rank {rank}: {variant.name} does not train like {judged[0].name}: losses differ by up to {worst:.2e} "
                f"relative (allowed {tolerance:g}); its times mean nothing."
            )


# ---- counters of this process and host (Linux; zero where they do not exist) -----------------------------------------
def _link(case: Case) -> InterfaceBytes | None:
    """This rank's shaped interface; on one host its part of the loopback, which all ranks (and everybody else) share. None in a
    job of others: GPUs' links are not the kernel's to count."""
    if case.job:
        return None
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
    run_as_rank(functools.partial(main, *sys.argv[1:]))
