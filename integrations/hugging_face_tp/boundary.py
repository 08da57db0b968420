"""Where a sequence that every rank has whole becomes shards, and back; and what replicated parameters need in between.

| function | forward | backward |
| --- | --- | --- |
| `divide` | [B, S, D] -> own positions [B, s_r, D], nothing moves | the gradients of all positions are gathered |
| `gather` | [B, s_r, D] -> [B, S, D] | own positions of the gradient, nothing moves |
| `split` | [B, S, D] -> own features [B, S, D_r], nothing moves | the gradients of all features are gathered |
| `summed` | a parameter | its gradient, of own positions only, summed over the ranks |

Outside of the shards ranks compute alike, so a gradient there is the whole one on every rank (as transformers has it), and is
not summed. All sums are made in rank order in a wide type: the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commfuse_dp.collectives.arguments import even_sizes
from commfuse_dp.collectives.summation import fold
from commfuse_dp.ops.sequence.rows import Place, gathered, place_of, tokens_of
from commfuse_dp.transport.base import Transport

DIM = 1  # of the sequence, in [B, S, D]; tokens of all entries in a row are [T, D]


class Site(NamedTuple):
    """Over which ranks, how, and for which layer."""

    name: str
    transport: Transport
    order: str

    @property
    def place(self) -> Place:
        return place_of(None, self.transport, self.order, 1, self.name)


Way = Callable[[torch.Tensor, tuple[int, ...], Site], torch.Tensor]


def divide(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    return _Across.apply(x, sizes, site, _own, _whole)


def gather(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    return _Across.apply(x, sizes, site, _whole, _own)


def split(x: torch.Tensor, site: Site) -> torch.Tensor:
    sizes = even_sizes(int(x.shape[-1]), site.transport.world_size)
    return _Across.apply(x, sizes, site, _own_features, _all_features)


def summed(param: torch.Tensor, site: Site) -> torch.Tensor:
    return _Summed.apply(param, site)


def _own(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    rank = site.transport.rank
    return x.narrow(x.dim() - 2, sum(sizes[:rank]), sizes[rank]).contiguous()


def _whole(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    return gathered(x, x.dim() - 2, tokens_of(x.shape[:-2].numel(), 1, sizes), site.place)


def _own_features(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    return _own(x.unsqueeze(-1), sizes, site).squeeze(-1)


def _all_features(x: torch.Tensor, sizes: tuple[int, ...], site: Site) -> torch.Tensor:
    return _whole(x.unsqueeze(-1), sizes, site).squeeze(-1)


class _Across(torch.autograd.Function):
    """One way there, the other way back: _own and _whole are each other's adjoints, of positions as of features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[int, ...], site: Site, there: Way, back: Way) -> torch.Tensor:
        ctx.back, ctx.how = back, (sizes, site)
        return there(x, sizes, site)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.back(grad, *ctx.how), None, None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, site: Site) -> torch.Tensor:
        ctx.site = site
        return param.view_as(param)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sited = ctx.site.place
        parts = gathered(grad.reshape(1, -1), 0, tokens_of(1, 1, (1,) * sited.world_size), sited)
        return fold(parts.unbind(), grad.dtype).view_as(grad), None
