"""DeepSpeed's options and ways of training, one by one, against stock DeepSpeed: two ranks, fp32 unless said otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.deepspeed.pair import TOKENS, Case, Net, Result, adamw, batch, both, check, loss_of, run, settings, sgd
from tests.support.selective import selective

ALL = (1, 2, 3)
MOST = (2, 3)  # where ZeRO-1 goes the way of ZeRO-2
SHARDED = (2, 3)  # where ZeRO-1 goes the way of ZeRO-2


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.head.in_features, TOKENS, bias=False)
        self.head.weight = self.embedding.weight


class Reads(Net):
    """Its forward also reads the weight of a layer that it calls."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (1 + self.blocks[1].up.weight.square().mean())


def freeze(net: Net) -> None:
    for param in (net.embedding.weight, net.blocks[0].norm.weight, net.blocks[1].up.weight, net.head.bias):
        param.requires_grad_(False)


def recompute(how: str) -> Callable[[Net], None]:
    def prepare(net: Net) -> None:
        if how == "deepspeed":
            import deepspeed

            deepspeed.checkpointing.configure(None, partition_activations=False)
            net.run = lambda block, x: deepspeed.checkpointing.checkpoint(block, x)
        elif how == "selective":
            net.run = selective("every second product")
        else:
            net.run = lambda block, x: checkpoint(block, x, use_reentrant=how == "reentrant")

    return prepare


def late(net: Net) -> None:
    """One rank is behind, now in this layer, now in that one: forward and backward."""

    def wait(module: nn.Module, *_: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1
        if (module.calls + module.number + dist.get_rank()) % 3 == 0:
            time.sleep(0.01)

    for number, block in enumerate(net.blocks):
        block.number = number
        block.up.number, block.down.number = number + 1, number + 2
        block.register_forward_pre_hook(wait)
        block.up.register_forward_hook(wait)
        block.down.register_full_backward_hook(wait)


def order(*orders: list[int]) -> Callable[[Any, int], None]:
    def before(engine: Any, step: int) -> None:
        engine.module.order = orders[step % len(orders)]

    return before


def evaluate(engine: Any, step: int) -> None:
    engine.eval()
    with torch.no_grad():
        loss_of(engine, batch(0, 1000 + step))
    engine.train()


def evaluate_between(engine: Any, rank: int, number: int) -> torch.Tensor:
    """An evaluation between forward and backward."""
    loss = loss_of(engine, batch(rank, number))
    with torch.no_grad():
        loss_of(engine, batch(rank, 1000 + number))
    engine.backward(loss)
    engine.step()
    return loss


def direct(engine: Any, rank: int, number: int) -> torch.Tensor:
    loss = loss_of(engine, batch(rank, number))
    loss.backward()
    engine.step()
    return loss


def two_forwards(engine: Any, rank: int, number: int) -> torch.Tensor:
    """Two forwards, one backward."""
    loss = loss_of(engine, batch(rank, number)) + loss_of(engine, batch(rank, number + 500))
    engine.backward(loss)
    engine.step()
    return loss


def coalesced(engine: Any, rank: int, number: int) -> torch.Tensor:
    """Several backwards whose gradients are reduced together."""
    with engine.coalesce_grad_reduction():
        for more in range(2):
            loss = loss_of(engine, batch(rank, 2 * number + more))
            engine.backward(loss)
    engine.step()
    return loss


class Outside(Net):
    """One block computes without autocast."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if block is not self.blocks[1]:
                return block(x)
            with torch.autocast("cpu", enabled=False):
                return block(x.float())

        self.run = run
        return super().forward(tokens)


def uncounted(engine: Any, rank: int, number: int) -> torch.Tensor:
    """The caller alone says what a window is: microbatches of 1, 2 and 3 between the steps, in turns."""
    for micro in range(1 + number % 3):
        loss = loss_of(engine, batch(rank, 3 * number + micro))
        engine.backward(loss)
    engine.step()
    return loss


def unsynchronised(engine: Any, rank: int, number: int) -> torch.Tensor:
    """Two backwards that reduce nothing, and one that does."""
    with engine.no_sync():
        for micro in range(2):
            engine.backward(loss_of(engine, batch(rank, 3 * number + micro)))
    loss = loss_of(engine, batch(rank, 3 * number + 2))
    engine.backward(loss)
    engine.step()
    return loss


def cleared(engine: Any, rank: int, number: int) -> torch.Tensor:
    """Of every window of three microbatches the first is given up."""
    loss = loss_of(engine, batch(rank, number))
    engine.backward(loss)
    if number % 3 == 0:
        (engine if number % 2 else engine.optimizer).zero_grad()
    engine.step()
    return loss


def groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    flat = [param for param in params if len(getattr(param, "ds_shape", param.shape)) == 1]
    rest = [param for param in params if len(getattr(param, "ds_shape", param.shape)) != 1]
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": rest}], lr=1e-2, eps=1e-4, weight_decay=0.1)


def client(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


AUTOCAST = {"enabled": True, "dtype": "bfloat16"}  # the parameters stay in fp32
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 3}}

# name -> (stages, the case at a stage)
FP32 = {"grad_accum_dtype": "fp32"}
OPTIONS: dict[str, tuple[tuple[int, ...], Callable[[int], Case]]] = {
    "clipping": (ALL, lambda s: Case(settings(s, gradient_clipping=0.05))),
    "AdamW": (SHARDED, lambda s: Case(settings(s, optimizer=adamw(), gradient_clipping=1.0, scheduler=WARMUP))),
    "client optimizer": (ALL, lambda s: Case(settings(s, accumulation=2), optimizer=client)),
    "groups": (SHARDED, lambda s: Case(settings(s), optimizer=groups)),
    "overlap_comm": (MOST, lambda s: Case(settings(s, zero={"overlap_comm": True}, accumulation=2))),
    "no overlap_comm": (SHARDED, lambda s: Case(settings(s, zero={"overlap_comm": False}))),
    "not contiguous": (MOST, lambda s: Case(settings(s, zero={"contiguous_gradients": False}, accumulation=2))),
    "round robin": ((1, 2), lambda s: Case(settings(s, zero={"round_robin_gradients": True}, accumulation=2))),
    "no reduce_scatter": (MOST, lambda s: Case(settings(s, zero={"reduce_scatter": False}))),
    "prescaled": ((1,), lambda s: Case(settings(s, prescale_gradients=True, gradient_predivide_factor=2.0))),
    "tiny buckets": (
        (3,),
        lambda s: Case(
            settings(
                s,
                zero={
                    "stage3_prefetch_bucket_size": 0,
                    "stage3_max_live_parameters": 0,
                    "stage3_max_reuse_distance": 0,
                    "stage3_param_persistence_threshold": 0,
                },
            )
        ),
    ),
    "all persistent": ((3,), lambda s: Case(settings(s, zero={"stage3_param_persistence_threshold": 10**6}))),
    "zero.Init": ((3,), lambda s: Case(settings(s), zero_init=True)),
    "zero.Init bf16": ((3,), lambda s: Case(settings(s, dtype="bf16"), zero_init=True)),
    "communicated in fp32": (MOST, lambda s: Case(settings(s, dtype="bf16", communication_data_type="fp32"))),
    "accumulated in fp32": (MOST, lambda s: Case(settings(s, dtype="bf16", accumulation=2, data_types=FP32))),
    "accumulated at the boundary": (
        (1,),  # another optimizer, BF16_Optimizer, which does not partition gradients
        lambda s: Case(settings(s, bf16={"enabled": True, "immediate_grad_update": False}, accumulation=2, data_types=FP32)),
    ),
    "frozen": (MOST, lambda s: Case(settings(s, accumulation=2), prepare=freeze)),
    "tied": (SHARDED, lambda s: Case(settings(s), make=Tied)),
    "reentrant": (MOST, lambda s: Case(settings(s, accumulation=2), prepare=recompute("reentrant"))),
    "not reentrant": (SHARDED, lambda s: Case(settings(s), prepare=recompute("not reentrant"))),
    "selective": (SHARDED, lambda s: Case(settings(s), prepare=recompute("selective"), block={"transport": "tcp"})),
    "deepspeed.checkpointing": (SHARDED, lambda s: Case(settings(s), prepare=recompute("deepspeed"))),
    "order changes": (SHARDED, lambda s: Case(settings(s), steps=6, before=order([0, 1, 2], [2, 1, 0], [1, 0, 2]))),
    "used twice": (ALL, lambda s: Case(settings(s, accumulation=2), before=order([0, 1, 1, 2], [0, 1, 0, 2]))),
    "unused": (ALL, lambda s: Case(settings(s), steps=5, before=order([0, 1, 2], [0, 2], [0, 1]))),
    "evaluation": (SHARDED, lambda s: Case(settings(s), before=evaluate)),
    "evaluation between": (MOST, lambda s: Case(settings(s), train=evaluate_between)),
    "loss.backward": (MOST, lambda s: Case(settings(s, accumulation=2), train=direct)),
    "two forwards": (MOST, lambda s: Case(settings(s), train=two_forwards)),
    "coalesced": (ALL, lambda s: Case(settings(s), train=coalesced)),
    "torch_autocast": (ALL, lambda s: Case(settings(s, torch_autocast=AUTOCAST, accumulation=2))),
    "torch_autocast in part": (SHARDED, lambda s: Case(settings(s, torch_autocast=AUTOCAST), make=Outside)),
    "no_sync": ((1,), lambda s: Case(settings(s), train=unsynchronised)),
    "cleared": ((1,), lambda s: Case(settings(s, accumulation=3), train=cleared)),
    "summed": ((1, 2), lambda s: Case(settings(s, gradient_allreduce_op="sum", optimizer=sgd(lr=0.05)))),
    "uncounted": (ALL, lambda s: Case(settings(s, managed_gradient_accumulation=False), train=uncounted)),
    "late ranks": (
        ALL,
        lambda s: Case(settings(s, accumulation=2), prepare=late, block={"inbox_bytes": 8192, "transport": "tcp"}),
    ),
    # one bucket: what autograd gives for that weight waits in it until the end of the backward
    "weight read": (MOST, lambda s: Case(settings(s, accumulation=2, zero={"reduce_bucket_size": 10**6}), make=Reads)),
    "twice, recomputed": (
        ALL,  # stock ZeRO-2 and 3 refuse this with reentrant checkpointing
        lambda s: Case(
            settings(s),
            prepare=recompute("reentrant" if s == 1 else "not reentrant"),
            before=order([0, 1, 1, 2], [0, 1, 0, 2]),
        ),
    ),
}


# What these change is when and how bytes move, not what is computed: the training of each is that of stock DeepSpeed without
# the option, which is run once per stage and accumulation in a process. (Two ranks: a sum of two terms has one value.)
AS_PLAIN = {
    "overlap_comm",
    "no overlap_comm",
    "not contiguous",
    "round robin",
    "no reduce_scatter",
    "prescaled",
    "tiny buckets",
    "all persistent",
    "zero.Init",
    "reentrant",
    "not reentrant",
    "selective",
    "deepspeed.checkpointing",
    "evaluation",
    "loss.backward",
    "late ranks",
}
_plain: dict[tuple[int, int], Result] = {}  # (stage, accumulation) -> stock, in a worker's process


def option(rank: int, world_size: int, name: str, stage: int) -> tuple[Result, Result]:
    case = OPTIONS[name][1](stage)
    if name not in AS_PLAIN:
        return both(rank, world_size, case)
    accumulation = case.settings["gradient_accumulation_steps"]
    if (stage, accumulation) not in _plain:
        plain = Case(settings(stage, accumulation=accumulation), steps=case.steps)
        _plain[stage, accumulation] = run(rank, world_size, plain, fused=False)
    return _plain[stage, accumulation], run(rank, world_size, case, fused=True)


def cells() -> Iterator[Any]:
    """make test runs an option under the highest stage that it is for, and one under ZeRO-1, too, whose path is another."""
    variations = (  # other options, or other tests here, have each of their parts
        "AdamW",
        "accumulated in fp32",
        "evaluation",
        "groups",
        "no overlap_comm",
        "not reentrant",
        "order changes",
        "reentrant",
        "summed",
        "torch_autocast",
        "two forwards",
        "uncounted",
        "used twice",
        "zero.Init",
    )
    both = ("coalesced", "uncounted")
    for name, (stages, _) in OPTIONS.items():
        for stage in stages:
            quick = (stage == max(stages) and name not in variations) or (stage == min(stages) and name in both)
            yield pytest.param(name, stage, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_same_as_stock(workers, name, stage):
    dtype = "bf16" if {"bf16", "torch_autocast"} & OPTIONS[name][1](stage).settings.keys() else "fp32"
    for stock, ours in workers(2).run(option, name, stage, timeout=90):
        check(stock, ours, dtype=dtype)
        if name == "all persistent":
            assert "kept whole" in ours.reasons["head.weight"] and "fused" not in ours.paths.values()
        elif name == "accumulated at the boundary":
            assert "BF16_Optimizer" in ours.reasons["head.weight"] and "fused" not in ours.paths.values()
        else:
            assert ours.paths["blocks.0.up.weight"] == "fused"
        if name == "tied":
            assert "shared" in ours.reasons["embedding.weight"] and ours.paths["embedding.weight"] == "hooks"
