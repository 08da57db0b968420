"""What is measured: an MLP, an attention with its projections, or a transformer block, over any variant's seams."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.tp.variants import Seams

OPS = ("mlp", "attention", "block", "llama")


class Shape(NamedTuple):
    """Of the whole model."""

    tokens: int  # of the whole sequence
    width: int
    hidden: int
    heads: int


def weights(op: str, shape: Shape, rank: int, ranks: int, seed: int) -> dict[str, torch.Tensor]:
    """This rank's shards of the same weights on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def make(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    found: dict[str, torch.Tensor] = {}
    if op != "mlp":
        for name in ("q", "k", "v"):
            found[name] = make(shape.width, shape.width).chunk(ranks)[rank]
        found["o"] = make(shape.width, shape.width).chunk(ranks, dim=1)[rank].contiguous()
    if op != "attention":
        found["up"] = make(shape.hidden, shape.width).chunk(ranks)[rank]
        found["down"] = make(shape.width, shape.hidden).chunk(ranks, dim=1)[rank].contiguous()
    return {name: weight.clone().requires_grad_() for name, weight in found.items()}


def forward(op: str, x: torch.Tensor, w: dict[str, torch.Tensor], seams: Seams, shape: Shape, ranks: int) -> torch.Tensor:
    """x: [s, D] -> [s, D]."""
    if op == "mlp":
        return _mlp(x, w, seams)
    if op == "attention":
        return _attention(x, w, seams, shape, ranks)
    x = x + _attention(F.rms_norm(x, (shape.width,)), w, seams, shape, ranks)
    return x + _mlp(F.rms_norm(x, (shape.width,)), w, seams)


def _mlp(x: torch.Tensor, w: dict[str, torch.Tensor], seams: Seams) -> torch.Tensor:
    (hidden,) = seams.column(x, [w["up"]])
    return seams.row(seams.each(F.relu, hidden), w["down"])


def _attention(x: torch.Tensor, w: dict[str, torch.Tensor], seams: Seams, shape: Shape, ranks: int) -> torch.Tensor:
    heads = shape.heads // ranks
    q, k, v = (
        seams.each(lambda t: t.view(-1, heads, shape.width // shape.heads), t)
        for t in seams.column(x, [w["q"], w["k"], w["v"]])
    )
    return seams.attention(q, k, v, w["o"])


def collective_bytes(shape: Shape, ranks: int) -> int:
    """That a rank sends in one gather or scatter of the sequence, in fp32."""
    return (ranks - 1) * (shape.tokens // ranks) * shape.width * 4


def least_bytes(op: str, shape: Shape, ranks: int, passes: str, variant: str) -> int:
    """That a rank must send, in fp32: a gather or a scatter of the sequence each. commfuse gathers x again for wgrad, if it
    has not kept it. Of a llama: 0, which is not worked out."""
    if op == "llama":
        return 0
    unit = collective_bytes(shape, ranks)
    seams = 2 if op in ("mlp", "attention") else 4
    both = seams * 2 + (seams // 2 if variant in ("commfuse", "commfuse-row") else 0)
    return 0 if variant == "compute" else unit * (both if passes == "both" else seams)
