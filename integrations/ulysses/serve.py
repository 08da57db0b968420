"""The forwards of DeepSpeed's two attention classes, served where what they compute is known, else as DeepSpeed has them.

| class | layout | what it computes |
| --- | --- | --- |
| DistributedAttention | [B, s, H, d] (batch_dim_idx 0) or [s, B, H, d] (1) | known of a `LocalAttention` |
| UlyssesSPAttentionHF | [B, H, s, d] -> [B, s, H d] | known of transformers' "sdpa" |

What decides is the same on all ranks: settings, classes, shapes. Nothing is decided by what a rank has measured.

[Note: Gradients under way]
A rank that waits in an all-to-all of its own does not take in what peers send to a fused ZeRO engine of the same process, and
they may be waiting for that. So both passes let the engine's stream of gradients settle first, as everything else does that
blocks under DeepSpeed (deepspeed/backend.py). Where DeepSpeed knows of the sequence groups, ZeRO itself stays stock.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.ranks import Ranks
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.ulysses import compat
from commfuse_dp.integrations.ulysses.local import LocalAttention
from commfuse_dp.integrations.ulysses.report import note
from commfuse_dp.integrations.ulysses.settings import current

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.ops import ulysses_attention
from commfuse_dp.ops.compat import holds_scores
from commfuse_dp.transport.base import Transport
from commfuse_dp.transport.select import open_for

Forward = Callable[..., Any]

# By group, type of device, and what a configuration wishes: configurations may alternate, and graphs outlive them.
_transports: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], tuple[Transport, str]]] = weakref.WeakKeyDictionary()


def install(module: ModuleType) -> None:
    """Put the served forward in the place of DeepSpeed's; once. A class that is not as known is left alone, loudly."""
    cls: Any = getattr(module, compat.CLASSES[module.__name__], None)
    if hasattr(getattr(cls, "forward", None), "commfuse"):
        return
    obstacle = compat.unknown_forward(module.__name__, cls)
    if obstacle is not None:
        from commfuse_dp.autoload import warn

        warn(f"CommFuse leaves Ulysses to DeepSpeed: {obstacle}")
        return
    make = _distributed if module.__name__ == compat.LAYER else _hugging_face
    cls.forward = make(cls.forward)
    cls.forward.commfuse = True


# ---- DistributedAttention --------------------------------------------------------------------------------------------
def _distributed(original: Forward) -> Forward:
    @functools.wraps(original)
    def forward(
        self: Any, query: Any, key: Any, value: Any, batch_dim_idx: int, rotary_pos_emb: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # Asked first, where dynamo sees a constant: what is compiled stays with DeepSpeed.
        config = None if torch.compiler.is_compiling() else current()
        if config is None:
            return original(self, query, key, value, batch_dim_idx, rotary_pos_emb, *args, **kwargs)
        reason = compat.missing_attribute(compat.LAYER, self) or _distributed_obstacle(
            self, (query, key, value), batch_dim_idx, rotary_pos_emb, args, kwargs, config
        )
        name = f"DistributedAttention({_name(getattr(self, 'local_attn', None))})"
        if reason is not None:
            note(self, name, "stock", reason, _rank(getattr(self, "spg", None)))
            return original(self, query, key, value, batch_dim_idx, rotary_pos_emb, *args, **kwargs)
        layout = "bshd" if batch_dim_idx == 0 else "sbhd"
        local = self.local_attn
        return _attend(self, name, self.spg, config, query, key, value, local.causal, local.scale, layout)

    return forward


def _distributed_obstacle(
    self: Any, qkv: tuple[Any, ...], batch_dim_idx: int, rotary: Any, args: Any, kwargs: Any, config: CommFuseConfig
) -> str | None:
    local = self.local_attn
    if type(local) is not LocalAttention:
        return (
            f"what {_name(local)} computes is not known; commfuse_dp.integrations.ulysses.LocalAttention says it, if it is "
            "softmax attention"
        )
    if local.batch_first != (batch_dim_idx == 0) or batch_dim_idx not in (0, 1):
        return f"batch_dim_idx={batch_dim_idx}, but the local attention has batch_first={local.batch_first}"
    if self.scatter_idx != 2 or self.gather_idx != 1 - batch_dim_idx:
        return f"scatter_idx={self.scatter_idx} and gather_idx={self.gather_idx} are not heads and sequence of this layout"
    if rotary is not None:
        return "rotary embeddings are applied between the all-to-all and attention"
    if self.sp_overlap_comm:
        return "it was given a stream (sp_stream) to overlap its all-to-alls on"
    if args or kwargs:
        return f"further arguments for the local attention: {[*map(_name, args), *kwargs]}"
    if compat.foreign_hooks(local):
        return "the local attention has hooks"
    return _common_obstacle(qkv, heads=2, ranks=_size(self.spg), config=config)


# ---- UlyssesSPAttentionHF --------------------------------------------------------------------------------------------
def _hugging_face(original: Forward) -> Forward:
    @functools.wraps(original)
    def forward(
        self: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Asked first, where dynamo sees a constant: what is compiled stays with DeepSpeed.
        config = None if torch.compiler.is_compiling() else current()
        if config is None:
            return original(self, module, query, key, value, attention_mask, *args, **kwargs)
        reason = compat.missing_attribute(compat.ALST, self) or _hugging_face_obstacle(
            self, module, (query, key, value), attention_mask, args, kwargs, config
        )
        name = f"UlyssesSPAttentionHF({_name(getattr(self, 'attn', None))})"
        if reason is not None:
            note(self, name, "stock", reason, _rank(getattr(self, "process_group", None)))
            return original(self, module, query, key, value, attention_mask, *args, **kwargs)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        causal = _is_causal(module, kwargs) and q.shape[1] * self.world_size > 1
        o = _attend(self, name, self.process_group, config, q, k, v, causal, kwargs.get("scaling"), "bshd")
        return o.flatten(2), None

    return forward


def _hugging_face_obstacle(
    self: Any, module: Any, qkv: tuple[Any, ...], mask: Any, args: Any, kwargs: dict[str, Any], config: CommFuseConfig
) -> str | None:
    if not compat.is_sdpa(self.attn):
        return 'its core attention is not transformers\' "sdpa"'
    if self.disable_in_eval and not module.training:
        return "disable_in_eval is set, and the model is in evaluation"
    if self.skip_all_but_last_attention_debug_mode:
        return "skip_all_but_last_attention_debug_mode is set"
    if mask is not None:
        return "it is given an attention mask"
    if "position_ids" not in kwargs:
        return "position_ids are missing, of which DeepSpeed says what to do"
    if args:
        return f"further positional arguments: {[*map(_name, args)]}"
    if kwargs.get("dropout"):
        return f"dropout={kwargs['dropout']} inside attention"
    query = qkv[0]
    window = kwargs.get("sliding_window")
    if window is not None and query.dim() == 4 and window < query.shape[2] * self.world_size:
        return f"sliding_window={window} is shorter than the sequence"
    asking = compat.unread_arguments(kwargs)
    if asking:
        return f"arguments whose meaning is not known here: {asking}"
    own = {query.dim() == 4 and query.shape[2]} if self.seq_length_is_variable else {self.local_seq_length}
    queries = (self.batch_size, self.attn_head_count, *own, self.attn_head_size)
    keys = (self.batch_size, self.global_kv_head_count, *own, self.attn_head_size)
    if [tuple(tensor.shape) for tensor in qkv] != [queries, keys, keys]:
        return f"shapes {[tuple(tensor.shape) for tensor in qkv]} that DeepSpeed refuses"
    return _common_obstacle(tuple(tensor.transpose(1, 2) for tensor in qkv), heads=2, ranks=self.world_size, config=config)


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(given if given is not None else getattr(module, "is_causal", True))


# ---- both ------------------------------------------------------------------------------------------------------------
def _common_obstacle(qkv: tuple[Any, ...], *, heads: int, ranks: int, config: CommFuseConfig) -> str | None:
    """In a layout in which only the number of heads may differ."""
    if config.fuse == "never":
        return "fuse='never'"
    if ranks == 1:
        return "its group has one rank"
    if any(not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 for tensor in qkv):
        return "query, key and value are not three tensors of 4 dimensions"
    q, k, v = qkv
    if q.device.type not in ("cpu", "cuda"):
        return f"attention by blocks is not known on {q.device.type}"
    if len({tensor.dtype for tensor in qkv}) > 1 or not q.dtype.is_floating_point:
        return f"dtypes {[str(tensor.dtype) for tensor in qkv]}"
    if holds_scores(q):
        return f"torch has no flash attention for {q.dtype}, {q.shape[-1]} wide, on this {q.device.type} device"
    if k.shape != v.shape or (*q.shape[:heads], q.shape[3]) != (*k.shape[:heads], k.shape[3]):
        return f"shapes {[tuple(tensor.shape) for tensor in qkv]}"
    queries, keys = q.shape[heads], k.shape[heads]
    if queries % ranks or queries % keys or (keys % ranks and ranks % keys):
        return f"{queries} query heads and {keys} key heads on {ranks} ranks: they cannot be divided evenly"
    return None


def _attend(
    attention: Any,
    name: str,
    group: Any,
    config: CommFuseConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
) -> torch.Tensor:
    transport, why = _transport_of(group, config, q.device)
    note(
        attention,
        name,
        "ulysses",
        f"blocks of attention hide both all-to-alls; transport {transport.name} ({why})",
        transport.rank,
    )
    _settle(q)
    order = config.order if config.order == "ring" else "pairwise"
    o = ulysses_attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        layout=layout,
        slices_per_rank=config.slices_per_rank,
        order=order,
        transport=transport,
    )
    settled: torch.Tensor = _SettledBackward.apply(o)
    return settled


class _SettledBackward(torch.autograd.Function):
    """Nothing, except that its backward, which comes right before that of attention, lets gradients settle."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor) -> torch.Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _settle(grad)
        return grad


def _settle(tensor: torch.Tensor) -> None:
    backend = sys.modules.get("commfuse_dp.integrations.deepspeed.backend")
    if backend is not None and tensor.device.type == "cpu":  # on a GPU streams wait, and the process goes on
        backend.settle()


def _transport_of(group: Any, config: CommFuseConfig, device: torch.device) -> tuple[Transport, str]:
    """Opened at the first call with such a configuration, by all ranks of the group together or by none."""
    opened = _transports.setdefault(group, {})
    wish = device.type, config.transport, config.inbox_bytes, config.deadline_s
    if wish not in opened:
        transaction = Transaction()
        try:
            opened[wish] = Ranks([group], "open a transport for Ulysses").together(
                lambda: transaction.acquire(
                    lambda: open_for(config, group=group, device=device, stream_ordered=True, growing=True),
                    lambda found: found[0].close(),
                )
            )
        except BaseException:
            transaction.roll_back()
            raise
    return opened[wish]


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or type(thing).__name__


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _rank(group: Any) -> int:
    return dist.get_rank(group)
