"""A tiny configuration for any architecture of transformers, made from its own default configuration, offline.

Sizes are found by the names that configurations give them (SIZES); token ids that mean something move below WORDS; dropout is
switched off. What a configuration derives from its sizes (layer_types, head_dim, ...) it derives itself, since it is built by
its own constructor. fixes.py has what single architectures need besides.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.parity.sweep.fixes import FIXES, VOCABULARY

WORDS = 40  # ids below mean something special, to one architecture or another
BATCH, LENGTH = 2, 16

SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "decoder_hidden_size", "encoder_hidden_size", "hidden_dim"), 32),
    **dict.fromkeys(("output_size", "projection_dim", "embed_dim", "projector_hidden_size", "text_embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_dim", "ffn_intermediate_size", "dim_feedforward"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "text_hidden_size", "hidden_sizes_head"), 32),
    # depths
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_blocks", "e_layers", "d_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "encoder_num_hidden_layers", "num_hidden_layers_decoder"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads"), 2),
    **dict.fromkeys(("decoder_num_key_value_heads", "encoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "kv_channels", "global_head_dim"), 8),
    # latent attention, experts, state spaces
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    # what is looked at
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("context_length", "original_max_position_embeddings", "encoder_max_position_embeddings"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size_attention"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    # what other modalities have besides
    **dict.fromkeys(("out_hidden_size", "output_dim", "projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("classifier_proj_size", "codevector_dim", "proj_codevector_dim", "xvector_output_dim"), 32),
    **dict.fromkeys(("fpn_hidden_size", "fusion_hidden_size", "fpn_feature_size", "mask_feature_size"), 32),
    **dict.fromkeys(("encoder_hidden_dim", "iou_head_hidden_dim", "output_channels", "head_hidden_size"), 32),
    **dict.fromkeys(("memory_attention_hidden_size", "memory_encoder_hidden_size", "memory_fuser_embed_dim"), 32),
    **dict.fromkeys(("mask_downsampler_embed_dim", "memory_encoder_output_channels", "cross_hidden_size"), 32),
    **dict.fromkeys(("backbone_hidden_size", "d_latents", "bottleneck_features", "bin_embedding_dim"), 32),
    **dict.fromkeys(("mlp_dim", "memory_fuser_intermediate_dim", "projection_intermediate_size"), 48),
    **dict.fromkeys(("memory_attention_feed_forward_hidden_size", "memory_attention_mlp_hidden_size"), 48),
    **dict.fromkeys(("alignment_intermediate_size", "encoder_linear_units", "decoder_linear_units"), 48),
    **dict.fromkeys(("upsample_initial_channel", "codebook_size", "num_codevectors_per_group"), 64),
    **dict.fromkeys(("num_conv_pos_embeddings", "num_conv_pos_embedding_groups"), 4),
    **dict.fromkeys(("num_queries", "num_negatives", "num_latents"), 20),
    "downsample_hidden_size": 16,
    "cross_head_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "use_cache": False,
    "type_vocab_size": 2,
    "num_channels": 3,
}
STAGES: dict[str, Any] = {
    **dict.fromkeys(("depths", "layers", "layer_repeat", "num_blocks"), 1),
    **dict.fromkeys(("hidden_sizes", "embed_dims", "embed_dim", "encoder_hidden_size"), 16),
    **dict.fromkeys(("num_heads", "num_attention_heads"), 2),
    **dict.fromkeys(("key_dim",), 8),
    **dict.fromkeys(("conv_dim", "tdnn_dim", "neck_hidden_sizes", "encoder_in_channels"), 16),
    **dict.fromkeys(("decoder_in_channels", "embed_dim_per_stage", "backbone_channel_list"), 32),
}
"""Entries of lists, one for each stage of a vision model."""

DROPPED = ("dropout", "drop_path", "layerdrop", "drop_rate", "pdrop", "mask_time_prob", "mask_feature_prob")


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def config(model_type: str) -> Any:
    """A tiny configuration; raises whatever the architecture raises if it cannot be had."""
    cls = config_class(model_type)
    return _shrunk(cls, cls(), _fixes(model_type))


def _fixes(model_type: str) -> dict[str, Any]:
    """Copies: configurations write into what they are given, and the next one would see it."""
    return copy.deepcopy(FIXES.get(model_type, {}))


def _shrunk(cls: Any, default: Any, fixes: dict[str, Any]) -> Any:
    inner = {name: value for name, value in vars(default).items() if _is_config(value)}
    plain = {name: value for name, value in default.to_dict().items() if name not in inner}
    words: dict[str, Any] = {}
    special = 0
    for name, value in plain.items():
        if name.endswith(("_token_id", "_token_index", "_token")) and isinstance(value, int) and not isinstance(value, bool):
            special += 1
            words[name] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 2 + special)
        elif name in ("eos_token_id", "pad_token_id") and isinstance(value, list):
            words[name] = 2
        elif any(part in name for part in DROPPED) and isinstance(value, float):
            words[name] = 0.0
        elif name in STAGES and isinstance(value, (list, tuple)) and all(isinstance(entry, int) for entry in value):
            words[name] = [STAGES[name]] * len(value)
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
            pairs = int(8 * value.get("partial_rotary_factor", 1.0)) // 2
            words[name] = {**value, "mrope_section": [pairs - 2 * (pairs // 3 or 1), pairs // 3 or 1, pairs // 3 or 1]}
        elif name in SIZES and value is not None and not isinstance(value, (list, tuple, dict)):
            words[name] = SIZES[name]
    for name, value in inner.items():
        nested = _fixes(value.model_type) | {
            key.partition(".")[2]: fix for key, fix in fixes.items() if key.startswith(f"{name}.")
        }
        words[name] = _shrunk(type(value), value, nested)
    words |= {key: fix for key, fix in fixes.items() if "." not in key}
    return _built(cls, words)


def _built(cls: Any, words: dict[str, Any]) -> Any:
    """Inner configurations are wanted as objects by some and as dicts by others."""
    try:
        return cls(**words)
    except Exception:
        return cls(**{name: value.to_dict() if _is_config(value) else value for name, value in words.items()})


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def model_class(mapping: str, model_type: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])
