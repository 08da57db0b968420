"""Experts of a mixture in a decoder layer that runs in shards: see ops/sequence/experts.py.

Each rank has a part of every expert. The mixture around them (router, gates, what is added to their output) computes with own
positions, as the layer does; they alone need all tokens. What active modes of dispatch have to see (selective checkpointing)
goes transformers' own way, between a gather and a division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from commfuse_dp.integrations.hugging_face_tp.boundary import divide, gather
from commfuse_dp.integrations.hugging_face_tp.layers import HeldForward, Running
from commfuse_dp.integrations.hugging_face_tp.select import Styled
from torch import nn
from torch.distributed.tensor import DTensor

from commfuse_dp.errors import ConfigError
from commfuse_dp.ops.compat import modes_active, transforms_active
from commfuse_dp.ops.sequence.experts import sharded_experts
from commfuse_dp.ops.sequence.rows import place_of


class Experts:
    """Of one mixture."""

    def __init__(self, found: Styled, running: Running) -> None:
        assert found.style.own is not None
        self.name, self._running, self._compute = found.name, running, found.style.own
        self._place = place_of(None, running.transport, running.order, running.config.slices_per_rank, found.name)

    @property
    def in_shards(self) -> bool:
        """Whether the layer around them is running so."""
        return self._running.sizes is not None

    def forward(
        self, module: nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stock: Any
    ) -> torch.Tensor:
        running = self._running
        sizes = running.sizes_of(x)
        if modes_active() or transforms_active():
            site = running.site(self.name)
            return divide(stock(*(gather(part, sizes, site) for part in (x, index, weights))), sizes, site)
        names = [name for name, param in module._parameters.items() if param is not None]
        own = [_local(param) for param in module._parameters.values() if param is not None]

        def compute(
            x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, params: Sequence[torch.Tensor]
        ) -> torch.Tensor:
            held: Any = module._parameters
            before = dict(held)
            held.update(zip(names, params, strict=True))
            try:
                out: torch.Tensor = self._compute(x, index, weights)
                return out
            finally:
                held.update(before)

        experts = next((param.shape[0] for param in own if param.dim() == 3), 1)
        return sharded_experts(self.name, compute, x, index, weights, own, sizes, self._place, experts)


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class HeldExperts(HeldForward):
    """In place of the forward that transformers keeps in the module of the experts."""

    def __init__(self, found: Styled, experts: Experts) -> None:
        super().__init__(found, experts.forward)
        self._experts = experts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, experts = self._module(), self._experts
        if module is None or not experts.in_shards or torch.compiler.is_compiling():
            return self._stock(*args, **kwargs)
        if len(args) != 3 or kwargs:
            raise ConfigError(
                f"{experts.name}: called with {len(args)} arguments and {sorted(kwargs) or 'no keywords'}, not with tokens, "
                "indices and weights, as in training. Leave these experts to transformers with "
                f"CommFuseConfig(exclude=[{experts.name!r}])."
            )
        return self.compute(module, *args, self._stock)


__all__ = ["Experts", "HeldExperts"]
