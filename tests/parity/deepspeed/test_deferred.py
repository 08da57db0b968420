"""defer_gather: the all-gather of ZeRO-1/2 under the next forward; whoever looks earlier, through the model, waits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import attachment_of

from tests.parity.deepspeed.pair import Case, Result, batch, both, check, loss_of, run, settings, started, train_micro
from tests.support.cells import slow
from tests.support.memory import held_for_messages, said_and_taken

DEFER = {"defer_gather": True}


def trained(rank: int, world_size: int, stage: int, dtype: str, accumulation: int, transport: str) -> tuple[Result, Result]:
    block = {**DEFER, "transport": transport}
    return both(rank, world_size, Case(settings(stage, dtype=dtype, accumulation=accumulation), steps=6, block=block))


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "accumulation", "transport"),
    [
        (2, 1, "fp32", 1, "shm"),
        (2, 2, "fp32", 2, "tcp"),
        slow(3, 2, "fp32", 2, "tcp"),
        slow(2, 2, "bf16", 1, "tcp"),
        slow(3, 1, "bf16", 3, "shm"),
        slow(3, 2, "fp32", 1, "p2p"),
    ],
)
def test_training_is_that_of_stock(workers, world_size, stage, dtype, accumulation, transport):
    for stock, ours in workers(world_size).run(trained, stage, dtype, accumulation, transport, timeout=90):
        check(stock, ours, dtype=dtype)


def looked_at(rank: int, world_size: int, how: str) -> None:
    """After every step rank 0 alone reads the model, before its next forward; the values are those of after the step."""
    stock = run(rank, world_size, Case(settings(2), steps=3), fused=False)
    case = Case(settings(2), steps=3, block={**DEFER, "transport": "tcp"})
    with started(rank, world_size, case, fused=True) as engine:
        held = dict(engine.module.named_parameters())  # taken out before: reads of these are not seen
        for step in range(3):
            train_micro(case, engine, rank, step)
            if rank == 0:
                seen = _read(engine.module, how)
                for name, value in seen.items():
                    assert torch.equal(value, held[name].detach()), f"{name} was read before it had come"
            dist.barrier()
        if rank == 0:
            for name, value in _read(engine.module, how).items():
                moved = (stock.after[name] - stock.before[name]).abs().max()
                assert (value.float() - stock.after[name]).abs().max() <= 1e-4 * moved + 1e-9, name
        dist.barrier()


def _read(model: torch.nn.Module, how: str) -> dict[str, torch.Tensor]:
    if how == "state_dict":
        return {name: value.clone() for name, value in model.state_dict().items()}
    if how == "parameters":
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    if how == "copy":
        twin = copy.deepcopy(model)
        assert all(type(module._parameters) is dict for module in twin.modules())
        return {name: param.detach().clone() for name, param in twin.named_parameters()}
    return {"head.weight": model.head.weight.detach().clone(), "scale": model.scale.detach().clone()}  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("how", ["state_dict", "parameters", "copy", "attribute"])
def test_a_look_between_the_steps_waits(workers, how):
    workers(2).run(looked_at, how, timeout=60)


def offloaded(engine: Any, rank: int, number: int) -> torch.Tensor:
    """The parameters go to other memory, and come back, before anybody has read them."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    loss = loss_of(engine, batch(rank, number))
    engine.backward(loss)
    engine.step()
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=True)
    engine.reload_states()
    return loss


def moved(rank: int, world_size: int, stage: int) -> tuple[Result, Result]:
    return both(rank, world_size, Case(settings(stage), steps=3, train=offloaded, block={**DEFER, "transport": "tcp"}))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_under_way_goes_along_when_states_are_offloaded(workers, stage):
    for stock, ours in workers(2).run(moved, stage, timeout=60):
        check(stock, ours)


def steps_return_early(rank: int, world_size: int) -> tuple[bool, bool]:
    """(something is under way after a step, and after the next forward), seen without waiting."""
    from commfuse_dp.integrations.deepspeed.deferred import _Waiting

    case = Case(settings(1), steps=2, block=DEFER)
    with started(rank, world_size, case, fused=True) as engine:
        gather = next(m._parameters for m in engine.module.modules() if isinstance(m._parameters, _Waiting))._gather
        train_micro(case, engine, rank, 0)
        after_step = gather.pending
        with torch.no_grad():
            engine(torch.zeros(2, 5, dtype=torch.long))
        return after_step, gather.pending


def test_the_gather_is_over_with_the_next_forward(workers):
    assert workers(2).run(steps_return_early, timeout=60) == [(True, False)] * 2


def concerns_nobody(rank: int, world_size: int) -> tuple[Any, list[str]]:
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener, log = Listener(), logging.getLogger("commfuse_dp")
    log.addHandler(listener)
    try:
        pair = both(rank, world_size, Case(settings(3), steps=2, block=DEFER))
    finally:
        log.removeHandler(listener)
    return pair, heard


def test_under_zero_3_it_is_said_to_be_without_effect(workers):
    for (stock, ours), heard in workers(2).run(concerns_nobody, timeout=60):
        check(stock, ours)
        assert any("defer_gather concerns ZeRO-1 and 2" in text for text in heard)


def announced(rank: int, world_size: int) -> None:
    """Of the engine's transport, and of that of the deferred gather."""
    with (
        said_and_taken() as events,
        started(rank, world_size, Case(settings(2), block={**DEFER, "transport": "shm"}), fused=True) as engine,
    ):
        report = attachment_of(engine).report
        records, held = events[::2], [held_for_messages(memory) for memory in events[1::2]]
        for record, memory, title in zip(
            records, (report.memory, report.deferred_gather), ("", " of the deferred gather"), strict=True
        ):
            assert isinstance(record, logging.LogRecord) and str(memory) in record.getMessage()
            assert f"  memory{title}: {memory}" in str(report)
        assert held == [report.memory.share.nbytes, report.deferred_gather.share.nbytes]
        numel = sum(param.numel() for param in engine.module.parameters())
        assert 0 <= world_size * report.deferred_gather.published - 4 * numel < 4096


def test_memory_is_announced_and_reported(workers):
    workers(2).run(announced)
