"""Two equal models, one on stock FSDP2 and one on CommFuse, fed with the same data and compared after every step.

In fp32 the parameters are made equal again after each comparison of an update, since Adam enlarges last-bit differences of
small gradients: so every step's gradients can be held to RTOL. In fp64 the models run freely for all steps, held to RTOL64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import ParameterRow
from torch import nn
from torch.distributed.tensor import DTensor

import commfuse_dp
from commfuse_dp import CommFuseConfig
from commfuse_dp.probe import Counters
from tests.parity.fsdp2.models import ByteModel, shard_layers, token_batch, token_loss

SEED = 1234
RTOL = 1e-6  # fp32, of one backward: only the tiling of the GEMMs and the order of the sums differ
RTOL64 = 1e-10  # fp64, several steps of Adam included

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}  # of evaluation

Loss = Callable[[nn.Module, Any], torch.Tensor]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def settings(transport: str = "shm", **more: Any) -> CommFuseConfig:
    return CommFuseConfig(**{"transport": transport, "deadline_s": 30.0, **more})


def build(make: Callable[[], nn.Module] = ByteModel, shard: Callable[..., None] = shard_layers, **options: Any) -> nn.Module:
    """A sharded model with the same weights on every rank and at every call."""
    torch.manual_seed(SEED)
    model = make()
    shard(model, **options)
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's rows of every gradient (copies)."""
    return {name: None if p.grad is None else local(p.grad).clone() for name, p in model.named_parameters()}


def compare(what: str, expected: dict[str, Any], actual: dict[str, Any], rtol: float) -> float:
    """Largest difference over the largest magnitude, per entry, both over all ranks' rows. Collective; one all-reduce.

    Raises AssertionError, on all ranks, with every entry that differs by more than rtol (0: bitwise), or that only one side
    has. Returns the largest relative difference.
    """
    assert expected.keys() == actual.keys(), f"{what}: other names: {expected.keys() ^ actual.keys()}"
    kinds: list[str] = []
    table = torch.zeros(len(expected), 3, dtype=torch.float64)  # difference, magnitude, unlike in kind
    for row, (name, stock) in zip(table, expected.items(), strict=True):
        ours = actual[name]
        if stock is None or ours is None or stock.shape != ours.shape or stock.dtype != ours.dtype:
            if stock is not ours:
                row[2] = 1
                kinds.append(f"{name}: {_describe(ours)}, stock has {_describe(stock)}")
        elif stock.numel():
            row[0] = (stock.double() - ours.double()).abs().max()
            row[1] = stock.double().abs().max()
    table.nan_to_num_(nan=float("inf"))
    dist.all_reduce(table, dist.ReduceOp.MAX)
    relative = table[:, 0] / table[:, 1].clamp_min(1e-30)
    wrong = [
        f"{name}: relative difference {value:.3g} > {rtol:g}"
        for name, value in zip(expected, relative, strict=True)
        if value > rtol
    ]
    wrong += [f"{name}: unlike on some rank" for name, row in zip(expected, table, strict=True) if row[2]]
    if wrong:
        raise AssertionError(f"{what} differ from stock FSDP2:\n  " + "\n  ".join(wrong + kinds))
    return relative.max().item() if len(relative) else 0.0


def _describe(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


class Twin:
    """`with Twin(...) as twin`: removes CommFuse at the end, unless the body raised."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = ByteModel,
        *,
        shard: Callable[..., None] = shard_layers,
        config: CommFuseConfig | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
        **options: Any,
    ) -> None:
        self.stock = build(make, shard, **options)
        self.fused = build(make, shard, **options)
        prepare(self.stock)
        prepare(self.fused)
        self.report = commfuse_dp.apply(self.fused, config if config is not None else settings())
        make_optimizer = optimizer or (
            lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True)
        )  # DTensor dispatches one operation
        self.optimizers = self.each(lambda model: make_optimizer(model.parameters()))
        self.generator = torch.Generator().manual_seed(SEED + 1 + dist.get_rank())
        self.paths = {row.name: row.path for row in self.report.rows}
        self.backwards = 0  # since the last update: each rounds anew, and their sum may be smaller than any of them

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            dist.barrier()  # where an error was caught: a rank that is behind meets its own, not one of a peer that is gone
            commfuse_dp.remove(self.fused)

    @property
    def rows(self) -> dict[str, ParameterRow]:
        return {row.name: row for row in self.report.rows}

    def paths_of(self, part: str) -> set[str]:
        """The paths of all parameters with `part` in their names."""
        found = {path for name, path in self.paths.items() if part in name}
        assert found, f"no parameter is named like {part!r}: {list(self.paths)}"
        return found

    @property
    def counters(self) -> Counters:
        return self.report.probe.counters

    def counted(self, action: Callable[[], Any]) -> Counters:
        """What the counters say of `action`."""
        before = self.counters.snapshot()
        action()
        return self.counters.since(before)

    def each(self, action: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """(action(stock), action(fused))."""
        return action(self.stock), action(self.fused)

    def set_order(self, order: list[int]) -> None:
        """Which blocks of a ByteModel run, from now on."""
        self.stock.order = self.fused.order = order  # type: ignore[assignment]

    def batch(self) -> Any:
        return token_batch(self.generator)

    def step(self, loss_of: Loss = token_loss, batch: Any = None, *, rtol: float | None = None, update: bool = True) -> None:
        """Forward, backward, compare, optimizer step."""
        self.backward(loss_of, batch, rtol=rtol)
        self.check_gradients(rtol)
        if update:
            self.update()

    def backward(self, loss_of: Loss = token_loss, batch: Any = None, *, rtol: float | None = None) -> None:
        batch = self.batch() if batch is None else batch

        def run(model: nn.Module) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            return loss.detach()

        stock, fused = self.each(run)
        self.backwards += 1
        compare("losses", {"loss": stock}, {"loss": fused}, self._rtol(rtol))

    def check_gradients(self, rtol: float | None = None) -> float:
        return compare("gradients", *self.each(gradients), self._rtol(rtol) * max(1, self.backwards))

    def _rtol(self, rtol: float | None) -> float:
        if rtol is not None:
            return rtol
        return RTOL64 if next(self.stock.parameters()).dtype == torch.float64 else RTOL

    def update(self) -> None:
        """Step both optimizers and compare the parameters."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.backwards = 0
        self.check_parameters()

    def check_outputs(self, run: Callable[[nn.Module], torch.Tensor], rtol: float | None = None) -> None:
        """Compare what `run` returns, in values and in kind."""
        stock, fused = self.each(run)
        assert stock.requires_grad == fused.requires_grad and stock.is_inference() == fused.is_inference()
        compare("outputs", {"y": stock.detach().clone()}, {"y": fused.detach().clone()}, self._rtol(rtol))

    @torch.no_grad()
    def check_parameters(self) -> float:
        wide = next(self.stock.parameters()).dtype == torch.float64
        stock, fused = self.each(lambda m: {name: local(p.detach()) for name, p in m.named_parameters()})
        worst = compare("parameters", stock, fused, RTOL64 if wide else 2e-5)
        if not wide:
            for name, parameter in fused.items():
                parameter.copy_(stock[name])
        return worst
