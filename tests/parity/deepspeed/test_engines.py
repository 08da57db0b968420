"""Engines side by side, CommFuse taken off, the report and its reasons, bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commfuse_dp import CommFuseConfig
from commfuse_dp.errors import ConfigError
from tests.parity.deepspeed.pair import (
    BLOCK,
    CLASSES,
    WIDTH,
    Block,
    Case,
    Net,
    Result,
    both,
    check,
    run,
    settings,
    started,
    train_micro,
    whole,
)
from tests.support.leftovers import assert_nothing_left, leftovers


# ---- the end of an engine -------------------------------------------------------------------------------------------
def destroyed(rank: int, world_size: int, stage: int) -> None:
    """`engine.destroy()` alone, as a user calls it, takes CommFuse along."""
    from commfuse_dp.integrations.deepspeed import engine_of
    from commfuse_dp.integrations.deepspeed.backend import RingBackend
    from deepspeed.comm import comm

    with started(rank, world_size, Case(settings(stage)), fused=True) as engine:
        train_micro(Case(settings(stage)), engine, rank, 0)
        transport = engine_of(engine).transport
        engine.destroy()
        assert engine_of(engine) is None and not isinstance(comm.cdb, RingBackend)
        with pytest.raises(Exception, match="closed"):
            transport.progress()


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_destroy_ends_it(workers, stage):
    workers(2).run(destroyed, stage, timeout=60)


# ---- several engines -------------------------------------------------------------------------------------------------
def side_by_side(rank: int, world_size: int, stages: tuple[int, int], fused: tuple[bool, bool]) -> list[tuple[Result, Result]]:
    """Two engines trained in turns, against each of them alone on stock DeepSpeed."""
    cases = [Case(settings(stage, accumulation=1 + n)) for n, stage in enumerate(stages)]
    alone = [run(rank, world_size, case, fused=False) for case in cases]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(started(rank, world_size, case, fused=on)) for case, on in zip(cases, fused, strict=True)
        ]
        before = [whole(engine) for engine in engines]
        losses: list[list[float]] = [[], []]
        norms: list[list[float]] = [[], []]
        for step in range(cases[0].steps):
            for n, engine in enumerate(engines):
                for micro in range(1 + n):
                    losses[n].append(train_micro(cases[n], engine, rank, step * (1 + n) + micro))
                norms[n].append(float(engine.get_global_grad_norm()))
        together = [Result(losses[n], norms[n], before[n], whole(engines[n]), {}, {}, []) for n in range(2)]
    return list(zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("stages", "fused"),
    [
        pytest.param((3, 3), (True, False), marks=pytest.mark.slow),
        pytest.param((2, 3), (False, True), marks=pytest.mark.slow),
        pytest.param((3, 2), (True, True), marks=pytest.mark.slow),
        pytest.param((1, 1), (True, False), marks=pytest.mark.slow),
    ],
)
def test_two_engines_in_one_process(workers, stages, fused):
    for pairs in workers(2).run(side_by_side, stages, fused, timeout=90):
        for alone, together in pairs:
            check(alone, together)


def taken_off(rank: int, world_size: int, stage: int) -> tuple[Result, Result]:
    """CommFuse for two steps, stock for two, CommFuse again."""
    from commfuse_dp.integrations.deepspeed import apply_to_engine, engine_of, remove
    from deepspeed.comm import comm

    case = Case(settings(stage), steps=6)
    stock = run(rank, world_size, case, fused=False)

    def switch(engine: Any, step: int) -> None:
        if step == 2:
            remove(engine)
            assert engine_of(engine) is None and type(comm.cdb).__name__ == "TorchBackend"
            assert not [name for name, module in engine.module.named_modules() if "forward" in vars(module)]
            with pytest.raises(ConfigError, match="not on"):
                remove(engine)
        if step == 4:
            apply_to_engine(engine, CommFuseConfig(**BLOCK))
            with pytest.raises(ConfigError, match="on for this DeepSpeed engine already"):
                apply_to_engine(engine, CommFuseConfig(**BLOCK))

    case.before = switch
    return stock, run(rank, world_size, case, fused=True)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_taken_off_and_put_on_again(workers, stage):
    for stock, ours in workers(2).run(taken_off, stage, timeout=60):
        check(stock, ours)


def ended(rank: int, world_size: int, stage: int) -> None:
    from deepspeed.comm import comm

    run(rank, world_size, Case(settings(stage), steps=1), fused=False)  # what stays of stock DeepSpeed is there now
    before = leftovers()
    run(rank, world_size, Case(settings(stage), steps=2), fused=True)
    assert type(comm.cdb).__name__ == "TorchBackend"
    assert_nothing_left(before)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_nothing_is_left_behind(workers, stage):
    workers(2).run(ended, stage, timeout=60)


# ---- the report ------------------------------------------------------------------------------------------------------
class Leaf(Block):
    pass


class Parts(Net):
    """Its first block is a ZeRO-3 leaf; it reads a weight of the last, and says so to DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        import deepspeed

        self.blocks[0] = Leaf()
        deepspeed.utils.set_z3_leaf_modules(self, [Leaf])
        deepspeed.zero.register_external_parameter(self, self.blocks[2].down.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + self.blocks[2].down.weight.square().mean())


def parts(rank: int, world_size: int) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(3), make=Parts, block={"exclude": ["blocks.1.up"]}))


def test_reasons_in_zero_3(workers):
    for stock, ours in workers(2).run(parts, timeout=60):
        check(stock, ours)
        assert ours.paths["blocks.1.down.weight"] == "fused"
        wanted = {
            "blocks.0.up.weight": "leaf module",
            "blocks.2.down.weight": "external parameter",
            "blocks.1.up.weight": "excluded by 'blocks.1.up'",
            "blocks.1.norm.weight": "kept whole on every rank",
            "head.bias": "kept whole on every rank",
        }
        for name, reason in wanted.items():
            assert ours.paths[name] == "hooks" and reason in ours.reasons[name], (name, ours.reasons[name])


def freeze(model: Net) -> None:
    for param in (model.head.weight, model.blocks[0].norm.weight):
        param.requires_grad_(False)


def frozen(rank: int, world_size: int, stage: int) -> tuple[Result, Result, int]:
    """With what the same model has to receive if nothing of it is frozen."""
    case, all_trained = Case(settings(stage), prepare=freeze), Case(settings(stage), steps=1)
    return *both(rank, world_size, case), run(rank, world_size, all_trained, fused=True).minimum


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1))])
def test_what_is_frozen_stays_where_it_is(workers, stage):
    for stock, ours, minimum in workers(2).run(frozen, stage, timeout=60):
        check(stock, ours)
        stock_paths = {name for name, path in ours.paths.items() if path == "stock"}
        assert stock_paths == {"head.weight", "blocks.0.norm.weight"}
        assert {ours.reasons[name] for name in stock_paths} == {"frozen: it has no gradient"}
        # fp32, the half of two ranks: gathered after the step; reduced to the owner, or, what is not fused, to all ranks
        linear, norm = CLASSES * WIDTH * 4 // 2, WIDTH * 4 // 2
        assert minimum - ours.minimum == (2 * linear + 3 * norm if stage else 2 * linear + 2 * norm)


def yes() -> bool:
    return True


# What CPU cannot run, or what takes long: where DeepSpeed is asked for it, and the reason in the report.
FEATURES: list[tuple[str, str, Any, str]] = [
    ("engine", "zero_hpz_partition_size", lambda: 2, "hpZ"),
    ("engine", "zero_quantized_weights", yes, "quantisation of weights"),
    ("engine", "zero_quantized_gradients", yes, "quantisation of gradients"),
    ("engine", "is_deepcompile_enabled", yes, "DeepCompile"),
    ("engine", "zenflow", yes, "ZenFlow"),
    ("engine", "autotp_size", lambda: 2, "AutoTP"),
    ("engine", "has_moe_layers", True, "mixture of experts"),
    ("optimizer", "offload_optimizer", True, "optimizer offloading"),
]
PARTITIONS: list[tuple[str, Any, str]] = [
    ("ds_quant_scale", 1.0, "quantised"),
    ("final_location", "OffloadDeviceEnum.nvme", "offloaded"),
    ("final_location", "OffloadDeviceEnum.cpu", "offloaded"),
]


@contextlib.contextmanager
def applied(engine: Any, **settings_: Any) -> Iterator[Any]:
    from commfuse_dp.integrations.deepspeed import apply_to_engine, remove

    report = apply_to_engine(engine, CommFuseConfig(**{**BLOCK, **settings_}))
    try:
        yield report
    finally:
        remove(engine)


def features(rank: int, world_size: int, stage: int) -> None:
    from commfuse_dp.integrations.deepspeed import apply_to_engine, engine_of

    with started(rank, world_size, Case(settings(stage)), fused=False) as engine:
        for where, name, value, reason in FEATURES:
            holder = engine if where == "engine" else engine.optimizer
            with mock.patch.object(holder, name, value, create=True):
                with applied(engine) as report:
                    assert all(row.path == "hooks" and reason in row.reason for row in report.rows), (name, report.rows)
                with pytest.raises(ConfigError, match=r"fuse='always'.*head\.weight.*is on"):
                    apply_to_engine(engine, CommFuseConfig(fuse="always"))
                assert engine_of(engine) is None
        if stage == 3:
            shard = engine.module.head.weight.ds_tensor
            for name, value, reason in PARTITIONS:
                with mock.patch.object(shard, name, value, create=True), applied(engine) as report:
                    found = {row.name: (row.path, row.reason) for row in report.rows}
                    assert found["head.weight"][0] == "hooks" and reason in found["head.weight"][1]
                    assert found["blocks.0.up.weight"][0] == "fused"
        with applied(engine, fuse="always") as report:  # nothing stands in the way
            assert report.numel_by_path()["fused"] > 0
        for name in ("partition_grads",) if stage == 3 else ("setup_buckets",):  # another DeepSpeed
            kind = type(engine.optimizer)
            engine.optimizer.__class__ = type(kind.__name__, (kind,), {name: property(_absent)})
            with applied(engine) as report:
                assert all(f"lacks {name}" in row.reason for row in report.rows), report.rows
            engine.optimizer.__class__ = kind
        with mock.patch("deepspeed.comm.comm.cdb", object()):
            report = apply_to_engine(engine, CommFuseConfig(**BLOCK))
            assert all(row.path == "stock" and "lacks all_gather_into_tensor" in row.reason for row in report.rows)
            with pytest.raises(ConfigError, match="cannot be served"):
                apply_to_engine(engine, CommFuseConfig(fuse="always"))


def _absent(self: Any) -> Any:
    raise AttributeError


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reasons_for_features(workers, stage):
    workers(2).run(features, stage, timeout=60)


def stage_0(rank: int, world_size: int) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(0, accumulation=2)))


def test_stage_0_goes_over_the_ring(workers):
    for stock, ours in workers(2).run(stage_0, timeout=60):
        check(stock, ours)
        assert set(ours.paths.values()) == {"hooks"} and "shards nothing" in ours.reasons["head.weight"]


# ---- fuse="never", transports, bytes ---------------------------------------------------------------------------------
def with_block(rank: int, world_size: int, stage: int, block: dict[str, Any]) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(stage), block=block))


@pytest.mark.parametrize(
    ("stage", "block"),
    [
        pytest.param(2, {"fuse": "never"}, marks=pytest.mark.slow),
        (3, {"fuse": "never"}),
        (2, {"transport": "p2p"}),
        (3, {"slices_per_rank": 3, "transport": "tcp"}),
        *(
            pytest.param(stage, block, marks=pytest.mark.slow)
            for stage in (2, 3)
            for block in ({"transport": "tcp"}, {"transport": "p2p"}, {"slices_per_rank": 3}, {"order": "ring"})
        ),
    ],
)
def test_settings_of_the_block(workers, stage, block):
    for stock, ours in workers(2).run(with_block, stage, block, timeout=60):
        check(stock, ours)
        assert ("fused" in ours.paths.values()) == (block.get("fuse") != "never")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96, bias=False) for _ in range(4)])
        self.head = nn.Linear(96, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(tokens, 96).to(self.head.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def wide(rank: int, world_size: int, stage: int, dtype: str, window: int) -> Result:
    more: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if dtype == "autocast" else {}
    block: dict[str, Any] = {"prefetch_bytes": window}
    if dtype == "bf16 as fp32":  # of slices the narrower one travels
        more, block = {"communication_data_type": "fp32"}, {**block, "fuse": "never"}
    zero = settings(stage, dtype="bf16" if dtype.startswith("bf16") else "fp32", **more)
    case = Case(zero, make=Wide, block=block, steps=5)
    case.before = lambda engine, step: dist.barrier()  # else a quick rank's next collective may count in this step already
    return run(rank, world_size, case, fused=True)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        *((1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "autocast"), (3, "bf16 as fp32")),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((1, "bf16"), (2, "fp32"), (3, "bf16"), (1, "bf16 as fp32"))),
    ],
)
def test_bytes(workers, stage, dtype):
    """A step moves what two all-gathers (ZeRO-1, 2: one) and a reduce-scatter need, and no more than 3 % besides."""
    for result in workers(2).run(wide, stage, dtype, 40_000, timeout=60):
        for moved in result.steps[1:-1]:  # the first has no recorded order, and behind the last everything is looked at
            total = moved.param_bytes_received + moved.grad_bytes_received
            if dtype == "autocast":  # the half of the linears, three times, of two bytes an element: as with stock
                assert total <= 1.03 * 3 * (4 * 96 * 96 + 11 * 97), (total, moved)
            assert total <= 1.03 * result.minimum, (total, result.minimum, moved)
            assert total >= 0.6 * result.minimum, (total, result.minimum, moved)


def frozen_bytes(rank: int, world_size: int) -> list[Result]:
    """Without and with layers that have no backward. The window holds one slice."""
    case = Case(settings(3), make=Wide, block={"prefetch_bytes": 4 * 96 * 96 // 2}, steps=3)
    case.before = lambda engine, step: dist.barrier()
    freeze = lambda model: model.layers[:2].requires_grad_(False)  # noqa: E731
    return [run(rank, world_size, replace(case, prepare=prepare), fused=True) for prepare in (case.prepare, freeze)]


def test_a_layer_before_which_nothing_is_trained_is_gathered_once(workers):
    for results in workers(2).run(frozen_bytes, timeout=60):
        moved = [result.steps[1].param_bytes_received + result.steps[1].grad_bytes_received for result in results]
        assert moved[0] - moved[1] == pytest.approx(results[0].minimum - results[1].minimum, rel=0.01)
