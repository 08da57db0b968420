"""CommFuse is on for an engine on all ranks, or on none and the engine is stock: whatever fails on the way."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest

from commfuse_dp import CommFuseConfig
from tests.parity.deepspeed.pair import BLOCK, Case, Result, check, run, settings
from tests.support.leftovers import assert_nothing_left, leftovers
from tests.support.stages import TOGETHER, agreed_on, fails, stages_of

SHARED = (
    ("deepspeed.comm.comm", "cdb"),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "iter_params"),
    ("deepspeed.runtime.zero.parameter_offload", "iter_params"),
)


def looks(engine: Any) -> dict[str, Any]:
    """Everything of an engine and of the process that attaching touches."""
    found: dict[str, Any] = {f"{module}.{name}": vars(importlib.import_module(module))[name] for module, name in SHARED}
    found["engine"] = sorted(set(vars(engine)) - {"_forward_pre_hooks"})
    found["optimizer"] = sorted(vars(engine.optimizer))
    for name, module in engine.module.named_modules():
        hooks = (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_hooks_always_called))
        found[f"module {name}"] = (type(module), type(module._parameters), sorted(vars(module)), hooks)
    for name, param in engine.module.named_parameters():
        found[f"parameter {name}"] = (id(param), sorted(vars(param)), bool(param._backward_hooks))
    return found


def assert_same(engine: Any, before: dict[str, Any], where: str) -> None:
    after = looks(engine)
    different = [(key, before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)]
    assert not different, f"after an exception {where}: {different}"


def broken(rank: int, world_size: int, stage: int, block: dict[str, Any], every: int) -> tuple[Result, Result, int]:
    """(stock, with CommFuse after attaching has failed everywhere, number of places where it has failed).

    every: of how many places one is tried; it fails on one rank only at half as many."""
    from commfuse_dp.integrations.deepspeed import apply_to_engine, engine_of, remove

    case = Case(settings(stage), steps=3)
    stock = run(rank, world_size, case, fused=False)
    config = CommFuseConfig(**{**BLOCK, **block})
    places: list[str] = []

    def attack(engine: Any, step: int) -> None:
        if step == 0:
            gc.collect()
            before = looks(engine)
            attach, detach = (lambda: apply_to_engine(engine, config)), (lambda: remove(engine))
            names = stages_of(attach, detach)
            assert_same(engine, before, "(there was none: after remove)")
            held = leftovers()
            for name in [name for name in names if not name.endswith(" on_undo")][::every]:  # what remembers the change itself
                if fails(name, None, attach):
                    places.append(name)
                else:  # a cache had what it finds out, which a garbage collection may have emptied before
                    detach()
                assert engine_of(engine) is None
                assert_same(engine, before, f"in {name}")
            # One rank fails, all hear of it: in whatever ranks do together.
            local, passed = agreed_on(names)[:: 2 * every], 0
            for number, name in enumerate(local):
                failing = number % world_size
                if not fails(name, failing, attach, wanted=TOGETHER):
                    detach()
                    passed += 1
                assert engine_of(engine) is None
                assert_same(engine, before, f"on rank {failing} in {name}")
            assert passed < len(local) / 2  # of places that come in the opening only, or before
            assert_nothing_left(held)
        if step == 2:
            apply_to_engine(engine, config)

    case.before = attack
    ours = run(rank, world_size, case, fused=False)
    return stock, ours, len(places)


@pytest.mark.parametrize(
    ("stage", "block", "every"),
    [
        (3, {}, 4),
        pytest.param(1, {"defer_gather": True}, 4, marks=pytest.mark.slow),
        pytest.param(3, {}, 1, marks=pytest.mark.slow),
        pytest.param(1, {"defer_gather": True}, 1, marks=pytest.mark.slow),
    ],
)
def test_an_exception_leaves_the_engine_stock(workers, stage, block, every):
    for stock, ours, places in workers(2).run(broken, stage, block, every, timeout=240):
        check(stock, ours)
        assert places > 80 / every - 5
