"""DDP over CommFuse's hook, against stock DDP."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations import DDPState, ddp_hook, register_ddp
from commfuse_dp.integrations.comm_hooks import HookReport
from torch import nn

from commfuse_dp.errors import ConfigError, MismatchError
from tests.parity.ddp.nets import STEPS, Net, batch, build, config, train, worst, worst_tensor, wrap
from tests.support.cells import slow

# N = 2: halving is exact, so stock's "divide, then add" and our "add, then divide" are the same numbers. N = 3: rounding of
# the division, 6e-8 a step, over ten steps of momentum. bf16: the same with 2^-9, where stock rounds each partial of N = 3.
TOLERANCE = {("float32", 2): 0.0, ("float32", 3): 1e-5, ("bfloat16", 2): 0.0, ("bfloat16", 3): 5e-2, ("float16", 2): 0.0}


def twin(
    rank: int,
    world_size: int,
    dtype_name: str,
    accumulation: int,
    options: dict[str, Any],
    forward: dict[str, Any],
    settings: dict[str, Any],
) -> HookReport:
    dtype = getattr(torch, dtype_name)
    stock, fused = (wrap(build(dtype=dtype), **options) for _ in range(2))
    state = DDPState(fused, config(**settings))
    fused.register_comm_hook(state, ddp_hook)
    wanted, found = (train(model, accumulation=accumulation, **forward) for model in (stock, fused))
    limit = TOLERANCE[dtype_name, world_size]
    assert worst(found[0], wanted[0]) <= limit, (found[0], wanted[0])
    assert worst(found[1], wanted[1]) <= limit, (found[1], wanted[1])
    assert worst_tensor(fused.state_dict(), stock.state_dict()) <= limit
    received = state.probe.counters.grad_bytes_received
    assert received > 0 or world_size == 1
    state.close()
    return str(state.report), received


QUICK = {(2, "float32", 3), (2, "bfloat16", 1), (3, "float32", 1)}
CELLS = itertools.product((2, 3), ("float32", "bfloat16"), (1, 3))


@pytest.mark.parametrize(("world_size", "dtype", "accumulation"), [cell if cell in QUICK else slow(*cell) for cell in CELLS])
def test_training_equals_stock(workers, world_size, dtype, accumulation):
    results = workers(world_size).run(twin, dtype, accumulation, {}, {}, {})
    text = results[0][0]
    assert f"{world_size} ranks, transport shm" in text and "module" not in text
    assert "  blocks.0-2.0-1,3.weight  hooks     in a DDP bucket\n" in text, text
    # Reduce-scatter and all-gather, each (N-1)/N of all gradients, once a step whatever the accumulation.
    numel = sum(p.numel() for p in Net().parameters())
    least = 2 * (world_size - 1) / world_size * numel * getattr(torch, dtype).itemsize * STEPS
    assert sum(r for _, r in results) / world_size == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize(
    ("options", "forward"),
    [
        ({"gradient_as_bucket_view": True}, {}),
        ({"find_unused_parameters": True}, {"branch": False}),
        ({"static_graph": True}, {}),
        ({"static_graph": True, "gradient_as_bucket_view": True}, {"branch": False}),
    ],
    ids=["bucket-view", "unused", "static", "static-unused-view"],
)
def test_options_of_ddp(workers, options, forward):
    workers(2).run(twin, "float32", 1, options, forward, {})


def test_half_precision(workers):
    workers(2).run(twin, "float16", 1, {}, {}, {})


@pytest.mark.parametrize(
    "settings", [{"transport": "tcp", "order": "ring"}, {"transport": "p2p", "slices_per_rank": 3}], ids=str
)
def test_transports_and_orders(workers, settings):
    workers(2).run(twin, "float32", 1, {}, {}, settings)


def uneven(rank: int, world_size: int, options: dict[str, Any], settings: dict[str, Any], limit: float) -> None:
    """DDP's join: a rank that has run out of batches takes part with zeros."""
    models = [wrap(build(), **options) for _ in range(2)]
    register_ddp(models[1], config())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(**settings):
            for step in range(2 + 2 * rank):
                model(batch(step, torch.float32)[0]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert worst_tensor(models[1].state_dict(), models[0].state_dict()) <= limit


ACTIVE = {"divide_by_initial_world_size": False}


@pytest.mark.parametrize(
    ("world_size", "options", "settings", "limit"),
    [(2, {}, {}, 0.0), (2, {"find_unused_parameters": True}, ACTIVE, 0.0), (3, {}, ACTIVE, 1e-6)],
    ids=["all", "active", "active-of-three"],
)
def test_ranks_with_fewer_batches(workers, world_size, options, settings, limit):
    workers(world_size).run(uneven, options, settings, limit)


def uneven_complex(rank: int, world_size: int) -> None:
    """What torch sums for us is divided by the same number."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(1)
        model = wrap(nn.Linear(3, 3, dtype=torch.complex64))
        if hooked:
            register_ddp(model, config())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(**ACTIVE):
            for step in range(1 + 2 * rank):
                model(torch.full((2, 3), step + 1j)).abs().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.module.weight.detach())
    assert torch.equal(*found)


def test_complex_gradients_of_ranks_with_fewer_batches(workers):
    workers(2).run(uneven_complex)


def alone(rank: int, world_size: int) -> str:
    model = wrap(build(), process_group=dist.new_group([rank], use_local_synchronization=True))
    report = register_ddp(model, config())
    train(model, steps=2)
    return report.summary


def test_one_rank(workers):
    assert all("transport none (one rank)" in line for line in workers(2).run(alone))


# ---- overlap ---------------------------------------------------------------------------------------------------------
def backward_of_one_rank_first(rank: int, world_size: int, store_port: int) -> int:
    """Rank 1 begins its backward only when rank 0 has come to its last gradient. A hook that blocked would never get there."""
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    model = wrap(build())
    state = DDPState(model, config(deadline_s=10.0))
    model.register_comm_hook(state, ddp_hook)
    train(model, steps=1)  # the first step's buckets are those of the definition; later ones, of the order seen
    loss = model(batch(1, torch.float32)[0]).sum()
    if rank == 0:
        model.module.blocks[0][1].weight.register_hook(lambda grad: store.set("rank 0 is through", "1"))
    else:
        store.wait(["rank 0 is through"])
    before = state.probe.counters.snapshot()
    loss.backward()
    exposed = state.probe.counters.since(before)
    state.close()
    assert exposed.waits == 1  # one last bucket
    return exposed.exposed_ns


def test_backward_does_not_wait_for_a_bucket(workers):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers(2).run(backward_of_one_rank_first, store.port, timeout=30)


# ---- bad input -------------------------------------------------------------------------------------------------------
def refused(rank: int, world_size: int) -> None:
    model = wrap(build())
    for wrong, words in (
        (build(), r"DDPState was given a Net.*wrap it first"),
        ("group", r"was given a str"),
    ):
        with pytest.raises(ConfigError, match=words):
            DDPState(wrong, config())
    with pytest.raises(ConfigError, match="fuse='always'"):
        DDPState(model, config(fuse="always"))
    with pytest.raises(ConfigError, match="must be a CommFuseConfig, got dict"):
        DDPState(model, {"transport": "tcp"})
    register_ddp(model, config())
    with pytest.raises(ConfigError, match=r"already has a communication hook \(ddp_hook\)"):
        register_ddp(model, config())
    other = wrap(build())
    other.register_comm_hook(None, ddp_hook)
    with pytest.raises(ConfigError, match="state of type NoneType; it needs a DDPState"):
        train(other, steps=1)
    off = wrap(build())
    report = register_ddp(off, config(enabled=False))
    train(off, steps=2)
    assert {row.path for row in report.rows} == {"stock"} and report.rows[0].reason == "enabled=False"
    with pytest.raises(MismatchError, match="setting order"):
        DDPState(wrap(build()), config(order="ring" if rank else "pairwise"))


def copied(rank: int, world_size: int) -> None:
    """As of any DDP model: a copy without its hook, which DDP does not register for copies."""
    model = wrap(build())
    register_ddp(model, config())
    train(model, steps=2)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.module.head.weight, model.module.head.weight)
    losses = [train(m, steps=1)[0] for m in (model, twin)]
    assert losses[0] == losses[1]


def test_a_model_can_be_copied(workers):
    workers(2).run(copied)


def test_bad_input_is_named(workers):
    workers(2).run(refused)


def frozen_and_ignored(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    net = build()
    net.head.bias.requires_grad_(False)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["branch.bias"])
    report = register_ddp(wrap(net), config())
    return {row.name: (row.path, row.reason) for row in report.rows}


def test_report_names_what_stays_with_ddp(workers):
    rows = workers(2).run(frozen_and_ignored)[0]
    assert rows["head.bias"] == ("stock", "frozen: it has no gradient")
    assert rows["branch.bias"] == ("stock", "DDP was told to ignore it")
    assert rows["head.weight"] == ("hooks", "in a DDP bucket")


def lost(rank: int, world_size: int) -> str:
    model = wrap(build())
    state = DDPState(model, config(deadline_s=1.0))
    model.register_comm_hook(state, ddp_hook)
    train(model, steps=2)  # the second one's forward builds the buckets anew, over torch.distributed
    if rank == 1:
        state.close()  # says goodbye in the middle of the run
        return ""
    with pytest.raises(RuntimeError) as caught:
        train(model, steps=1)
    return str(caught.value)


def test_a_peer_that_leaves_is_named(workers):
    text = workers(2).run(lost)[0]
    assert "rank 1" in text and ("left" in text or "closed" in text or "lost" in text), text


def sparse(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))

    models = [wrap(make()) for _ in range(2)]
    register_ddp(models[1], config())
    for model in models:
        model(torch.arange(rank, rank + 5)).square().sum().backward()
    stock, fused = ([p.grad.to_dense() for p in model.parameters()] for model in models)
    for one, other in zip(stock, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_sparse_gradients_stay_with_torch(workers):
    workers(2).run(sparse)


def test_states_come_and_go(workers):
    """Nothing is left of a state whose model is gone: threads."""
    assert workers(2).run(count_threads) == [0, 0]


def count_threads(rank: int, world_size: int) -> int:
    import gc
    import threading

    def alive() -> int:
        return sum(thread.name.startswith("commfuse-ddp") for thread in threading.enumerate())

    gc.collect()
    before = alive()
    for _ in range(3):
        model = wrap(build())
        register_ddp(model, config())
        train(model, steps=1)
        del model
        gc.collect()
    limit = time.monotonic() + 60
    while alive() > before and time.monotonic() < limit:
        time.sleep(0.01)
    return alive() - before
