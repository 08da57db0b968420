"""A Llama under data parallelism over tensor parallelism, as users have it: PyTorch's styles, `fully_shard`, AdamW.

Plan "sequence" has sequence parallelism; "replicated" keeps activations whole on every rank, as PyTorch's tutorial does;
"mixtral" is a Mixtral of transformers by its own plan, in place of the Llama ("dtensor" is then transformers alone).

| variant | |
| --- | --- |
| compute | dtensor over torch's backend "fake", whose collectives do nothing; in processes of its own |
| dtensor | parallelize_module on "tp", fully_shard on "dp": collectives of gloo |
| commfuse | the same, then commfuse_dp.apply |
| dtensor-keep, commfuse-keep | `reshard_after_forward=False`: one all-gather of the parameters a step, and their memory |
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

import commfuse_dp
from benchmarks.models_llama import Llama, Shape, next_token_loss, rotary_table, rotate
from benchmarks.tp import mixtral
from commfuse_dp.probe import Probe

PLANS = ("sequence", "replicated", "mixtral")
VARIANTS = ("compute", "dtensor", "dtensor-keep", "commfuse", "commfuse-keep")


class _Attention(nn.Module):
    """As models_llama's, with a linear for each of queries, keys and values, whose rows tensor parallelism divides by heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        depth = self.shape.head_width
        q, k, v = (layer(x).view(batch, length, -1, depth).transpose(1, 2) for layer in (self.q, self.k, self.v))
        table = rotary_table(length, depth, self.shape.theta, x.device)
        o = F.scaled_dot_product_attention(rotate(q, *table), rotate(k, *table), v, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).reshape(batch, length, -1))


class _FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _mesh(tp: int, dp: int, *, fake: bool) -> DeviceMesh:
    names = ("dp", "tp")
    if not fake:
        return init_device_mesh("cpu", (dp, tp), mesh_dim_names=names)
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    ranks = torch.arange(dp * tp).view(dp, tp)
    groups = []
    for lines in (ranks.t(), ranks):
        made = [(line, dist.new_group(line, backend="fake")) for line in lines.tolist()]
        groups += [group for line, group in made if dist.get_rank() in line]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)


def _build(shape: Shape, mesh: DeviceMesh, seed: int, plan: str, *, keep: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = Llama(shape)
    for block in model.layers:
        block.attention, block.feed_forward = _Attention(shape), _FeedForward(shape)
    dp = mesh["dp"].size()
    whole = Replicate()
    between = Shard(1) if plan == "sequence" else whole
    row = RowwiseParallel(output_layouts=between)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=whole),
    }
    inside: dict[str, ParallelStyle] = {"attention.o": row, "feed_forward.down": row}
    inside |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    inside |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
    if plan == "sequence":
        gather = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,))
        ends |= {"norm": SequenceParallel()}
        inside |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
        inside |= {"attention": gather, "feed_forward": gather}
    parallelize_module(model, mesh["tp"], ends)
    for block in model.layers:
        parallelize_module(block, mesh["tp"], inside)
        if dp > 1:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=not keep)
    return fully_shard(model, mesh=mesh["dp"]) if dp > 1 else model


class LlamaVariant:
    """One variant on this rank; what worker._block times is a training step."""

    def __init__(self, name: str, case: Any, rank: int) -> None:
        self.name = name
        self.notes: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        shape = Shape(case.width, case.layers, case.heads, case.heads // 2, case.hidden, case.vocabulary)
        tp = case.world_size // case.dp
        if case.plan == "mixtral":
            self._model = mixtral.build(shape, case.seed)
        else:
            mesh = _mesh(tp, case.dp, fake=name == "compute")
            self._model = _build(shape, mesh, case.seed, case.plan, keep=name.endswith("-keep"))
        generator = torch.Generator().manual_seed(case.seed + rank // tp)
        self._tokens = torch.randint(shape.vocabulary, (1, case.tokens + 1), generator=generator)
        self._report: Any = None
        if name.startswith("commfuse"):
            config = commfuse_dp.CommFuseConfig(
                transport=case.transport, slices_per_rank=case.slices_per_rank, deadline_s=case.deadline_s
            )
            self._report = commfuse_dp.apply(self._model, config)
        params = list(self._model.parameters())
        kinds = ([param for param in params if isinstance(param, DTensor) is kind] for kind in (True, False))
        groups = [{"params": kind} for kind in kinds if kind]  # a fused step takes one kind at a time
        self._optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step(self) -> None:
        loss = next_token_loss(self._model, self._tokens[:, :-1], self._tokens[:, 1:])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    @contextlib.contextmanager
    def measured(self) -> Any:
        yield

    def exposed_ns(self) -> int | None:
        if self.name == "compute":
            return 0
        return sum(probe.counters.exposed_ns for probe in self._probes) if self._report is not None else None

    @property
    def _probes(self) -> list[Probe]:
        """Of data parallelism's engine and of tensor parallelism's transport."""
        reports = (self._report, self._report.tensor_parallel)
        return [report.probe for report in reports if report is not None]

    def end(self) -> None:
        return None

    def finish(self) -> None:
        if self._report is not None:
            self.notes["paths"] = sorted({row.path for row in self._report.rows})
            waits = sum((Counter(probe.exposed_by_layer) for probe in self._probes), Counter[str]())
            self.notes["exposed_by_layer_ms"] = {name: round(ns / 1e6) for name, ns in waits.items()}  # of all steps, here
            commfuse_dp.remove(self._model)
