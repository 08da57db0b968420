"""FSDP1 over CommFuse's hook, against stock FSDP1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations import FSDP1State, fsdp1_compat, fsdp1_hook, register_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from commfuse_dp.errors import ConfigError, MismatchError
from tests.parity.ddp.nets import STEPS, Net, batch, build, config, train, worst, worst_tensor
from tests.support.cells import slow

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_FP32 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# fp32, N = 2: halving is exact, so stock's "divide, then add" and our "add, then divide" give the same numbers. N = 3: the
# rounding of stock's divisions (by sqrt(N)-like factors, before and after), over ten steps of momentum. Reduction in bf16:
# stock rounds the sum to bf16 (2^-9), ours goes into the fp32 shard unrounded.
EXACT, FP32, REDUCED_BF16 = 0.0, 1e-5, 3e-2


def wrap(net: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FSDP:
    policy = ModuleWrapPolicy({nn.Sequential})
    return FSDP(
        net, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu"), **options
    )


def clip_of(model: FSDP) -> Any:
    return lambda _params, limit: model.clip_grad_norm_(limit)


def fit(model: FSDP, **kw: Any) -> tuple[list[float], list[float]]:
    return train(model, clip=clip_of(model), **kw)


def whole(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def twin(
    rank: int,
    world_size: int,
    strategy: str,
    accumulation: int,
    limit: float,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[str, int, int]:
    """(report, bytes of gradients received, reductions that were left to run behind backward)."""
    stock, fused = (wrap(build(), strategy, **options) for _ in range(2))
    state = FSDP1State(fused, config(**settings))
    fused.register_comm_hook(state, fsdp1_hook)
    later = 0
    submit = state._submit

    def counting(work: Any, nbytes: int, may_wait: bool) -> None:
        nonlocal later
        later += may_wait
        submit(work, nbytes, may_wait)

    state._submit = counting  # type: ignore[method-assign]
    wanted, found = (fit(model, accumulation=accumulation) for model in (stock, fused))
    assert worst(found[0], wanted[0]) <= limit, (found[0], wanted[0])
    assert worst(found[1], wanted[1]) <= limit, (found[1], wanted[1])
    assert worst_tensor(whole(fused), whole(stock)) <= limit
    received = state.probe.counters.grad_bytes_received
    state.close()
    return str(state.report), received, later


def cells() -> Iterator[Any]:
    """All 24; make test runs four, in which every value occurs."""
    quick = {
        (2, "FULL_SHARD", "bf16", 1),
        (2, "SHARD_GRAD_OP", "fp32", 3),
        (2, "NO_SHARD", "fp32", 1),
        (3, "FULL_SHARD", "fp32", 1),
    }
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for cell in itertools.product((2, 3), strategies, ("fp32", "bf16"), (1, 3)):
        yield pytest.param(*cell, marks=() if cell in quick else pytest.mark.slow)


@pytest.mark.parametrize(("world_size", "strategy", "precision", "accumulation"), list(cells()))
def test_training_equals_stock(workers, world_size, strategy, precision, accumulation):
    limit = REDUCED_BF16 if precision == "bf16" else EXACT if world_size == 2 else FP32
    options = {"mixed_precision": BF16} if precision == "bf16" else {}
    results = workers(world_size).run(twin, strategy, accumulation, limit, options, {})
    text, _, later = results[0]
    assert f"{world_size} ranks, transport shm" in text
    assert "  blocks.0-2.0-1,3.weight  hooks     in a flat parameter\n" in text, text
    units = 4  # three blocks and the root
    assert later == (0 if strategy == "NO_SHARD" else units * STEPS - 1)  # the very first tells the modules apart
    numel = sum(p.numel() for p in Net().parameters())
    rounds = 2 if strategy == "NO_SHARD" else 1
    least = rounds * (world_size - 1) / world_size * numel * (2 if precision == "bf16" else 4) * STEPS
    assert sum(received for _, received, _ in results) / world_size == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": True},
        {"mixed_precision": BF16_FP32},
        slow({"backward_prefetch": None}),
        slow({"mixed_precision": MixedPrecision(reduce_dtype=torch.float32, keep_low_precision_grads=True)}),
    ],
    ids=["orig-params", "bf16-fp32", "no-prefetch", "keep-low"],
)
def test_options_of_fsdp(workers, options):
    workers(2).run(twin, "FULL_SHARD", 2, EXACT, options, {})


@pytest.mark.parametrize(
    "settings",
    [{"transport": "tcp", "order": "ring"}, {"transport": "p2p", "slices_per_rank": 2, "prefetch_bytes": 1}],
    ids=str,
)
def test_transports_orders_and_a_window_of_one(workers, settings):
    workers(2).run(twin, "SHARD_GRAD_OP", 1, EXACT, {}, settings)


def summed_without_no_sync(rank: int, world_size: int) -> None:
    """Several backwards before the optimizer, each reduced: FSDP1 adds shards up as soon as the hook returns."""
    models = [wrap(build()) for _ in range(2)]
    register_fsdp1(models[1], config())
    for _ in range(2):
        for model in models:
            for part in range(3):
                model(batch(0, torch.float32, part)[0]).square().mean().backward()
        stock, fused = ([p.grad.clone() for p in model.parameters()] for model in models)
        assert all(torch.equal(one, other) for one, other in zip(stock, fused, strict=True))
        for model in models:
            model.zero_grad()


def test_accumulation_with_reduction(workers):
    workers(2).run(summed_without_no_sync)


def without_private_names(rank: int, world_size: int) -> str:
    names = fsdp1_compat._HANDLE_FIELDS
    try:
        fsdp1_compat._HANDLE_FIELDS = (*names, "renamed_in_a_later_torch")
        report, _, later = twin(rank, world_size, "FULL_SHARD", 1, EXACT, {}, {})
    finally:
        fsdp1_compat._HANDLE_FIELDS = names
    assert later == 0
    return report


def test_without_the_private_names_backward_waits(workers):
    assert "blocking: torch" in (text := workers(2).run(without_private_names)[0]) and "renamed_in_a_later_torch" in text


def backward_of_one_rank_first(rank: int, world_size: int, port: int) -> None:
    """Rank 1 begins its backward only when rank 0 has come to its first block's gradient."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model = wrap(build(), "SHARD_GRAD_OP")  # no all-gather in backward, in which rank 0 would have to wait for rank 1
    state = FSDP1State(model, config(deadline_s=10.0))
    model.register_comm_hook(state, fsdp1_hook)
    fit(model, steps=2)
    x = batch(5, torch.float32)[0].requires_grad_()
    loss = model(x).sum()
    if rank == 0:
        x.register_hook(lambda grad: store.set("rank 0 is through", "1"))  # the last gradient of all
    else:
        store.wait(["rank 0 is through"])
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    state.close()


def test_backward_does_not_wait_for_a_reduction(workers):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers(2).run(backward_of_one_rank_first, store.port, timeout=30)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def carried_over(rank: int, world_size: int, first_fused: bool) -> None:
    """Three steps, checkpoint, load into the other kind, three more: as six steps of stock."""

    def make(fused: bool) -> tuple[FSDP, torch.optim.Optimizer]:
        model = wrap(build(seed=3 if fused == first_fused else 99), use_orig_params=True)
        if fused:
            register_fsdp1(model, config())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    straight, straight_optimizer = wrap(build(seed=3), use_orig_params=True), None
    straight_optimizer = torch.optim.SGD(straight.parameters(), lr=0.1, momentum=0.9)
    wanted = fit(straight, steps=6, optimizer=straight_optimizer)[0]
    model, optimizer = make(first_fused)
    found = fit(model, steps=3, optimizer=optimizer)[0]
    state, moments = whole(model), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    other, other_optimizer = make(not first_fused)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(state)
    other_optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(moments, other))
    found += fit(other, steps=3, start=3, optimizer=other_optimizer)[0]
    assert found == wanted
    assert worst_tensor(whole(other), whole(straight)) == 0.0


@pytest.mark.parametrize("first_fused", [True, False], ids=["fused-to-stock", "stock-to-fused"])
def test_checkpoints_go_both_ways(workers, first_fused):
    workers(2).run(carried_over, first_fused)


# ---- bad input -------------------------------------------------------------------------------------------------------
def refused(rank: int, world_size: int) -> None:
    model = wrap(build())
    with pytest.raises(ConfigError, match=r"part of a larger FSDP1 model.*outermost module \(Net\)"):
        FSDP1State(model.module.blocks[0], config())
    fit(model, steps=1)  # and that has not harmed it
    with pytest.raises(ConfigError, match="before the first forward"):
        FSDP1State(model, config())
    with pytest.raises(ConfigError, match="got a Net: wrap it first"):
        FSDP1State(build(), config())  # type: ignore[arg-type]
    fused = wrap(build())
    register_fsdp1(fused, config())
    with pytest.raises(ConfigError, match=r"already has a communication hook \(fsdp1_hook\)"):
        register_fsdp1(fused, config())
    other = wrap(build())
    other.register_comm_hook(None, fsdp1_hook)
    with pytest.raises(ConfigError, match="state of type NoneType; it needs a FSDP1State"):
        fit(other, steps=1)
    mesh = dist.init_device_mesh("cpu", (1, world_size))
    hybrid = FSDP(build(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"uses HYBRID_SHARD.*fully_shard"):
        FSDP1State(hybrid, config())
    with pytest.raises(ConfigError, match="fuse='always'"):
        FSDP1State(wrap(build()), config(fuse="always"))
    with pytest.raises(MismatchError, match="setting inbox_bytes"):
        FSDP1State(wrap(build()), config(inbox_bytes=1 << (16 + rank)))


def test_bad_input_is_named(workers):
    workers(2).run(refused)


def off_and_alone(rank: int, world_size: int) -> tuple[str, str]:
    off = wrap(build())
    report = register_fsdp1(off, config(enabled=False))
    fit(off, steps=2)
    alone = wrap(build(), process_group=dist.new_group([rank], use_local_synchronization=True))
    single = register_fsdp1(alone, config())
    fit(alone, steps=2)
    return str(report), str(single)


def test_off_and_one_rank(workers):
    off, single = workers(2).run(off_and_alone)[0]
    assert "stock     enabled=False" in off and "transport none (one rank)" in single


def lost(rank: int, world_size: int) -> str:
    model = wrap(build(), "SHARD_GRAD_OP")
    state = FSDP1State(model, config(deadline_s=2.0))
    model.register_comm_hook(state, fsdp1_hook)
    fit(model, steps=2)
    loss = model(batch(9, torch.float32)[0]).sum()  # all-gathers: both ranks
    if rank == 1:
        state.close()
        return ""
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_peer_that_leaves_is_named(workers):
    text = workers(2).run(lost)[0]
    assert text.startswith("PeerLostError: ") and "rank 1" in text, text
