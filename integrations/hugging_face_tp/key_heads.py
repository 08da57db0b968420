"""Grouped queries with fewer key heads than ranks: several ranks need one key head, whose projection is cut between them.

R ranks, g key heads of width w, R a multiple of g; rank r keeps its rows of W [g w, D], and computes the whole head that its
own queries attend with, r g // R.

| pass | what moves |
| --- | --- |
| forward | W is gathered; the head's rows are computed with |
| backward | dW of the head, partial on each of its ranks, is summed to the rows' owners |

The input's gradient needs nothing: its shares of all ranks are summed as those of the queries are. transformers itself fails in
forward here. The weights are small beside the sequence: g w rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from commfuse_dp.integrations.hugging_face_tp.boundary import Site
from torch import nn

from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.collectives.bound import Owner
from commfuse_dp.collectives.execution import Bindings
from commfuse_dp.ops.sequence.rows import gathered, summed_rows, tokens_of

PROJECTIONS = ("k_proj", "v_proj")
GROUPS = "num_key_value_groups"  # attribute of attention: queries for each key head


class KeyHeads(NamedTuple):
    """Of an attention with fewer key heads than ranks."""

    queries: int  # heads in all
    keys: int
    width: int  # of a head
    ranks: int

    @property
    def groups(self) -> int:
        """Queries of a rank, for its one key head."""
        return self.queries // self.ranks

    def rows(self) -> tuple[int, ...]:
        """Of every rank, in the weight as it is sharded."""
        return even_sizes(self.keys * self.width, self.ranks)

    def start(self, rank: int) -> int:
        """First row of a rank's head."""
        return rank * self.keys // self.ranks * self.width


def key_heads_of(attention: nn.Module, ranks: int) -> KeyHeads | str | None:
    """None: every rank has whole key heads (or this is no attention that is known). A text: they cannot be divided evenly."""
    projections = [getattr(attention, name, None) for name in ("q_proj", *PROJECTIONS)]
    width, groups = getattr(attention, "head_dim", None), getattr(attention, GROUPS, None)
    if not all(isinstance(one, nn.Linear) for one in projections) or not isinstance(width, int) or not isinstance(groups, int):
        return None
    features: list[Any] = [one.out_features for one in projections if one is not None]
    queries, keys = features[0] // width, features[1] // width
    if features != [queries * width, keys * width, keys * width] or queries != keys * groups or keys % ranks == 0:
        return None
    if queries % ranks or ranks % keys:
        return f"{queries} query heads and {keys} key heads on {ranks} ranks cannot be divided evenly"
    return KeyHeads(queries, keys, width, ranks)


def own_head(local: torch.Tensor, heads: KeyHeads, site: Site) -> torch.Tensor:
    """This rank's head [w, ...] of a weight (or bias), from its rows of it."""
    return _OwnHead.apply(local, heads, site)


class _OwnHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, heads: KeyHeads, site: Site) -> torch.Tensor:
        ctx.how = heads, site
        rows = local.reshape(local.shape[0], torch.Size(local.shape[1:]).numel())
        whole = gathered(rows, 0, tokens_of(1, 1, heads.rows()), site.place)
        start = heads.start(site.transport.rank)
        return whole[start : start + heads.width].reshape(heads.width, *local.shape[1:]).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        heads, site = ctx.how
        sited, rows = site.place, heads.rows()
        flat, start = grad.reshape(heads.width, -1), heads.start(site.transport.rank)

        def produce(owner: Owner, buffer: torch.Tensor) -> None:
            buffer.zero_()
            low, high = max(owner.start, start), min(owner.stop, start + heads.width)
            if low < high:
                buffer[low - owner.start : high - owner.start].copy_(flat[low - start : high - start])

        summed = grad.new_empty(rows[sited.rank], flat.shape[1])
        sums = summed_rows(flat.shape[1], grad.dtype, grad.dtype)
        sited.run(sums, rows, Bindings(target=summed, produce=produce), grad.device)
        return summed.reshape(rows[sited.rank], *grad.shape[1:]), None, None
