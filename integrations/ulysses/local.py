"""A local attention that says what it computes, for DeepSpeed's DistributedAttention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LocalAttention(nn.Module):
    """Softmax attention by torch, for `DistributedAttention(LocalAttention(causal=True), group, scatter_idx=2, gather_idx=1)`.

    DistributedAttention takes any module, and a module does not tell what it computes. This one does, so it can be served by
    blocks; without CommFuse it is scaled_dot_product_attention over [B, S, heads, d] (batch_first) or [S, B, heads, d].
    """

    def __init__(self, *, causal: bool, scale: float | None = None, batch_first: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale
        self.batch_first = batch_first

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        q, k, v = (tensor.permute(order) for tensor in (query, key, value))
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return o.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).contiguous()
