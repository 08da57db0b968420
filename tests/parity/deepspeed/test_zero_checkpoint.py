"""Checkpoints of DeepSpeed, written with CommFuse and read without, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.deepspeed.pair import Case, Result, adamw, check, settings, sgd, started, train_micro, whole
from tests.support.cells import slow


def train(rank: int, world_size: int, case: Case, fused: bool, steps: range, *, load: str = "", save: str = "") -> Result:
    """Steps numbered as in one long run; from and to a checkpoint folder."""
    with started(rank, world_size, case, fused=fused) as engine:
        if load:
            path, extra = engine.load_checkpoint(load)
            assert path is not None and extra["step"] == steps.start
        before = whole(engine)
        losses, norms = [], []
        accumulation = int(engine.gradient_accumulation_steps())
        for step in steps:
            losses += [train_micro(case, engine, rank, step * accumulation + micro) for micro in range(accumulation)]
            norms.append(float(engine.get_global_grad_norm()))
        if save:
            engine.save_checkpoint(save, client_state={"step": steps.stop})
        result = Result(losses, norms, before, whole(engine), {}, {}, [])
        if save and int(engine.zero_optimization_stage()) == 3:
            assert engine.save_16bit_model(save, "model.bin")
            saved = torch.load(Path(save) / "model.bin") if rank == 0 else {}  # the other ranks do not wait for the file
            for name, param in saved.items():
                assert torch.equal(param, result.after[name].to(param.dtype)), name
            assert rank != 0 or saved.keys() == result.after.keys()
        return result


def exchange(rank: int, world_size: int, stage: int, dtype: str, folder: str) -> list[Result]:
    """[six steps of stock, three of stock and three with CommFuse, three with and three of stock]"""
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    optimizer = adamw() if dtype == "fp32" else sgd()  # for bf16 see test_matrix.py
    case = Case(settings(stage, dtype=dtype, accumulation=2, optimizer=optimizer, zero=zero))
    straight = train(rank, world_size, case, False, range(6))
    results = [straight]
    for fused in (False, True):
        place = f"{folder}/{fused}"
        first = train(rank, world_size, case, fused, range(3), save=place)
        second = train(rank, world_size, case, not fused, range(3, 6), load=place)
        for name, param in first.after.items():
            assert torch.equal(param, second.before[name]), f"{name} was not loaded as it was saved"
        losses, norms = first.losses + second.losses, first.norms + second.norms
        results.append(Result(losses, norms, first.before, second.after, {}, {}, []))
    return results


@pytest.mark.parametrize(("stage", "dtype"), [slow(1, "fp32"), (2, "bf16"), (3, "fp32"), slow(3, "bf16")])
def test_both_ways(workers, tmp_path, stage, dtype):
    for straight, *others in workers(2).run(exchange, stage, dtype, str(tmp_path), timeout=120):
        for other in others:
            check(straight, other, dtype=dtype)
