"""Copies of an engine's modules compute with their own weights or raise, as in stock DeepSpeed; modules called by themselves
compute with the weights of now."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.parity.deepspeed.pair import WIDTH, Block, Case, Net, Result, batch, check, loss_of, run, settings


class Plain(Net):
    """Without a function among its attributes, which no pickle would take."""

    def __init__(self) -> None:
        super().__init__()
        del self.run

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-redef]
        return block(x)


# ---- copies ----------------------------------------------------------------------------------------------------------
def averaged(module: nn.Module) -> nn.Module:
    found = AveragedModel(module)
    found.update_parameters(module)
    return found


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "averaged": averaged,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "saved": saved,
}


def outcomes(engine: Any) -> dict[tuple[str, str], Any]:
    """What copies of a layer, of a block and of the model give, with all their weights halved: a tensor, or an error's name."""
    model = engine.module
    x = torch.arange(2 * WIDTH, dtype=torch.float32).view(2, WIDTH) / 10
    parts = {"layer": (model.blocks[0].up, x), "block": (model.blocks[0], x), "model": (model, batch(0, 0)[0])}
    found: dict[tuple[str, str], Any] = {}
    for part, (module, data) in parts.items():
        for way, make in WAYS.items():
            try:
                twin = make(module)
                if way != "copy":  # that one shares the weights
                    with torch.no_grad():
                        for param in twin.parameters():
                            param.mul_(0.5)
                found[part, way] = twin(data).detach()
            except Exception as error:
                found[part, way] = type(error).__name__
    return found


def copied(rank: int, world_size: int, stage: int) -> tuple[list[Result], list[dict[tuple[str, str], Any]]]:
    """(stock, with CommFuse): training, and what copies gave on the way (ZeRO-3: at the end, as they upset stock DeepSpeed)."""
    results, found = [], []
    for fused in (False, True):
        case = Case(settings(stage), steps=2, make=Plain)
        if stage == 3:
            case.after = lambda engine: found.append(outcomes(engine))
        else:
            case.before = lambda engine, step: found.append(outcomes(engine)) if step == 1 else None
        results.append(run(rank, world_size, case, fused=fused))
    return results, found


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_copies_compute_with_their_own_weights(workers, stage):
    for (stock, ours), (theirs, mine) in workers(2).run(copied, stage, timeout=120):
        check(stock, ours)
        assert theirs.keys() == mine.keys()
        for key, wanted in theirs.items():
            assert isinstance(mine[key], str) == isinstance(wanted, str), (key, wanted, mine[key])
            if not isinstance(wanted, str):
                torch.testing.assert_close(mine[key], wanted, rtol=1e-4, atol=1e-5, msg=str(key))
        computed = {key for key, value in theirs.items() if not isinstance(value, str)}
        assert computed >= (
            {("layer", "copy")}
            if stage == 3
            else {(part, way) for part in ("layer", "block", "model") for way in ("deepcopy", "copy", "averaged")}
        )


# ---- modules called by themselves ------------------------------------------------------------------------------------
def weights(engine: Any) -> dict[str, torch.Tensor]:
    """All parameters of now, whole."""
    import deepspeed

    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[name] = param.detach().clone()
    return found


def change(engine: Any) -> None:
    """In place, on all ranks alike, as an averaging of weights does."""
    import deepspeed

    for param in engine.module.parameters():
        with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=hasattr(param, "ds_id")):
            param.mul_(0.5)


def by_itself(engine: Any, when: str) -> None:
    """A block, and a layer in it, are called outside of the model's forward."""
    now = weights(engine)
    prefix = "blocks.1."
    plain = Block()
    plain.load_state_dict({name[len(prefix) :]: value for name, value in now.items() if name.startswith(prefix)})
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    block = engine.module.blocks[1]
    for module, twin in ((block, plain), (block.down, plain.down), (block.up, plain.up)):
        data = x if twin is not plain.down else torch.linspace(-1, 1, plain.down.in_features)[None]
        torch.testing.assert_close(module(data), twin(data), rtol=1e-4, atol=1e-5, msg=f"{type(twin).__name__} {when}")


def alone(rank: int, world_size: int, stage: int, folder: str) -> None:
    from tests.parity.deepspeed.pair import started, train_micro

    case = Case(settings(stage))
    with started(rank, world_size, case, fused=True) as engine:
        train_micro(case, engine, rank, 0)
        engine.save_checkpoint(folder)
        by_itself(engine, "after a step")
        change(engine)
        by_itself(engine, "after a change")
        loss_of(engine, batch(rank, 1))
        by_itself(engine, "after a forward without backward")
        change(engine)
        by_itself(engine, "after a forward without backward, and a change")
        train_micro(case, engine, rank, 2)
        loss_of(engine, batch(rank, 3))
        engine.load_checkpoint(folder)
        by_itself(engine, "after a forward without backward, and a checkpoint")
        engine.eval()
        with torch.no_grad():
            loss_of(engine, batch(rank, 4))
            by_itself(engine, "in eval")
            change(engine)
            by_itself(engine, "in eval, after a change")


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_called_by_itself(workers, tmp_path, stage):
    workers(2).run(alone, stage, str(tmp_path), timeout=120)
