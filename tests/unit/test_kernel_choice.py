"""Which backend computes a product: measured once, kept on disk, explained, forced; and what happens where it cannot be."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from commfuse_dp.errors import ConfigError
from commfuse_dp.kernels import choice, measured, tiles, trial
from commfuse_dp.kernels.choice import Chooser, KernelError, rounded
from commfuse_dp.kernels.gemms import Gemms
from commfuse_dp.kernels.measured import MeasuredFile, Trial
from commfuse_dp.kernels.table import SliceEntry, SliceTable
from commfuse_dp.kernels.tiles import Problem, TileConfig

BF16 = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PROBLEM = Problem("forward", 8192, 4096, (512,) * 8, BF16, BF16)


class Bench:
    """Stands in for a measurement: counts, and says what it was told to."""

    def __init__(self, kernel_ms: float | None, blas_ms: float = 1.0) -> None:
        self.kernel_ms, self.blas_ms = kernel_ms, blas_ms
        self.problems: list[Problem] = []

    def __call__(self, problem: Problem, device: torch.device, configs: Sequence[TileConfig]) -> Trial:
        self.problems.append(problem)
        if self.kernel_ms is None:
            return Trial(self.blas_ms, {}, dict.fromkeys(configs, "CompilationError: no"))
        return Trial(self.blas_ms, {config: self.kernel_ms + number for number, config in enumerate(configs)})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """As if there were an H100."""
    state = {"capturing": False}
    monkeypatch.setattr(choice, "unavailable", lambda device, dtypes: None if device.type == "cuda" else "no GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


# ---- what is measured for what ---------------------------------------------------------------------------------------
def test_slices_of_tokens_are_measured_for_all_of_about_their_length(gpu) -> None:
    """Where a slice is of tokens, sequences of varying length are not measured one by one; but TMA needs whole steps, and wide
    stores whole words."""
    bench = Bench(0.9)
    chooser = Chooser(path=None, measure=bench)
    turned = Problem("dgrad", 2048, 4096, (1024,) * 4, BF16, BF16, transposed=(True, False))
    for rows in ((832, 896, 896, 960), (1024,) * 4):
        assert chooser.decide(turned._replace(rows=rows), GPU).backend == "triton"
    assert [problem.rows for problem in bench.problems] == [(1024,) * 4]
    found = [chooser.decide(turned._replace(rows=(rows,) * 4), GPU).config for rows in (1000, 1016, 1001, 1023)]
    assert [problem.rows for problem in bench.problems[1:]] == [(1032,) * 4, (1025,) * 4]
    for config in found:
        assert config is not None and not config.tma
        tiles_of = turned._replace(rows=(1001,) * 4)
        assert config in tiles.candidates(tiles_of, (9, 0)), "what was measured can be used"
    chooser.decide(PROBLEM._replace(rows=(500,) * 8), GPU)
    assert bench.problems[-1].rows == (500,) * 8, "rows of a weight are what they are"


def test_what_is_measured_has_the_alignment_of_what_it_is_measured_for() -> None:
    for count in range(1, 3000):
        (measured,) = choice.alike(Problem("dgrad", 1, 8, (count,), BF16, BF16, transposed=(True, False))).rows
        assert (measured % 64 == 0) == (count % 64 == 0), "TMA in dgrad"
        assert measured % math.gcd(count, 8) == 0 and measured >= count


def test_stores_along_dense_rows_are_wide() -> None:
    """Without TMA a flat loop leaves no 16-byte stores where y lies transposed; compiled in tests/conformance/kernels."""
    for first, capability in itertools.product((False, True), ((8, 0), (9, 0))):
        problem = Problem("forward", 2048, 4096, (1024,) * 4, BF16, BF16, transposed=(first, True))
        found = tiles.candidates(problem, capability)
        assert found and not any(config.flat and not config.tma for config in found)


# ---- decisions -------------------------------------------------------------------------------------------------------
def test_the_faster_one_is_taken_and_measured_once(gpu, tmp_path: Path) -> None:
    for kernel_ms, backend in ((0.9, "triton"), (1.1, "blas")):
        bench = Bench(kernel_ms)
        chooser = Chooser(path=tmp_path / f"{backend}.json", measure=bench)
        first = chooser.decide(PROBLEM, GPU)
        assert first.backend == backend and chooser.decide(PROBLEM, GPU) is first and len(bench.problems) == 1
        assert (first.config == tiles.candidates(PROBLEM, (9, 0))[0]) if backend == "triton" else first.config is None
        again = Bench(5.0)
        other = Chooser(path=tmp_path / f"{backend}.json", measure=again).decide(PROBLEM, GPU)
        assert other == first and not again.problems, "another process finds it on disk"


def test_tokens_are_rounded_so_that_few_shapes_are_measured(gpu) -> None:
    assert [rounded(tokens) for tokens in (1, 3, 5, 8, 9, 1000, 1025, 8192, 8193)] == [1, 3, 6, 8, 12, 1024, 1536, 8192, 12288]
    bench = Bench(0.5)
    chooser = Chooser(path=None, measure=bench)
    for tokens in (7000, 8000, 8192):
        chooser.decide(PROBLEM._replace(tokens=tokens), GPU)
    assert [problem.tokens for problem in bench.problems] == [8192]
    chooser.decide(PROBLEM._replace(dtype=torch.float16), GPU)
    chooser.decide(PROBLEM._replace(rows=(1024,) * 4), GPU)
    assert len(bench.problems) == 3


def test_a_forced_backend(gpu) -> None:
    slow = Bench(9.0)
    decision = Chooser("triton", path=None, measure=slow).decide(PROBLEM, GPU)
    assert decision.backend == "triton" and "asked for" in decision.reason and decision.config is not None
    bench = Bench(0.1)
    assert Chooser("blas", path=None, measure=bench).decide(PROBLEM, GPU).backend == "blas" and not bench.problems
    with pytest.raises(ConfigError, match="'auto', 'triton', 'blas'"):
        Chooser("cuda")  # type: ignore[arg-type]


def test_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(0.1)
    with caplog.at_level(logging.INFO, logger="commfuse_dp"):
        chooser = Chooser(path=None, measure=bench)
        for tokens in (1, 100):
            assert chooser.decide(PROBLEM._replace(tokens=tokens), CPU).backend == "blas"
    assert [record.message for record in caplog.records] == [
        "GEMMs by BLAS, slice by slice: the kernels run on CUDA devices, not on cpu"
    ]
    with pytest.raises(ConfigError, match=r"kernels='triton'.*not on cpu; use 'auto' or 'blas'"):
        Chooser("triton", path=None, measure=bench).decide(PROBLEM, CPU)
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        Chooser("triton", path=None, measure=bench).decide(PROBLEM._replace(dtype=torch.float64), GPU)
    assert not bench.problems


@pytest.mark.parametrize(
    ("version", "capability", "message"),
    [(None, (9, 0), "not installed"), ((3, 5), (9, 0), "older than 3.6"), ((3, 6), (7, 5), "sm_75"), ((4, 0), (10, 0), None)],
)
def test_too_old(monkeypatch: pytest.MonkeyPatch, version, capability, message) -> None:
    monkeypatch.setattr(choice, "_triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = choice.unavailable(GPU, (BF16,))
    assert reason is None if message is None else message in str(reason)


def test_kernels_that_do_not_compile(gpu) -> None:
    with pytest.warns(UserWarning, match="no kernel compiles: CompilationError: no; BLAS by slices is used"):
        assert Chooser(path=None, measure=Bench(None)).decide(PROBLEM, GPU).backend == "blas"
    with pytest.raises(KernelError, match="use 'auto' or 'blas'"):
        Chooser("triton", path=None, measure=Bench(None)).decide(PROBLEM, GPU)


def test_no_memory_to_measure(gpu) -> None:
    def measure(problem: Problem, device: torch.device, configs: Sequence[TileConfig]) -> Trial:
        raise torch.OutOfMemoryError("no")

    assert "no memory" in Chooser(path=None, measure=measure).decide(PROBLEM, GPU).reason
    assert Chooser("triton", path=None, measure=measure).decide(PROBLEM, GPU).backend == "triton"


def test_nothing_is_measured_while_a_graph_is_captured(gpu) -> None:
    bench = Bench(2.0)
    chooser = Chooser(path=None, measure=bench)
    gpu["capturing"] = True
    assert chooser.decide(PROBLEM, GPU).backend == "triton" and not bench.problems
    gpu["capturing"] = False
    assert chooser.decide(PROBLEM, GPU).backend == "blas" and len(bench.problems) == 1


def test_every_decision_is_explained(gpu) -> None:
    chooser = Chooser(path=None, measure=Bench(0.25, 0.5))
    chooser.decide(PROBLEM, GPU)
    chooser.decide(PROBLEM._replace(op="wgrad", out_dtype=torch.float32, rows=(100,)), GPU)
    rows = chooser.explain()
    assert rows[0] == (
        *("forward", "8192 x 4096 x 4096", "bfloat16", 8, "triton", "128x256x64, 8 warps, 3 stages, flat, tma"),
        "measured: kernel 0.250 ms, BLAS by slices 0.500 ms",
    )
    assert rows[1][:4] == ("wgrad", "8192 x 4096 x 100", "bfloat16 -> float32", 1)


# ---- a kernel that fails when it is launched -------------------------------------------------------------------------
def small() -> tuple[torch.Tensor, SliceTable, torch.Tensor]:
    weight = torch.randn(5, 4)
    return torch.randn(3, 4), SliceTable([SliceEntry(weight[:2], 0), SliceEntry(weight[2:], 2)]), weight


def test_a_kernel_that_fails_at_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice said Triton, the launch raises: BLAS with a warning, once; an error if Triton was asked for."""
    pytest.importorskip("triton")
    from commfuse_dp.kernels import gemm_forward

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("PassManager::run failed\nand much more")

    monkeypatch.setattr(gemm_forward, "gemm_forward", fails)
    monkeypatch.setattr(choice, "unavailable", lambda device, dtypes: None)
    x, table, weight = small()
    chooser = Chooser(path=None)
    chooser._decide = lambda problem, device: (choice.Decision("triton", None, "measured"), True)  # type: ignore[method-assign]
    y = torch.empty(3, 5)
    with pytest.warns(UserWarning, match=r"forward kernel failed \(RuntimeError: PassManager::run failed\)"):
        Gemms(chooser).forward(x, table, y)
    torch.testing.assert_close(y, x @ weight.t())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Gemms(chooser).forward(x, table, y)
    assert chooser.explain()[0].backend == "blas" and "PassManager" in chooser.explain()[0].why
    strict = Chooser("triton", path=None)
    strict._decide = chooser._decide  # type: ignore[method-assign]
    with pytest.raises(KernelError, match="ask for 'auto' or 'blas'"):
        Gemms(strict).forward(x, table, y)


# ---- the measurement itself ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", tiles.PASSES)
def test_a_trial_runs_both_and_keeps_what_fails(monkeypatch: pytest.MonkeyPatch, op: tiles.Pass) -> None:
    """Without a GPU: clock and device are replaced, operands and BLAS are real, the kernel fails as it must here."""
    pytest.importorskip("triton")
    times: list[float] = []

    def time_ms(call: trial.Call, flush: torch.Tensor) -> float:
        call()
        times.append(2.0)
        return times[-1]

    monkeypatch.setattr(trial, "time_ms", time_ms)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    problem = Problem(op, 6, 8, (3, 4), torch.float32, BF16, has_bias=op == "forward", vectored=False)
    wrong = TileConfig(16, 16, 16, tma=True)
    found = trial.measure(problem, CPU, [wrong])
    assert found.blas_ms == 2.0 and found.best is None and "TMA needs" in found.failed[wrong] and len(times) == 1


# ---- tiles -----------------------------------------------------------------------------------------------------------
def test_candidates_fit_the_problem() -> None:
    for op in tiles.PASSES:
        for capability in ((8, 0), (9, 0), (10, 0)):
            for vectored in (True, False):
                for rows in ((512,) * 8, (3, 70)):
                    problem = PROBLEM._replace(op=op, rows=rows, vectored=vectored)
                    found = tiles.candidates(problem, capability)
                    assert found and len(set(found)) == len(found) and tiles.default(problem, capability) in found
                    assert not any(config.tma for config in found) or (vectored and capability >= (9, 0))
                    assert op == "forward" or all(config.tma for config in found if config.flat)
    ragged = PROBLEM._replace(op="dgrad", rows=(512, 500))
    assert not any(config.tma for config in tiles.candidates(ragged, (9, 0))), "0 x inf of the next slice's columns"
    assert tiles.default(PROBLEM._replace(tokens=8), (9, 0)).block_m == 64, "a skinny product"


def test_tf32_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        def __init__(self, precision: str | None, legacy: bool) -> None:
            if precision is not None:
                self.fp32_precision = precision
            self.allow_tf32 = legacy

    for precision, legacy, expected in (
        (None, True, True),
        ("none", False, False),
        ("tf32", False, True),
        ("ieee", True, False),
    ):
        monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul(precision, legacy))
        assert tiles.uses_tf32() is expected


# ---- the cache on disk -----------------------------------------------------------------------------------------------
TRIAL = Trial(1.5, {TileConfig(64, 64, 32): 1.25}, {TileConfig(128, 64, 32, tma=True): "OutOfResources: no"})


def test_cache_keeps_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "gemms.json"
    one, two = MeasuredFile(path), MeasuredFile(path)
    assert one.get("a") is None and two.get("a") is None
    one.put("a", TRIAL)
    two.put("b", TRIAL)
    assert MeasuredFile(path).get("a") == MeasuredFile(path).get("b") == TRIAL, "two writers, one file"
    assert [item.name for item in path.parent.iterdir()] == [path.name], "nothing is left behind"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured.default_path() == tmp_path / "commfuse_dp" / "gemms.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert measured.default_path() == Path("/home/somebody/.cache/commfuse_dp/gemms.json")


def good() -> dict[str, object]:
    return {"version": measured.VERSION, "trials": {"a": TRIAL.as_json()}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        json.dumps(good())[:-9],
        "[]",
        json.dumps(good() | {"trials": {"a": {"blas_ms": 1.0}}}),
        json.dumps(good()).replace("1.5", "NaN"),
        json.dumps(good()).replace("1.25", "-1"),
        json.dumps(good()).replace('"block_m": 64', '"block_m": "64"'),
        json.dumps(good()) + " " * (5 << 20),
    ],
    ids=["empty", "truncated", "list", "incomplete", "nan", "negative", "type", "large"],
)
def test_a_broken_cache_is_ignored_with_a_warning(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gemms.json"
    path.write_text(content)
    with pytest.warns(UserWarning, match="measured anew"):
        assert MeasuredFile(path).get("a") is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MeasuredFile(path).put("b", TRIAL)
    assert MeasuredFile(path).get("b") == TRIAL, "it was repaired"


def test_another_version_and_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "gemms.json"
    path.write_text(json.dumps(good() | {"version": measured.VERSION + 1}))
    assert MeasuredFile(path).get("a") is None, "without a warning: nothing is wrong with it"
    (tmp_path / "file").write_text("")
    stuck = MeasuredFile(tmp_path / "file" / "gemms.json")
    with pytest.warns(UserWarning, match="cannot be"):
        stuck.put("a", TRIAL)
    assert stuck.get("a") == TRIAL, "this process keeps it"
