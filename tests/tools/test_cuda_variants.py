"""The benchmark under torchrun, on CPUs: the same code as on GPUs, except for what is named `cuda`, which is faked."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks import cuda_variants, job, models_llama, report_job, train_step, worker
from benchmarks.case import BenchmarkError, Block, Case, CaseResult, VariantRecord
from benchmarks.clock import CudaClock, Footprint
from benchmarks.models import batches, build
from benchmarks.report import summarize
from benchmarks.variants import window_bytes
from commfuse_dp.errors import ConfigError
from tests.support.launching import launch

SCRIPT = str(Path(__file__).resolve().parents[2] / "benchmarks" / "train_step.py")
TINY = Case(model="llama3-tiny", tokens=32, sequence=16, batch=2, precision="bf16", steps=1, rounds=1, warmup=1, job=True)


def _silent(text: str) -> None:
    pass


# ---- the whole script ------------------------------------------------------------------------------------------------
def _torchrun(folder: Path, *arguments: str) -> tuple[dict[str, Any], str, str]:
    target = folder / "run.json"
    start = ["torchrun", "--master-port", "{port}", "--nproc-per-node", "2", SCRIPT, "--model", "llama3-tiny"]
    out, err = launch([*start, "--steps", "1", "--rounds", "1", "--warmup", "1", "--json", str(target), *arguments], folder)
    return json.loads(target.read_text()), out, err


@pytest.mark.slow
def test_variants_train_alike_under_torchrun(tmp_path: Path) -> None:
    names = "fsdp2,fsdp2-symm,fsdp2-rs-group,commfuse"
    record, out, err = _torchrun(
        tmp_path, "--variants", names, "--batch", "2", "--peak-tflops", "2", "--checkpoint-activations"
    )
    assert record["settings"]["precision"] == "bf16" and record["settings"]["tokens"] == 64
    (case,) = record["cases"]
    rows = case["summary"]["variants"]
    assert list(rows) == ["fsdp2", "fsdp2-rs-group", "commfuse"]
    assert rows["fsdp2-rs-group"]["notes"]["loss_max_relative_difference_to_fsdp2"] == 0.0
    assert rows["commfuse"]["notes"]["loss_max_relative_difference_to_fsdp2"] < 1e-3
    assert rows["commfuse"]["notes"]["transport"] == "shm"
    assert rows["fsdp2"]["last_loss"] != rows["fsdp2"]["first_loss"]
    for row in rows.values():
        per_s, step_ms = row["tokens_per_s"]["p50"], row["step_ms"]["p50"]
        assert per_s == pytest.approx(64 / step_ms * 1e3)
        assert row["mfu"]["p50"] == pytest.approx(case["summary"]["flops_per_token"] * per_s / 2e12)
        assert row["bytes_per_step"] is None and row["memory_bytes"] is None
    assert "GPUs" in case["summary"]["left_out"]["fsdp2-symm"]
    assert "left out fsdp2-symm" in err and "Left out: fsdp2-symm" in out
    assert out.count("# Training step") == 1  # rank 0's


@pytest.mark.slow
def test_parts_in_processes_of_their_own(tmp_path: Path) -> None:
    names = "fsdp2,fsdp2-rs-group,commfuse"
    record, _, _ = _torchrun(tmp_path, "--variants", names, "--apart", "fsdp2-rs-group", "--schedule", "one-by-one")
    assert [list(case["summary"]["variants"]) for case in record["cases"]] == [
        ["fsdp2", "commfuse"],
        ["fsdp2", "fsdp2-rs-group"],
    ]
    losses = {
        row["last_loss"] for case in record["cases"] for name, row in case["summary"]["variants"].items() if name != "commfuse"
    }
    assert len(losses) == 1


@pytest.mark.slow
def test_search_and_compute_with_a_filled_model(tmp_path: Path) -> None:
    record, _, _ = _torchrun(tmp_path, "--variants", "compute,fsdp2-best", "--search-rounds", "1", "--precision", "fp32")
    summary = record["cases"][0]["summary"]
    rows = summary["variants"]
    assert rows["compute"]["first_loss"] == pytest.approx(rows["fsdp2-best"]["first_loss"], rel=1e-6)  # the same weights
    assert len(rows["fsdp2-best"]["notes"]["tried"]) >= 4 and summary["base"] == "fsdp2-best"


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "1gbit"], "--link 1gbit under torchrun"),
        (["--suite", "issue"], "--suite issue under torchrun"),
        (["--world-size", "3"], "torchrun started 2 ranks"),
        (["--device", "cuda"], "finds no GPU"),
        (["--model", "llama3-8b"], "llama3-8b needs --device cuda"),
        (["--model", "llama3-tiny", "--tokens", "64"], "takes --sequence and --batch"),
        (["--model", "llama3-tiny", "--peak-tflops", "-1"], "must be above 0"),
        (["--model", "llama3-tiny", "--variants", "zero3"], "DeepSpeed is timed with"),
        (["--sequence", "64"], "--sequence is for llama3-8b"),
        (["--precision", "bf16"], "--precision is for llama3-8b"),
        (["--variants", "fsdp3"], "fsdp3"),
        (["--variants", "fsdp2", "--apart", "commfuse"], "not among --variants"),
    ],
)
def test_bad_arguments_of_a_job(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "work", lambda *a: pytest.fail("started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for rank in (0, 1):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        assert train_step.main(arguments) == 1
        assert (words in capsys.readouterr().err) == (rank == 0)  # once is enough


def test_a_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    case = replace(TINY, device="cuda")
    job.check(case, job.Job(1, 4, 1), link="none", suite=None, world_size=None)
    with pytest.raises(BenchmarkError, match=r"rank 2 would be GPU 2.*--nproc-per-node 2"):
        job.check(case, job.Job(2, 4, 2), link="none", suite=None, world_size=None)


def test_outside_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert job.job_of({"RANK": "1", "WORLD_SIZE": "2"}) is None
    assert job.job_of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == job.Job(1, 2, 0)
    with pytest.raises(ConfigError, match="RANK=one"):
        job.job_of({"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert train_step.main(["--device", "cuda", "--model", "llama3-8b"]) == 1
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
    assert train_step.main(["--apart", "fsdp2"]) == 1
    assert "--apart is for torchrun" in capsys.readouterr().err


def test_defaults_of_a_job() -> None:
    arguments = train_step._parse(["--device", "cuda", "--model", "llama3-8b"])
    case = train_step._case(arguments, job.Job(0, 8, 0))
    assert (case.world_size, case.tokens, case.precision, case.job) == (8, 8192, "bf16", True)
    first, second = job.parts_of(case, None)
    assert first.variants == ("fsdp2", "fsdp2-rs-group", "commfuse") and second.variants == ("fsdp2", "fsdp2-symm")
    assert job.parts_of(replace(case, transport="p2p"), None) == [replace(case, transport="p2p")]
    assert [part.variants for part in job.parts_of(case, ())] == [case.variants]


# ---- what cannot run -------------------------------------------------------------------------------------------------
def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(TINY, device="cuda")
    monkeypatch.setattr(FSDPModule, "set_symm_mem_for_comm", lambda *_: None, raising=False)  # torch 2.11 has none
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert "NCCL 2.27.3 is too old" in (cuda_variants.why_not("fsdp2-symm", case) or "")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert cuda_variants.why_not("fsdp2-symm", case) is None
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm")
    assert "has no set_symm_mem_for_comm" in (cuda_variants.why_not("fsdp2-symm", case) or "")
    assert "fp32 only" in (cuda_variants.why_not("ddp", case) or "")
    assert cuda_variants.why_not("fsdp2-rs-group", case) is None


def _symmetric(rank: int, world_size: int) -> tuple[Any, ...]:
    """fsdp2-symm with everything of NCCL faked; then a rank on which its setter fails."""
    called: list[str] = []
    fakes = {"set_symm_mem_for_comm": lambda self, backend: called.append(backend)}
    case = replace(TINY, variants=("fsdp2-symm",))
    data = batches(case, rank)
    plain = mock.patch.object(cuda_variants.Fsdp2Symmetric, "mesh", cuda_variants.Fsdp2.mesh)
    willing = mock.patch.object(worker, "why_not", lambda name, case: None)
    with plain, willing, mock.patch.multiple(FSDPModule, create=True, **fakes):
        trial, _ = worker._start("fsdp2-symm", case, data, rank, _silent)

    def fail(self: FSDPModule, backend: str) -> None:
        if rank == 1:
            raise RuntimeError("no window\nand more")

    with plain, willing, mock.patch.object(FSDPModule, "set_symm_mem_for_comm", fail, create=True):
        failed, reason = worker._start("fsdp2-symm", replace(case, warmup=0), data, rank, _silent)
    return called, trial is not None, failed, reason


@pytest.mark.slow
def test_symmetric_memory_is_set_on_every_module_and_may_fail(workers) -> None:
    for called, ran, failed, reason in workers(2).run(_symmetric, timeout=120):
        assert called == ["NCCL"] * (1 + models_llama.SHAPES["llama3-tiny"].layers) and ran
        assert failed is None and reason == "rank 1: it was tried and failed with RuntimeError: no window"


def _own_group(rank: int, world_size: int) -> tuple[list[bool], int]:
    """Gradients with the hook that a torch without the setter gets, against FSDP2's own; how many calls it served."""
    gradients, served = [], []
    call = cuda_variants.GroupReduceScatter.__call__

    def counted(self: Any, output_tensor: Any, input_tensor: Any, **how: Any) -> Any:
        assert self._group is not how["group"] and self._group.size() == how["group"].size()
        served.append(1)
        return call(self, output_tensor, input_tensor, **how)

    for own in (False, True):
        task = build(TINY)
        for layer in task.layers:
            fully_shard(layer)
        fully_shard(task.model)
        task.fill(rank, world_size)
        with mock.patch.object(cuda_variants.GroupReduceScatter, "__call__", counted):
            if own:
                cuda_variants.reduce_over_own_group(task.model)
            task.loss(task.model, batches(TINY, rank)[0]).backward()
        gradients.append([parameter.grad.to_local() for parameter in task.model.parameters()])
    return [torch.equal(one, other) for one, other in zip(*gradients, strict=True)], len(served)


def test_reduce_scatter_over_another_group(workers) -> None:
    for equal, served in workers(2).run(_own_group, timeout=120):
        assert all(equal) and served == 1 + models_llama.SHAPES["llama3-tiny"].layers


def _freed(rank: int, world_size: int) -> list[int]:
    """How many models of earlier variants are alive when the next one is built, and at the end."""
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []
    make = worker._make

    def watched(*arguments: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        variant = make(*arguments)
        models.append(weakref.ref(variant.task.model))
        return variant

    with mock.patch.object(worker, "_make", watched):
        names = ("commfuse", "fsdp2", "fsdp2-rs-group")
        worker.measure(replace(TINY, variants=names, schedule="one-by-one"), rank, _silent)
    return [*alive, sum(model() is not None for model in models)]


def test_one_by_one_frees_every_model(workers) -> None:
    assert workers(2).run(_freed, timeout=120) == [[0, 0, 0, 0]] * 2


# ---- model -----------------------------------------------------------------------------------------------------------
def test_shape_of_the_published_model() -> None:
    model = models_llama.meta_model("llama3-8b", recompute=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert model.head.weight.shape == (128_256, 4096) and model.layers[0].attention.qkv.weight.shape == (6144, 4096)
    flops = models_llama.flops_per_token(models_llama.SHAPES["llama3-8b"], 8192)
    assert flops == pytest.approx(
        6 * (8_030_261_248 - 128_256 * 4096) + 6 * 32 * 8192 * 4096, rel=1e-4
    )  # norms are not counted
    case = replace(TINY, model="llama3-8b", world_size=8, variants=("fsdp2", "commfuse"))
    assert cuda_variants.resident_bytes(case) == pytest.approx(2 * 16.06e9, rel=1e-3)
    assert window_bytes(case, build(case)) == 128_256 * 4096 * 2  # the head is larger than two layers


def test_model_computes_what_it_should() -> None:
    """Causal; positions are relative; keys and values are shared by groups of heads; recomputation changes nothing."""
    case = replace(TINY, precision="fp32")
    task, again = build(case), build(replace(case, checkpoint_activations=True))
    for each in (task, again):
        each.fill(0, 1)
    tokens, _ = data = batches(case, 0)[0]
    logits = task.model(tokens)
    changed = tokens.clone()
    changed[:, 9] += 1
    apart = (task.model(changed % 320) - logits).abs().amax(dim=(0, 2))
    assert apart[:9].max() == 0 and apart[9:].min() > 0
    q, k = torch.randn(2, 1, 8)
    cos, sin = models_llama.rotary_table(32, 8, 500_000.0, torch.device("cpu"))
    scores = [models_llama.rotate(q, cos[i], sin[i]) @ models_llama.rotate(k, cos[j], sin[j]).T for i, j in ((3, 1), (30, 28))]
    assert torch.allclose(*scores, atol=1e-5) and not torch.allclose(scores[0], q @ k.T, atol=1e-3)
    for each in (task, again):
        each.loss(each.model, data).backward()
    for (name, one), other in zip(task.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) and one.grad.abs().max() > 0, name


# ---- clock and figures -----------------------------------------------------------------------------------------------
class _Cuda:
    """torch.cuda as far as clocks use it. Recording an event costs 10 ms of the device's time."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.device_ms = 0.0

    def Event(self, enable_timing: bool) -> _Event:
        assert enable_timing
        return _Event(self)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")

    def memory_allocated(self) -> int:
        return 100

    def max_memory_allocated(self) -> int:
        return 160

    def memory_reserved(self) -> int:
        return 200

    def mem_get_info(self) -> tuple[int, int]:
        return 600, 1000


class _Event:
    def __init__(self, cuda: _Cuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.log.append("record")
        self.cuda.device_ms += 10
        self.at = self.cuda.device_ms

    def synchronize(self) -> None:
        self.cuda.log.append("wait")

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


def test_clock_of_a_gpu_waits_at_the_ends_of_a_block_only() -> None:
    cuda = _Cuda()
    clock = CudaClock(cuda)
    clock.settle()
    clock.start()
    cuda.log.append("steps")
    reading = clock.stop()
    assert cuda.log == ["synchronize", "reset", "record", "steps", "record", "wait", "synchronize"]
    assert reading.wall_s == pytest.approx(0.01) and reading.peak_bytes == 60
    assert Footprint.now(cuda) == Footprint(allocated=100, beside=200)
    assert Footprint(150, 260).since(Footprint(100, 200)) == {"allocated_bytes": 50, "beside_bytes": 60}


def test_figures_of_a_job() -> None:
    def block(wall_s: float) -> Block:
        return Block(wall_s, None, 1.0, 1.0, {}, 0.0, None, None, host_s=wall_s / 4, peak_bytes=5 * 10**9)

    notes = {"memory": {"allocated_bytes": 2 * 10**9, "beside_bytes": 10**9}}
    slow = VariantRecord("fsdp2", [[block(2.0), block(1.0)]], notes=notes, losses=[2.0, 1.0])
    fast = VariantRecord("commfuse", [[block(1.0), block(1.0)]], notes=notes, losses=[2.0, 1.0])
    result = CaseResult(1, 1, 1, [slow, fast], {"fsdp2-symm": "too old"}, {"parameters": 10**6, "schedule": "x", "devices": []})
    case = replace(TINY, steps=2, peak_tflops=1e-6)
    summary = summarize(result, steps=2, link_bytes_per_s=None)
    report_job.extend(summary, result, case)
    row = summary["variants"]["commfuse"]
    assert row["tokens_per_s"]["p50"] == 64.0 and row["speedup_over_base"]["p50"] == 2.0 and row["host_ms"]["p50"] == 125.0
    assert row["memory_bytes"]["total"] == 8 * 10**9
    assert row["mfu"]["p50"] == pytest.approx(64 * summary["flops_per_token"] / 1e6)
    text = "\n".join(report_job.lines({"summary": summary, "job": result.facts}))
    assert "| commfuse | 500.0 (500.0-500.0) | 64 (64-64) |" in text and "2.0 + 1.0 + 5.0" in text
    assert "Left out: fsdp2-symm: too old." in text
