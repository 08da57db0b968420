"""`attn_implementation="commfuse"`: query-split attention in served models of transformers (arXiv 2604.24013, Algorithm 4).

    attention(q, k, v)      nothing is computed yet: the output is a `Deferred` of its shape
    .reshape(...), ...      still nothing
    o_proj(output)          attention of a slice of queries, its part of the projection, and off it goes to its owner
    anything else           computes the output, by transformers' "sdpa"

Everywhere else (models that are not served, masks given as tensors, dropout, steps of generation over a cache, arguments that
are not known here) it is transformers' "sdpa", to the last digit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from commfuse_dp.integrations.tensor_parallel.stand_in import StandIn
from commfuse_dp.integrations.ulysses.compat import unread_arguments
from torch import nn

if TYPE_CHECKING:
    from commfuse_dp.integrations.hugging_face_tp.layers import RowLayer

NAME = "commfuse"

_projections: weakref.WeakKeyDictionary[nn.Module, RowLayer] = weakref.WeakKeyDictionary()  # attention -> its output projection


class Attention(NamedTuple):
    """One call: q [B, h, S, d]; k, v [B, g, S, d]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float | None
    row: RowLayer


class Deferred(StandIn):
    """Output of attention, before it is computed: [B, S, h, d], or with heads and their width in one dimension."""

    call: Attention

    @classmethod
    def of(cls, call: Attention, shape: tuple[int, ...], compute: Callable[[], torch.Tensor]) -> Deferred:
        trained = next((tensor for tensor in call[:3] if tensor.requires_grad), call.q)
        made: Deferred = cls(trained, shape, lambda: compute().reshape(shape))
        made.call = call
        return made

    @property
    def flat(self) -> bool:
        """Whether its last dimension is that of the output projection's input."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.dim() == 3 and self.shape[1] == self.call.q.shape[2]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RESHAPES and type(args[0]) is cls and not kwargs and args[0]._whole is None:
            first: Deferred = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                shape = tuple(func(torch.empty(first.shape, device="meta"), *args[1:]).shape)
            return first if shape == tuple(first.shape) else cls.of(first.call, shape, first.whole)
        return super().__torch_function__(func, types, args, kwargs)


_RESHAPES = (torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.flatten, torch.Tensor.contiguous)


def attends(module: nn.Module) -> bool:
    """Whether a module of transformers computes attention by this implementation."""
    return hasattr(module, "is_causal") and getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME


def project(transaction: Any, attention: nn.Module, row: RowLayer) -> None:
    """From now on the output of `attention` may be deferred to `row`."""
    transaction.set(_projections, attention, row)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: q [B, h, S, d], k and v [B, g, S, d] -> ([B, S, h, d], None)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def stock() -> tuple[torch.Tensor, None]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )

    row = None if torch.compiler.is_compiling() else _projections.get(module)
    if row is None or not row.defers(query, key, value) or attention_mask is not None or dropout or unread_arguments(kwargs):
        return stock()
    window = kwargs.get("sliding_window")
    if window is not None and window < query.shape[2]:
        return stock()
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True)) and query.shape[2] > 1
    batch, heads, length, width = query.shape
    call = Attention(query, key, value, causal, scaling, row)
    return Deferred.of(call, (batch, length, heads, width), lambda: stock()[0]), None


def register_attention() -> None:
    """Make `attn_implementation="commfuse"` known to transformers. COMMFUSE=1 does it when transformers is imported."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
