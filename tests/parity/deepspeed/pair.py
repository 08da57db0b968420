"""The same training run on stock DeepSpeed and with the block "commfuse", in the same processes, and how the two are compared.

The two runs come one after the other, each with an engine of its own that is destroyed at its end: DeepSpeed's communication
backend is one global of the process, and the stock run must not see ours.
"""

from __future__ import annotations

import copy
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F

from commfuse_dp import autoload
from commfuse_dp.probe import Counters

TOKENS, WIDTH, HIDDEN, CLASSES = 13, 12, 37, 11  # 2 and 3 ranks divide neither the rows nor most of the sizes
BLOCK = {"enabled": True, "deadline_s": 20.0, "inbox_bytes": 1 << 20, "prefetch_bytes": 1 << 20}
SEED = 4321


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids [batch, length] -> logits. `order`: the blocks to run; `run`: how a block is called."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(WIDTH))  # no layer's weight: stays with DeepSpeed
        self.head = nn.Linear(WIDTH, CLASSES)
        self.order = list(range(blocks))
        self.run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.run(self.blocks[index], x)
        return self.head(x * self.scale)


def sgd(**more: Any) -> dict[str, Any]:
    return {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, **more}}


def adamw(**more: Any) -> dict[str, Any]:
    # eps well above the rounding of gradients: Adam divides by |g| + eps, and would blow up the last bits of tiny gradients
    return {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True, **more}}


def settings(
    stage: int, *, dtype: str = "fp32", accumulation: int = 1, zero: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A DeepSpeed configuration. Small buckets: several a step; parameters of up to 40 elements are kept whole by ZeRO-3."""
    small = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 600} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 600, **small, **(zero or {})},
        "optimizer": sgd(),
        "zero_allow_untested_optimizer": True,  # SGD
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **more,
    }


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of this rank's microbatch `number`."""
    generator = torch.Generator().manual_seed(SEED + 100 * number + rank)
    return (
        torch.randint(0, TOKENS, (2, 5), generator=generator),
        torch.randint(0, CLASSES, (2, 5), generator=generator),
    )


def loss_of(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, wanted = data
    return F.cross_entropy(model(tokens).float().flatten(0, 1), wanted.flatten())


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[Any]:
    """What a launcher tells its processes; yields deepspeed, with the hooks that `import torch` prepares."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,  # never opened: the group exists
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": world_size,  # else DeepSpeed asks lscpu 28 times in four steps
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMMFUSE")}
    kept |= {name: str(value) for name, value in variables.items()}
    # ZeRO-3 leaves a linear of its own in the place of F.linear, without forward mode, say.
    with mock.patch.dict(os.environ, kept, clear=True), mock.patch.object(F, "linear", F.linear):
        autoload.activate()  # as the entry point does
        import deepspeed
        from deepspeed.runtime import torch_autocast

        # DeepSpeed remembers for the whole process that an engine of it has had the block "torch_autocast".
        vars(torch_autocast).update(TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None)
        # DeepSpeed compiles nothing: its all-reduce of inference takes a minute, under a lock that a killed rank leaves behind.
        vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)
        deepspeed.utils.logger.setLevel("ERROR")
        yield deepspeed


@dataclass
class Case:
    """What is trained, how, and for how long."""

    settings: dict[str, Any]
    steps: int = 4
    make: Callable[[], nn.Module] = Net
    prepare: Callable[[nn.Module], Any] = lambda model: None  # after construction, before deepspeed.initialize
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None  # from parameters: a client optimizer
    before: Callable[[Any, int], None] = lambda engine, step: None  # called with the DeepSpeed engine and the step's number
    after: Callable[[Any], Any] = lambda engine: None  # called with it after the last step, all results being taken
    zero_init: bool = False
    block: dict[str, Any] = field(default_factory=dict)  # settings of CommFuse
    train: Callable[[Any, int, int], torch.Tensor] | None = None  # own microbatch: (engine, rank, number) -> loss


@dataclass
class Result:
    """Of one run on one rank."""

    losses: list[float]
    norms: list[float]
    before: dict[str, torch.Tensor]  # whole parameters, fp32
    after: dict[str, torch.Tensor]
    paths: dict[str, str]  # parameter -> path; empty: stock
    reasons: dict[str, str]
    steps: list[Counters]  # CommFuse's counters over each step
    minimum: int = 0


@contextmanager
def started(rank: int, world_size: int, case: Case, *, fused: bool) -> Iterator[Any]:
    """The case's DeepSpeed engine; destroyed at the end."""
    from commfuse_dp.integrations.deepspeed import engine_of, remove

    with launched(rank, world_size) as deepspeed:
        config = copy.deepcopy(case.settings)
        torch.manual_seed(SEED)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=case.zero_init):
            model = case.make()
        case.prepare(model)
        if fused:
            config["commfuse"] = {**BLOCK, **case.block}
        if case.optimizer is not None:
            config.pop("optimizer", None)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, config=config, optimizer=case.optimizer and case.optimizer(trained)
        )
        try:
            yield engine
        finally:
            if engine_of(engine) is not None:
                remove(engine)
            engine.destroy()
            del engine, model
            gc.collect()


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """The optimizer's fp32 copies of all parameters, whole. The model's own must be equal to them, rounded, on every rank:
    so the all-gather after the step (ZeRO-1, 2) and the partitions (ZeRO-3) are checked to the last bit."""
    import deepspeed

    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            seen = param.detach().clone()
        # With round_robin_gradients stock DeepSpeed's own safe_get_full_fp32_param looks in the wrong place (0.19.8).
        known = param.requires_grad and not engine.zero_round_robin_gradients()
        master = deepspeed.utils.safe_get_full_fp32_param(param) if known else None
        found[name] = (seen.float() if master is None else master.clone()).view(seen.shape)
        assert torch.equal(found[name].to(seen.dtype), seen), f"{name} is not what the optimizer has"
    return found


def train_micro(case: Case, engine: Any, rank: int, number: int) -> float:
    """One microbatch, the optimizer's step included."""
    if case.train is not None:
        return case.train(engine, rank, number).item()
    loss = loss_of(engine, batch(rank, number))
    engine.backward(loss)
    engine.step()
    return loss.item()


def run(rank: int, world_size: int, case: Case, *, fused: bool) -> Result:
    from commfuse_dp.integrations.deepspeed import engine_of, report_of
    from commfuse_dp.integrations.deepspeed.backend import RingBackend

    with started(rank, world_size, case, fused=fused) as engine:
        from deepspeed.comm import comm

        assert (
            (engine_of(engine) is not None) == isinstance(comm.cdb, RingBackend) == (fused and case.block.get("enabled", True))
        )
        report = report_of(engine)
        rows = report.rows if report is not None else []
        before = whole(engine)
        losses, norms, moved = [], [], []
        accumulation = int(engine.gradient_accumulation_steps())
        for step in range(case.steps):
            case.before(engine, step)
            start = report.probe.counters.snapshot() if report is not None else Counters()
            for micro in range(accumulation):
                losses.append(train_micro(case, engine, rank, step * accumulation + micro))
            norm = engine.get_global_grad_norm()
            if norm is not None:  # stage 0 computes none
                norms.append(float(norm))
            if report is not None:
                moved.append(report.probe.counters.since(start))
        result = Result(
            losses,
            norms,
            before,
            whole(engine),
            {row.name: row.path for row in rows},
            {row.name: row.reason for row in rows},
            moved,
            report.minimum_bytes_per_step if report is not None else 0,
        )
        case.after(engine)
        return result


def both(rank: int, world_size: int, case: Case) -> tuple[Result, Result]:
    """(stock, with CommFuse)"""
    return run(rank, world_size, case, fused=False), run(rank, world_size, case, fused=True)


# Relative: of losses and norms to their size, of parameters to how far training has moved the parameter at most.
#
# fp32: the two differ in the order of sums (ring or all-reduce against rank order, GEMMs by slices), some units of 6e-8 a step,
# and momentum carries them on for all later steps: 7e-6 was seen after ten.
#
# bf16: partial gradients are rounded to 8 bits (2^-9 = 0.002 of their size), stock's sums once more for each addition, ours
# once at their end. 0.002 was seen for norms, 0.014 for parameters. A wrong divisor, or a microbatch left out, makes 0.3 at
# least.
RELATIVE = {"fp32": (2e-6, 5e-5), "bf16": (6e-3, 4e-2)}


def check(stock: Result, ours: Result, *, dtype: str = "fp32") -> None:
    """Raises AssertionError if losses, norms or parameters differ by more than RELATIVE, or nothing was trained."""
    scalars, params = RELATIVE[dtype]
    for what, theirs, mine in (("losses", stock.losses, ours.losses), ("norms", stock.norms, ours.norms)):
        assert len(theirs) == len(mine) and all(theirs), (what, theirs, mine)
        worst = max((abs(a - b) / abs(a) for a, b in zip(theirs, mine, strict=True)), default=0.0)
        assert worst <= scalars, f"{what} differ by {worst:.3g}: {theirs} {mine}"
    assert stock.after.keys() == ours.after.keys()
    wrong = []
    for name, theirs in stock.after.items():
        assert torch.equal(stock.before[name], ours.before[name]), f"{name} was different from the start"
        moved = (theirs - stock.before[name]).abs().max().item()
        worst = (theirs - ours.after[name]).abs().max().item()
        if worst > params * moved:
            wrong.append(f"{name}: {worst:.3g} of {moved:.3g}")
    assert not wrong, f"parameters differ: {wrong}"
    assert any(not torch.equal(stock.before[name], stock.after[name]) for name in stock.after), "nothing was trained"
