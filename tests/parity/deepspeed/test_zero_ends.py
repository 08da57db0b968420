"""The end of an engine: what is dropped or destroyed is freed as far as stock DeepSpeed frees it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.deepspeed.pair import BLOCK, Case, Net, launched, settings, started, train_micro
from tests.support.leftovers import leftovers


def built(deepspeed: Any, stage: int, rank: int, *, fused: bool, **block: Any) -> Any:
    """An engine that has trained a step, and nobody to end it."""
    torch.manual_seed(0)
    model = Net(blocks=1)
    config = settings(stage) | ({"commfuse": {**BLOCK, **block}} if fused else {})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    train_micro(Case(config), engine, rank, 0)
    return engine


def watched(engine: Any) -> dict[str, weakref.ref[Any]]:
    from commfuse_dp.integrations.deepspeed import engine_of

    found = {"engine": engine, "module": engine.module, "optimizer": engine.optimizer, "weight": engine.module.head.weight}
    ours = engine_of(engine)
    if ours is not None:
        found |= {"commfuse": ours, "transport": ours.transport}
    return {name: weakref.ref(value) for name, value in found.items()}


def living(watch: dict[str, weakref.ref[Any]]) -> set[str]:
    gc.collect()
    gc.collect()
    return {name for name, reference in watch.items() if reference() is not None}


# What stock DeepSpeed does to end an engine, without the `destroy` that CommFuse hears of: else its hooks keep everything.
def destroyed(engine: Any) -> None:
    engine.destroy()


def silently(engine: Any) -> None:
    type(engine).destroy(engine)


def dropped(rank: int, world_size: int, stage: int) -> dict[tuple[bool, str], set[str]]:
    """(with CommFuse?, how it ended) -> what lives on."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload

    found = {}
    with launched(rank, world_size) as deepspeed:
        for fused in (False, True):
            for end in (destroyed, silently):
                engine = built(deepspeed, stage, rank, fused=fused, defer_gather=stage == 1)
                watch = watched(engine)
                end(engine)
                del engine
                found[fused, end.__name__] = living(watch)
        assert type(comm.cdb).__name__ == "TorchBackend"
        assert "commfuse" not in parameter_offload.iter_params.__module__
    return found


def test_a_dropped_engine_is_freed(workers):
    for found in workers(2).run(dropped, 1, timeout=90):
        assert not any(found.values()), found


def test_a_destroyed_engine_of_zero_3_keeps_nothing_of_ours(workers):
    for found in workers(2).run(dropped_3, timeout=90):
        stock, ours = found
        assert ours == stock, (stock, ours)  # DeepSpeed keeps the modules of ZeRO-3 in a list of its own


def dropped_3(rank: int, world_size: int) -> list[set[str]]:
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload

    found = []
    with launched(rank, world_size) as deepspeed:
        for fused in (False, True):
            engine = built(deepspeed, 3, rank, fused=fused)
            watch = watched(engine)
            engine.destroy()
            del engine
            found.append(living(watch))
        assert type(comm.cdb).__name__ == "TorchBackend"
        assert "commfuse" not in parameter_offload.iter_params.__module__
    return found


# ---- many engines one after the other --------------------------------------------------------------------------------
def held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:" in line or "/dev/shm" in line for line in file)
    now = leftovers()
    return {
        "descriptors": len(now.descriptors),
        "threads": len(now.threads),
        "mappings": mapped,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "objects": sum(str(type(thing).__module__).startswith("commfuse_dp.") for thing in gc.get_objects()),
    }


def rounds(rank: int, world_size: int, stage: int, count: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(before, after) `count` rounds of building, training, destroying and dropping: stock, and with CommFuse."""
    found = []
    with launched(rank, world_size) as deepspeed:
        for fused in (False, True):
            before: dict[str, int] = {}
            for number in range(count + 2):
                if number == 2:
                    before = held()
                engine = built(deepspeed, stage, rank, fused=fused)
                engine.destroy()
                del engine
            found.append((before, held()))
    return found


@pytest.mark.parametrize(
    ("stage", "count"),
    [(3, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 4), (2, 50), (3, 50)))],
)
def test_rounds_do_not_grow(workers, stage, count):
    for (before, after), (began, ended) in workers(2).run(rounds, stage, count, timeout=60 + 10 * count):
        grown = {name: after[name] - before[name] for name in before}  # stock DeepSpeed makes groups with every engine
        assert all(ended[name] - began[name] <= max(grown[name], 0) for name in began), (grown, began, ended)


# ---- groups ----------------------------------------------------------------------------------------------------------
def groups(rank: int, world_size: int) -> bool:
    """Whether a group lives on that collectives of DeepSpeed were called for and that has ended since."""
    with started(rank, world_size, Case(settings(2)), fused=True) as engine:
        import deepspeed.comm as comm

        group = dist.new_group(list(range(world_size)))
        watch = weakref.ref(group)
        for _ in range(2):
            comm.all_gather_into_tensor(torch.empty(8 * world_size), torch.ones(8), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        train_micro(Case(settings(2)), engine, rank, 0)
        return watch() is not None


def test_groups_that_ended_are_not_kept(workers):
    assert workers(2).run(groups, timeout=60) == [False, False]
