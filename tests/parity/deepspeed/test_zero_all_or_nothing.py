"""CommFuse is on for an engine on all ranks, or on none and the engine is stock: whatever fails on the way."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch.distributed as dist

from commfuse_dp import CommFuseConfig
from commfuse_dp.errors import CommFuseError
from tests.parity.deepspeed.pair import BLOCK, Case, Result, check, run, settings
from tests.support.leftovers import assert_nothing_left, leftovers
from tests.support.raising import Injected, functions_entered, inside, raising_in

FOLDER = "integrations"
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


def common(found: list[list[str]], world_size: int) -> list[str]:
    """Names entered each time, on all ranks: what a garbage collection calls is entered now and then."""
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    return [name for name in everyone[0][0] if all(name in names for of_one in everyone for names in of_one)]


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
            found = []
            for _ in range(3):  # the first also enters what is found out once in a process
                found.append(functions_entered(FOLDER, lambda: apply_to_engine(engine, config)))
                remove(engine)
            names = common(found[1:], world_size)
            names = [name for name in names if not name.endswith(" on_undo")]  # what remembers the change itself
            assert_same(engine, before, "(there was none: after remove)")
            held = leftovers()
            for name in names[::every]:
                try:
                    entered = raising_in(FOLDER, name, lambda: apply_to_engine(engine, config))
                except Injected:
                    places.append(name)
                except CommFuseError as error:  # entered on the other rank only
                    assert name in str(error), error
                else:  # a cache had what it finds out, which a garbage collection may have emptied before
                    assert not entered, f"an exception in {name} did not come out"
                    remove(engine)
                assert engine_of(engine) is None
                assert_same(engine, before, f"in {name}")
            # One rank fails, all hear of it: in whatever ranks do together, but for the agreement itself, and for the opening
            # of the transport, which ends by its deadline.
            local = [name for name in names if not name.startswith(("attach/ranks.py", "attach/fingerprint.py"))]
            passed = 0
            for number, name in enumerate(local[:: 2 * every]):
                failing = number % world_size
                try:
                    if rank == failing:
                        raising_in(
                            FOLDER,
                            name,
                            lambda: apply_to_engine(engine, config),
                            wanted=inside("together", but_not=("open", "_open", "_open_gather")),
                        )
                    else:
                        apply_to_engine(engine, config)
                except Injected:
                    assert rank == failing
                except CommFuseError as error:
                    assert rank != failing and f"rank {failing}" in str(error) and name in str(error), error
                else:
                    remove(engine)
                    passed += 1
                assert engine_of(engine) is None
                assert_same(engine, before, f"on rank {failing} in {name}")
            assert passed < len(local[:: 2 * every]) / 2  # of places that come in the opening only, or before
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
        (1, {"defer_gather": True}, 4),
        pytest.param(3, {}, 1, marks=pytest.mark.slow),
        pytest.param(1, {"defer_gather": True}, 1, marks=pytest.mark.slow),
    ],
)
def test_an_exception_leaves_the_engine_stock(workers, stage, block, every):
    for stock, ours, places in workers(2).run(broken, stage, block, every, timeout=240):
        check(stock, ours)
        assert places > 80 / every - 5
