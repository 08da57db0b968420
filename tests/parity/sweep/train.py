"""One model of the sweep, in a worker: stock FSDP2 and CommFuse from equal weights on equal data, in fp32 and in bf16.

    row = run(rank, world_size, case)                # the same on all ranks

[Note: What equal means]
fp32: CommFuse sums wgrads and outputs in slices, so last bits differ, and a second step carries them on. The update is compared
(weights after the steps minus weights before): of the whole model to RTOL, of each parameter to RTOL_EACH plus a share of the
whole, so that also a small parameter whose gradient is lost or doubled is seen. Losses of each step to RTOL. A model that is
more sensitive than that (normalization of tiny batches: the last bit of a weight may turn stock's own update around) is trained
by both in fp64, and held to the same there.
bf16: two orders of summation differ by roundings of 2^-9 each, and there is no exact answer but fp32's. So both are held
against stock's fp32 run: CommFuse's error is at most MARGIN times stock's own, for the whole, and MARGIN_EACH times for each
parameter plus a share of its update. A model that fails this is trained with other data once more: what a rounding decides
(which expert a token goes to, where two are as good) is luck, and a defect is not. A model that fp64 had to judge, as roundings
of 2^-24 turn its update around, may fail it twice: no run in bf16, nor stock's in fp32, is near any truth that it could be held
to. (Phi-4's vision tower on a processor with AMX: stock's update in bf16 is 1.8 times as far from fp32's as that is large.)
That the same parameters get finite gradients is asked of it, too.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import commfuse_dp
from tests.parity.sweep.adapters import QUANTISED
from tests.parity.sweep.cases import Case, prepare

WITHOUT = ("no model", "stock cannot")
"""Verdicts that say nothing about CommFuse."""
STEPS = 2
"""The second one computes with what the first one's update left."""
LEARNING_RATE = 0.1
RTOL = 2e-4
RTOL_EACH = 2e-3
MARGIN = 1.5
MARGIN_EACH = 4.0
FLOOR = 0.02
"""Share of a parameter's own update that a bf16 difference may have whatever stock's error is: rounding is luck."""
_CASES = itertools.count(1)


class Row(NamedTuple):
    case: Case
    verdict: str
    """equal, differs, error, or without a statement: "no model" (no tiny one can be made), "stock cannot" """
    dtype: str
    """where the verdict comes from; "" with equal"""
    text: str
    worst: dict[str, float]
    """dtype -> largest relative difference of the update (fp32), or error over stock's (bf16)"""
    paths: dict[str, int]
    """path -> parameters (tensors) on it"""
    reasons: dict[str, int]
    """why tensors are not fused, hooks and stock only"""
    seconds: float


class Trained(NamedTuple):
    losses: torch.Tensor
    updates: dict[str, torch.Tensor | None]
    """this rank's shards, float64; None: no gradient came"""


Make = Callable[[], tuple[nn.Module, Callable[[int], Any], Callable[[Any], torch.Tensor]]]


def run(rank: int, world_size: int, case: Case) -> Row:
    start = time.monotonic()
    verdict, dtype, text = "equal", "", ""
    worst: dict[str, float] = {}
    rows: list[Any] = []
    try:
        torch.manual_seed(0)
        model, batch, loss = _prepared(case)
    except Exception as error:
        return Row(case, "no model", "", _brief(error), {}, {}, {}, time.monotonic() - start)
    shard = shard_layers
    for dtype in case.dtypes:
        if case.adapter == QUANTISED and dtype == "bf16":
            model, batch, loss = _prepared(case, torch.bfloat16)
        try:
            stock, shard = _stock(model, dtype, shard, batch, loss)
        except Exception as error:
            if dtype == "fp32":
                verdict, text = "stock cannot", _brief(error)
                break
            text = f"{dtype}: stock cannot: {_brief(error)}"
            continue
        if dtype == "fp32":
            exact = stock
        try:
            ours = _train(model, dtype, shard, batch, loss, rows)
        except Exception as error:
            verdict, text = "error", _brief(error) + "\n" + traceback.format_exc()[-2500:]
            break
        worst[dtype], wrong = compare(stock, ours, exact)
        if wrong and exact is stock:  # is the model so sensitive?
            stock = _train(model, "fp64", shard, batch, loss, None)
            worst["fp64"], wrong = compare(stock, _train(model, "fp64", shard, batch, loss, []), stock)
        elif wrong:  # did rounding send a token to another expert?
            exact, stock = (_train(model, each, shard, _others(batch), loss, None) for each in ("fp32", dtype))
            worst[dtype], wrong = compare(stock, _train(model, dtype, shard, _others(batch), loss, []), exact)
            if wrong and is_luck(worst, dtype):
                text, wrong = f"{dtype}: roundings of fp32 decide already; {wrong}", ""
                del worst[dtype]
        if wrong:
            verdict, text = "differs", wrong
            break
    else:
        dtype = ""
    paths = Counter(row.path for row in rows)
    reasons = Counter(row.reason for row in rows if row.path in ("hooks", "stock"))
    del model
    if next(_CASES) % 8 == 0:  # all of transformers' classes are looked at: a tenth of the time if it were every time
        gc.collect()
    return Row(case, verdict, dtype, text, worst, dict(paths), dict(reasons), time.monotonic() - start)


def is_luck(worst: dict[str, float], dtype: str) -> bool:
    """How far bf16 is off says nothing of a model that fp32 could not judge. (inf, NaN: it is wrong in kind.)"""
    return "fp64" in worst and math.isfinite(worst[dtype])


def _prepared(case: Case, *dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
    """On all ranks or on none: the others would wait for one that has no model."""
    found, why = None, ""
    try:
        found = prepare(case, *dtype)
    except Exception as error:
        why = _brief(error)
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, why)
    failed = {rank: why for rank, why in enumerate(everyone) if why}
    if found is None or failed:
        raise RuntimeError(f"ranks {list(failed)}: {next(iter(failed.values()))}")
    return found


def _others(batch: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda step: batch(step + 1000)


def _stock(model: nn.Module, dtype: str, shard: Any, batch: Any, loss: Any) -> tuple[Trained, Any]:
    """Layer by layer; as one group if stock itself cannot do the first (layers that are used without being called)."""
    try:
        return _train(model, dtype, shard, batch, loss, None), shard
    except Exception:
        if shard is shard_root:
            raise
        return _train(model, dtype, shard_root, batch, loss, None), shard_root


def shard_layers(model: nn.Module, **options: Any) -> None:
    """The entries of the outermost ModuleLists are layers."""
    for layer in _layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _layers(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += [entry for entry in child if next(entry.parameters(), None) is not None]
        else:
            found += _layers(child)
    return found


def shard_root(model: nn.Module, **options: Any) -> None:
    fully_shard(model, **options)


def _train(model: nn.Module, dtype: str, shard: Any, batch: Any, loss: Any, rows: list[Any] | None) -> Trained:
    """rows: None for stock; else CommFuse trains, and the report's rows are put there."""
    model = copy.deepcopy(model)
    wide = dtype == "fp64"
    if wide:
        model.double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch has no grouped product of float64
    shard(model, **({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if dtype == "bf16" else {}))
    if rows is not None:
        rows[:] = commfuse_dp.apply(model).rows
    try:
        params = dict(model.named_parameters())
        before = {name: _local(param).detach().clone() for name, param in params.items()}
        touched: set[str] = set()
        optimizer = torch.optim.SGD([param for param in params.values() if param.requires_grad], lr=LEARNING_RATE)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)
            random.seed(step)
            numpy.random.seed(step)
            value = loss(model(**{key: _widened(item) if wide else item for key, item in batch(step).items()}))
            value.backward()
            touched |= {name for name, param in params.items() if param.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach().double())
        updates = {
            name: (_local(param).detach().double() - before[name].double()) if name in touched else None
            for name, param in params.items()
        }
        return Trained(torch.stack(losses), updates)
    finally:
        if rows is not None and rows:
            commfuse_dp.remove(model)


def _widened(item: Any) -> Any:
    return item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def compare(stock: Trained, ours: Trained, exact: Trained) -> tuple[float, str]:
    """(figure for the table, what is wrong or ""). exact is stock: compared with each other; else errors against `exact`."""
    names = list(stock.updates)
    if list(ours.updates) != names:
        return float("inf"), f"parameters are {list(ours.updates)}, with stock {names}"
    squares = torch.zeros(len(names) + 1, 3, dtype=torch.float64)  # size of the update, ours' difference, stock's own error
    unlike = torch.zeros(len(names), dtype=torch.float64)
    same = exact is stock
    for index, name in enumerate(names):
        theirs, mine, true = stock.updates[name], ours.updates[name], exact.updates[name]
        if theirs is None or mine is None or true is None:
            unlike[index] = float((theirs is None) != (mine is None))
            continue
        squares[index, 0] = true.square().sum()
        squares[index, 1] = (mine - (theirs if same else true)).square().sum()
        squares[index, 2] = (theirs - true).square().sum()
    squares[-1, 0] = exact.losses.square().sum()
    squares[-1, 1] = (ours.losses - (stock.losses if same else exact.losses)).square().sum()
    squares[-1, 2] = (stock.losses - exact.losses).square().sum()
    dist.all_reduce(squares)
    dist.all_reduce(unlike)
    lost = [name for name, flag in zip(names, unlike, strict=True) if flag]
    if lost:
        return float("inf"), f"a gradient comes with one and not with the other: {lost[:5]} of {len(lost)}"
    if not squares.isfinite().all():
        return float("nan"), "an update or a loss is not finite, and nothing can be said about it"
    size, difference, error = squares.sqrt().unbind(1)
    whole = squares[:-1].sum(0).sqrt()
    tiny = 1e-30
    if same:
        figure = float((whole[1] / (whole[0] + tiny)).item())
        each = difference[:-1] > RTOL_EACH * size[:-1] + RTOL * whole[0] / max(len(names), 1)
        wrong = figure > RTOL or bool(difference[-1] > RTOL * size[-1])
    else:
        figure = float((whole[1] / (whole[2] + tiny)).item())
        each = difference[:-1] > MARGIN_EACH * error[:-1] + FLOOR * size[:-1] + FLOOR * whole[0] / max(len(names), 1)
        wrong = bool(whole[1] > MARGIN * whole[2] + 1e-3 * whole[0])
        wrong |= bool(difference[-1] > MARGIN_EACH * error[-1] + 1e-2 * size[-1])
    if not wrong and not each.any():
        return figure, ""
    order = (difference[:-1] / (size[:-1] + tiny)).argsort(descending=True)[:4]
    parts = [f"{names[i]}: {difference[i] / (size[i] + tiny):.2g} (stock {error[i] / (size[i] + tiny):.2g})" for i in order]
    return figure, (
        f"update differs by {whole[1] / (whole[0] + tiny):.3g} (stock's error {whole[2] / (whole[0] + tiny):.3g}), losses by "
        f"{difference[-1] / (size[-1] + tiny):.3g} ({error[-1] / (size[-1] + tiny):.3g}); {int(each.sum())} parameters out of "
        f"bounds; worst: {'; '.join(parts)}"
    )


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
