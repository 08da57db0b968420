"""Decoders of the sweep, tensor-parallel by transformers' own plan: stock and CommFuse from equal weights on equal data.

    row = run(rank, world_size, Case(TASK, model_type))          # the same on all ranks

In float64, where nothing but another order of summation shows; norms and routers of some compute in float32 all the same, which
`train.compare`'s bounds allow for.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import commfuse_dp
from tests.parity.sweep import tiny
from tests.parity.sweep.cases import Case, _no_dropout, _transformer, architectures
from tests.parity.sweep.train import LEARNING_RATE, STEPS, Row, Trained, _brief, _local, compare

TASK = "tensor-parallel"
FUSED = ("column", "row")

STOCK_CANNOT = {
    "gemma4": "mixes tensors and DTensors",
    "gemma4_unified_assistant": "is called with what another model makes",
    "doge": "heads of its mask are not divided",
    "inkling_text": "mixes tensors and DTensors",
    "llama4": "changes a view in place that a DTensor has handed out",
    "llama4_text": "changes a view in place that a DTensor has handed out",
    "sarvam_moe": "its weights are not converted when it is loaded",
}
UNMADE = {
    "gemma3n": "needs timm, which is not installed",
    "inkling2_loop_text": "cannot be saved",
    "inkling2_text": "cannot be saved",
}
UNSERVED = {
    "afmoe": "its experts stand in a layer of their own kind",
    "beam": "attention is tensor-parallel itself (attention sinks)",
    "deepseek_v4": "its layers are called in a way of their own",
    "gemma3n_text": "its layers are given several streams",
    "gemma4_text": "its layers are given inputs of their own, for every position",
    "glm_moe_dsa": "attention hands indices to later layers",
    "granite_swa": "attention is tensor-parallel itself (attention sinks)",
    "granitemoe_swa": "attention is tensor-parallel itself (attention sinks)",
    "hrm_text": "its layers are called in a way of their own",
    "hunyuan_v1_moe": "its layers are called in a way of their own",
    "hy_v4": "attention is tensor-parallel itself",
    "lfm2_moe": "a tiny one has no experts",
    "longcat_flash": "two attentions and a mixture in one layer",
    "mimo_v2_flash": "attention is tensor-parallel itself (attention sinks)",
    "phimoe": "routes by chance",
    "qwen4_exp": "its residuals are tensor-parallel",
    "qwen4_exp_text": "its residuals are tensor-parallel",
}
"""Model types whose decoder layers have a plan, of which nothing is served, and why."""


def planned() -> list[str]:
    """Model types whose default configuration has a plan for layers, and not for the embedding alone."""
    return [model for model in architectures("causal") if _plan(model)]


def _plan(model_type: str) -> bool:
    config = tiny.config_class(model_type)
    plans = [getattr(config, "base_model_tp_plan", None)]
    with contextlib.suppress(Exception):
        plans.append(config().get_text_config().base_model_tp_plan)
    return any(re.search(r"\*", name) for plan in plans for name in plan or ())


def run(rank: int, world_size: int, case: Case) -> Row:
    os.environ["TQDM_DISABLE"] = "1"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    start = time.monotonic()
    rows: list[Any] = []

    def row(verdict: str, text: str = "", worst: float | None = None) -> Row:
        paths, reasons = Counter(row.path for row in rows), Counter(row.reason for row in rows if row.path == "stock")
        figures = {} if worst is None else {"fp64": worst}
        return Row(case, verdict, "fp64", text, figures, dict(paths), dict(reasons), time.monotonic() - start)

    try:
        model, _ = _transformer(case._replace(task="causal"))
    except Exception as error:
        return row("no model", _brief(error))
    box = [tempfile.mkdtemp(prefix="swept-") if rank == 0 else ""]
    dist.broadcast_object_list(box)
    try:
        saved = [_saved(model, box[0]) if rank == 0 else ""]
        dist.broadcast_object_list(saved)
        if saved[0]:
            return row("no model", saved[0])
        try:
            stock = _trained(_load(type(model), box[0], world_size))
        except Exception as error:
            return row("stock cannot", _brief(error))
        try:
            served = _load(type(model), box[0], world_size)
            rows[:] = commfuse_dp.apply(served).rows
            ours = _trained(served)
        except Exception as error:
            return row("error", _brief(error) + "\n" + traceback.format_exc()[-2500:])
        if any(row.path in FUSED for row in rows):
            commfuse_dp.remove(served)
        figure, wrong = compare(stock, ours, stock)
        return row("differs" if wrong else "equal", wrong, figure)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(box[0])


def _saved(model: Any, path: str) -> str:
    """Why it could not be."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(path)
    except Exception as error:
        return _brief(error)
    return ""


def _load(cls: Any, path: str, ranks: int) -> nn.Module:
    from transformers.distributed import DistributedConfig

    with contextlib.redirect_stderr(io.StringIO()):
        model = cls.from_pretrained(path, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=ranks))
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(Exception):  # where there are none
            model.set_experts_implementation("eager")  # torch has no grouped product of float64
    _no_dropout(model)
    return model.train()


def _trained(model: nn.Module) -> Trained:
    params = dict(model.named_parameters())
    before = {name: _local(param).detach().clone() for name, param in params.items()}
    optimizer = torch.optim.SGD(params.values(), lr=LEARNING_RATE, foreach=False)
    losses, touched = [], set[str]()
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(tiny.WORDS, tiny.VOCABULARY, (tiny.BATCH, tiny.LENGTH))  # the same on all ranks
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        touched |= {name for name, param in params.items() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach())
    updates = {
        name: _local(param).detach().double() - before[name].double() if name in touched else None
        for name, param in params.items()
    }
    return Trained(torch.stack(losses).double(), updates)


def as_expected(row: Row) -> bool:
    model, served = row.case.model, any(path in FUSED for path in row.paths)
    if (row.verdict == "no model") != (model in UNMADE) or (row.verdict == "stock cannot") != (model in STOCK_CANNOT):
        return False
    if row.verdict in ("no model", "stock cannot"):
        return True
    return row.verdict == "equal" and served == (model not in UNSERVED)
