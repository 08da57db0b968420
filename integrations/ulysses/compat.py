"""Names of DeepSpeed and transformers that this integration leans on: looked up here only (deepspeed 0.19.8, transformers
5.23). What another version lacks is said, and its attention left alone."""

from __future__ import annotations

import inspect
import sys
from typing import Any

LAYER = "deepspeed.sequence.layer"
ALST = "deepspeed.runtime.sequence_parallel.ulysses_sp"

CLASSES = {LAYER: "DistributedAttention", ALST: "UlyssesSPAttentionHF"}

_DISTRIBUTED = ("local_attn", "spg", "scatter_idx", "gather_idx", "sp_overlap_comm", "num_kv_heads")
_HUGGING_FACE = (
    "attn",
    "process_group",
    "world_size",
    "seq_length_is_variable",
    "disable_in_eval",
    "attn_head_count",
    "global_kv_head_count",
    "attn_head_size",
    "batch_size",
    "local_seq_length",
    "skip_all_but_last_attention_debug_mode",
)
_FORWARDS = {
    LAYER: ("self", "query", "key", "value", "batch_dim_idx", "rotary_pos_emb"),
    ALST: ("self", "module", "query", "key", "value", "attention_mask"),
}


def unknown_forward(home: str, cls: Any) -> str | None:
    """Why the forward of a class is not the one known here; None: it is. cls: None where there is no such class."""
    if not hasattr(cls, "forward"):
        return f"{home} has no {CLASSES[home]} with a forward in this version of DeepSpeed"
    names = tuple(inspect.signature(cls.forward).parameters)
    known = _FORWARDS[home]
    if names[: len(known)] != known:
        return f"the forward of {cls.__name__} takes {names} in this version of DeepSpeed, not {known}"
    return None


def missing_attribute(home: str, instance: Any) -> str | None:
    for name in _DISTRIBUTED if home == LAYER else _HUGGING_FACE:
        if not hasattr(instance, name):
            return f"{type(instance).__name__} has no {name!r} in this version of DeepSpeed"
    return None


def is_sdpa(attention: Any) -> bool:
    """transformers' attention by scaled_dot_product_attention."""
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    return module is not None and attention is getattr(module, "sdpa_attention_forward", None)


# What transformers hands to every attention function, and scaled_dot_product_attention never looks at.
_UNREAD = ("position_ids", "use_cache", "cache_position", "output_hidden_states", "num_items_in_batch", "return_dict")
_READ = ("dropout", "scaling", "is_causal", "sliding_window")


def unread_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Arguments of an attention function of transformers whose meaning is not known here."""
    known = (*_UNREAD, *_READ)
    return [name for name, value in kwargs.items() if name not in known and value is not None and value is not False]


def foreign_hooks(module: Any) -> bool:
    """Whether others than DeepSpeed wait for its call. ZeRO-3 hooks all modules, to fetch parameters: this has none."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)
