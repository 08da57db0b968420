"""Blocks that are wrong: refused at once, on every rank, with what was given, what is allowed and the fix."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from commfuse_dp.integrations.deepspeed.block import check_block

from commfuse_dp.errors import ConfigError, MismatchError
from tests.parity.deepspeed.pair import BLOCK, Case, launched, settings, started

ZERO: dict[str, Any] = {"stage": 2}

# configuration (besides what every one needs) -> what the error must say
BLOCKS: list[tuple[dict[str, Any], list[str]]] = [
    ({"zero_optimization": {**ZERO, "commfuse": {"enabled": True}}}, ["inside 'zero_optimization'", "top level"]),
    ({"optimizer": {"params": {"commfuse": {}}}}, ["inside 'optimizer.params'", "top level"]),
    ({"commfuse": {"enabled": "auto"}}, ['{"enabled": "auto"}', "Leave the key out"]),
    ({"commfuse": {"prefetch_bytes": "auto"}}, ['{"prefetch_bytes": "auto"}', "Leave the key out"]),
    ({"commfuse": {"prefetch_byte": 1}}, ["'prefetch_byte'", "did you mean 'prefetch_bytes'?", "Allowed: enabled"]),
    ({"commfuse": {"transport": "nccl"}}, ["transport='nccl'", "'shm', 'tcp', 'symmetric', 'p2p'"]),
    ({"commfuse": {"prefetch_bytes": -1}}, ["prefetch_bytes=-1", "greater than or equal to 1"]),
    ({"commfuse": {"exclude": 3}}, ["exclude=3", 'a list of names is wanted: ["lm_head"]']),
    ({"commfuse": {"exclude": "lm_head"}}, ["exclude='lm_head'", 'a list of names is wanted: ["lm_head"]']),
    ({"commfuse": "yes"}, ["is 'yes'", 'an object of settings is wanted: {"enabled": true}']),
    ({"commfuse": ["enabled"]}, ["is ['enabled']", "an object of settings"]),
    ({"commfuse": None}, ["is None", "an object of settings"]),
]


def test_auto_where_it_is_a_choice():
    check_block({"commfuse": dict.fromkeys(("fuse", "transport", "order", "kernels"), "auto")})


def refused(rank: int, world_size: int, number: int, how: str, folder: str) -> str:
    """The error, and that DeepSpeed had built nothing yet."""
    import json
    from pathlib import Path
    from types import SimpleNamespace

    from torch import nn

    config = {**settings(2), **BLOCKS[number][0]}
    with launched(rank, world_size) as deepspeed:
        arguments: dict[str, Any] = {"config": config}
        if how != "dict":
            path = Path(folder) / f"{rank}.json"
            path.write_text(json.dumps(config))
            arguments = {"config": str(path)} if how == "file" else {"args": SimpleNamespace(deepspeed_config=str(path))}
        model = nn.Linear(4, 4)
        with pytest.raises(ConfigError) as caught:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), **arguments)
        return str(caught.value)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_wrong_blocks(workers, tmp_path, number):
    how = ("dict", "file", "args")[number % 3]
    for message in workers(2).run(refused, number, how, str(tmp_path), timeout=30):
        for part in BLOCKS[number][1]:
            assert part in message, message


def alone(rank: int, world_size: int) -> str:
    with launched(rank, world_size):
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        from commfuse_dp.integrations.deepspeed.block import config_of

        assert not config_of({"commfuse": {"enabled": False}}).enabled
        assert config_of({}) is None
        with pytest.raises(ConfigError) as caught:
            config_of({"commfuse": {}})
        return str(caught.value)


def test_without_a_launcher(workers):
    for message in workers(2).run(alone):
        assert re.search(r"not started by a distributed launcher.*torchrun", message), message


# ---- ranks that differ -----------------------------------------------------------------------------------------------
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a setting": ({"slices_per_rank": 1}, {"slices_per_rank": 2}, "setting slices_per_rank = 1, rank 1 has .* = 2"),
    "on and off": ({}, {"enabled": False}, "setting enabled = True, rank 1 has setting enabled = False"),
}


def unlike(rank: int, world_size: int, stage: int) -> str:
    """Rank 1 cannot serve what rank 0 can."""

    def replace(model: Any) -> None:
        if rank == 1:
            up = model.blocks[1].up
            up.forward = lambda x: type(up).forward(up, x)

    with pytest.raises(MismatchError) as caught, started(rank, world_size, Case(settings(stage), prepare=replace), fused=True):
        pass
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_that_one_rank_cannot_serve(workers, stage):
    for message in workers(2).run(unlike, stage, timeout=30):
        for part in ("rank 1 cannot serve 'blocks.1.up' (the forward of this", "rank 0 can", "exclude=('blocks.1.up',)"):
            assert part in message, message


def different(rank: int, world_size: int, name: str, stage: int) -> str:
    case = Case(settings(stage), block=DIFFERENT[name][rank])
    with pytest.raises(MismatchError) as caught, started(rank, world_size, case, fused=True):
        pass
    return str(caught.value)


@pytest.mark.parametrize(("name", "stage"), [("a setting", 3), ("on and off", 2), ("on and off", 3)])
def test_ranks_with_different_blocks(workers, name, stage):
    for message in workers(2).run(different, name, stage, timeout=30):
        assert re.search(DIFFERENT[name][2], message) and "Start all ranks" in message, message


def nothing_excluded(rank: int, world_size: int, stage: int) -> str:
    case = Case(settings(stage), block={"exclude": ["blocks.1.upp"]})
    with pytest.raises(ConfigError) as caught, started(rank, world_size, case, fused=True):
        pass
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_exclude_that_matches_nothing(workers, stage):
    for message in workers(2).run(nothing_excluded, stage, timeout=30):
        assert "'blocks.1.upp'" in message and "matches no module" in message and "'blocks.1.up'" in message, message


# ---- blocks that are fine --------------------------------------------------------------------------------------------
def switched_off(rank: int, world_size: int, stage: int) -> None:
    from commfuse_dp.integrations.deepspeed import engine_of

    for block in (False, {**BLOCK, "enabled": False}):
        with started(rank, world_size, Case(settings(stage, commfuse=block)), fused=False) as engine:
            assert engine_of(engine) is None


@pytest.mark.parametrize("stage", [2, 3])
def test_switched_off(workers, stage):
    workers(2).run(switched_off, stage)


def from_environment(rank: int, world_size: int) -> None:
    """COMMFUSE=1 is an empty block; variables are defaults of the block's settings; COMMFUSE=0 is stronger than the block."""
    from commfuse_dp.integrations.deepspeed.block import config_of

    with launched(rank, world_size):
        os.environ.update(COMMFUSE="1", COMMFUSE_TRANSPORT="tcp", COMMFUSE_ORDER="ring")
        assert config_of({}).transport == "tcp"
        config = config_of({"commfuse": {"transport": "shm"}})
        assert (config.transport, config.order, config.enabled) == ("shm", "ring", True)
        os.environ["COMMFUSE"] = "0"
        assert not config_of({"commfuse": {"enabled": True}}).enabled


def test_block_and_environment(workers):
    workers(2).run(from_environment)
