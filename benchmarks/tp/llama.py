"""A Llama under data parallelism over tensor parallelism, as users have it: PyTorch's styles, `fully_shard`, AdamW.

| variant | |
| --- | --- |
| compute | dtensor over torch's backend "fake", whose collectives do nothing; in processes of its own |
| dtensor | parallelize_module on "tp", fully_shard on "dp": collectives of gloo |
| commfuse | the same, then commfuse_dp.apply |
| dtensor-keep, commfuse-keep | `reshard_after_forward=False`: one all-gather of the parameters a step, and their memory |
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import commfuse_dp
from benchmarks.models_llama import rotary_table, rotate

VARIANTS = ("compute", "dtensor", "dtensor-keep", "commfuse", "commfuse-keep")


class LlamaShape(NamedTuple):
    width: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.depth = shape.width // shape.heads
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, shape.kv_heads * self.depth, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.depth).transpose(1, 2) for layer in (self.q, self.k, self.v))
        table = rotary_table(length, self.depth, 500_000.0, x.device)
        o = F.scaled_dot_product_attention(rotate(q, *table), rotate(k, *table), v, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).reshape(batch, length, -1))


class _FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.feed_forward = _Attention(shape), _FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class _Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


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


def _build(shape: LlamaShape, mesh: DeviceMesh, seed: int, *, keep: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = _Llama(shape)
    dp = mesh["dp"].size()
    sequence, whole = Shard(1), Replicate()
    gather = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,))
    row = RowwiseParallel(output_layouts=sequence)
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
    }
    parallelize_module(model, mesh["tp"], ends)
    for block in model.layers:
        plan = {"attention_norm": SequenceParallel(), "attention": gather, "attention.o": row}
        plan |= {"feed_forward_norm": SequenceParallel(), "feed_forward": gather, "feed_forward.down": row}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(block, mesh["tp"], plan)
        if dp > 1:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=not keep)
    return fully_shard(model, mesh=mesh["dp"]) if dp > 1 else model


class LlamaVariant:
    """One variant on this rank; what worker._block times is a training step."""

    def __init__(self, name: str, case: Any, rank: int) -> None:
        self.name = name
        self.notes: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        shape = LlamaShape(case.width, case.hidden, case.heads, case.heads // 2, case.layers, case.vocabulary)
        tp = case.world_size // case.dp
        mesh = _mesh(tp, case.dp, fake=name == "compute")
        self._model = _build(shape, mesh, case.seed, keep=name.endswith("-keep"))
        generator = torch.Generator().manual_seed(case.seed + rank // tp)
        self._tokens = torch.randint(shape.vocabulary, (1, case.tokens + 1), generator=generator)
        self._report: Any = None
        if name.startswith("commfuse"):
            config = commfuse_dp.CommFuseConfig(
                transport=case.transport, slices_per_rank=case.slices_per_rank, deadline_s=case.deadline_s
            )
            self._report = commfuse_dp.apply(self._model, config)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)

    def step(self) -> None:
        logits = self._model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    @contextlib.contextmanager
    def measured(self) -> Any:
        yield

    def exposed_ns(self) -> int | None:
        return 0 if self.name == "compute" else self._report.probe.counters.exposed_ns if self._report is not None else None

    def end(self) -> None:
        return None

    def finish(self) -> None:
        if self._report is not None:
            self.notes["paths"] = sorted({row.path for row in self._report.rows})
            commfuse_dp.remove(self._model)
