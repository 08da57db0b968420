"""Arguments for the forward of any model of transformers, by the names of its parameters, and a loss from what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.parity.sweep import tiny

FRAMES, SAMPLES, CLIPS = 64, 2000, 2
GRID = (1, 4, 4)  # time, height, width in patches


class Draw:
    """Values of one batch, drawn from a generator in the sizes that a configuration has."""

    def __init__(self, config: Any, generator: torch.Generator) -> None:
        self.config, self.generator = config, generator

    def size(self, *names: str, default: int) -> int:
        """The first of these names that the configuration, or one inside of it, has."""
        for config in _with_inner(self.config):
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def words(self, *shape: int) -> torch.Tensor:
        return torch.randint(tiny.WORDS, tiny.VOCABULARY, shape, generator=self.generator)

    def picture(self, *ahead: int) -> torch.Tensor:
        side = self.size("image_size", "img_size", "input_size", default=32)
        return self.floats(*ahead, self.size("num_channels", "in_channels", "in_chans", default=3), side, side)

    def patches(self) -> torch.Tensor:
        """What models take that get pictures of any size: rows of flattened patches."""
        time = self.size("temporal_patch_size", "patch_temporal", default=1)
        count = tiny.BATCH * GRID[0] * GRID[1] * GRID[2]
        return self.floats(
            count,
            self.size("in_channels", "in_chans", "num_channels", default=3) * time * self.size("patch_size", default=8) ** 2,
        )

    def hidden(self) -> torch.Tensor:
        return self.floats(tiny.BATCH, tiny.LENGTH, self.size("hidden_size", "d_model", default=32))

    def features(self) -> torch.Tensor:
        bins = self.size("num_mel_bins", "feature_size", "input_dim", "input_feat_size", "num_mel_filters", default=80)
        return self.floats(tiny.BATCH, FRAMES, bins)


VALUES: dict[str, Callable[[Draw], Any]] = {
    "input_ids": lambda draw: draw.words(tiny.BATCH, tiny.LENGTH),
    "decoder_input_ids": lambda draw: draw.words(tiny.BATCH, tiny.LENGTH),
    "inputs_embeds": Draw.hidden,
    "hidden_states": Draw.hidden,
    "encoder_hidden_states": Draw.hidden,
    "attention_mask": lambda draw: torch.ones(tiny.BATCH, tiny.LENGTH, dtype=torch.long),
    "bbox": lambda draw: torch.tensor([1, 2, 5, 9]).expand(tiny.BATCH, tiny.LENGTH, 4),
    "pixel_values": lambda draw: draw.picture(tiny.BATCH),
    "image": lambda draw: draw.picture(tiny.BATCH),
    "pixel_values_videos": lambda draw: draw.picture(tiny.BATCH, draw.size("num_frames", "frames_per_clip", default=CLIPS)),
    "grid_thw": lambda draw: torch.tensor([GRID] * tiny.BATCH),
    "image_grid_thw": lambda draw: torch.tensor([GRID] * tiny.BATCH),
    "input_values": lambda draw: draw.floats(tiny.BATCH, SAMPLES),
    "input_features": Draw.features,
    "input_features_mask": lambda draw: torch.ones(tiny.BATCH, FRAMES, dtype=torch.long),
    "spectrogram": Draw.features,
    "past_values": lambda draw: draw.floats(
        tiny.BATCH, draw.size("context_length", default=16), draw.size("num_input_channels", default=1)
    ),
}


def arguments(model: nn.Module, config: Any, step: int, rank: int) -> dict[str, Any]:
    """Another batch for every rank and step."""
    draw = Draw(config, torch.Generator().manual_seed(1000 * step + rank))
    parameters = inspect.signature(model.forward).parameters
    wanted = [
        name for name, value in parameters.items() if value.default is value.empty and value.kind == value.POSITIONAL_OR_KEYWORD
    ]
    special = SPECIAL.get(config.model_type, {})
    if not wanted and not special:
        wanted = [name for name in ("input_ids", "pixel_values", "input_features", "input_values") if name in parameters]
        wanted = wanted or [model.main_input_name]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters and not special:
        wanted.append("decoder_input_ids")
    values = {**VALUES, **special}
    given = {name: values[name] for name in dict.fromkeys([*wanted, *special])}
    if not special and {"grid_thw", "image_grid_thw"} & given.keys():
        given |= {name: Draw.patches for name in ("hidden_states", "pixel_values") if name in given}
    return {name: value(draw) for name, value in given.items()}


def _ones(*shape: int, dtype: torch.dtype = torch.long) -> Callable[[Draw], torch.Tensor]:
    return lambda draw: torch.ones(shape, dtype=dtype)


def _zeros(*shape: int, dtype: torch.dtype = torch.long) -> Callable[[Draw], torch.Tensor]:
    return lambda draw: torch.zeros(shape, dtype=dtype)


def _floats(*shape: int) -> Callable[[Draw], torch.Tensor]:
    return lambda draw: draw.floats(*shape)


def _words(*shape: int) -> Callable[[Draw], torch.Tensor]:
    return lambda draw: draw.words(*shape)


def _placed(count: int, *names: str, each: int = tiny.LENGTH) -> Callable[[Draw], torch.Tensor]:
    """Words that begin with as many of a configuration's special token as there are features to stand in their places."""

    def ids(draw: Draw) -> torch.Tensor:
        words = draw.words(tiny.BATCH, each)
        words[:, :count] = draw.size(*names or ("image_token_id", "image_token_index"), default=0)
        return words

    return ids


def _mel(bins: int, frames: int = 2 * FRAMES) -> dict[str, Callable[[Draw], Any]]:
    return {"input_features": _floats(tiny.BATCH, bins, frames)}


_TEXT = {"input_ids": VALUES["input_ids"]}
_MONO = {"input_values": _floats(tiny.BATCH, 1, 512)}
_SERIES = {
    "past_values": _floats(tiny.BATCH, 15),
    "past_time_features": _floats(tiny.BATCH, 15, 0),
    "past_observed_mask": _ones(tiny.BATCH, 15),
    "future_values": _floats(tiny.BATCH, 4),
    "future_time_features": _floats(tiny.BATCH, 4, 0),
}
_VIDEO = {"pixel_values": lambda draw: draw.picture(tiny.BATCH, CLIPS)}
_PICTURES = {"pixel_values": _floats(tiny.BATCH, 3, 64, 64)}
_PATCHES = {"flattened_patches": lambda draw: draw.floats(tiny.BATCH, 16, 2 + 16 * 16 * 3).abs()}  # row and column come first
_SAM3 = {
    "vision_features": _floats(tiny.BATCH, 16, 32),
    "text_features": _floats(tiny.BATCH, 8, 32),
    "vision_pos_encoding": _floats(tiny.BATCH, 16, 32),
    "spatial_shapes": lambda draw: torch.tensor([[4, 4]]),
}
_SAM3_ENCODER = {
    "vision_features": lambda draw: [draw.floats(tiny.BATCH, 32, 4, 4)],
    "text_features": _floats(tiny.BATCH, 8, 32),
    "vision_pos_embeds": lambda draw: [draw.floats(tiny.BATCH, 32, 4, 4)],
}
_SAM3_MASKS = {
    "decoder_queries": _floats(tiny.BATCH, 10, 32),
    "backbone_features": lambda draw: [draw.floats(tiny.BATCH, 32, side, side) for side in (16, 8, 4)],
    "encoder_hidden_states": _floats(tiny.BATCH, 16, 32),
}
_SPOKEN = {
    **_TEXT,
    "duration_labels": lambda draw: torch.full((tiny.BATCH, tiny.LENGTH), 2),
    "spectrogram_labels": _floats(tiny.BATCH, 2 * tiny.LENGTH, 80),
    "pitch_labels": _floats(tiny.BATCH, tiny.LENGTH, 1),
    "energy_labels": _floats(tiny.BATCH, tiny.LENGTH, 1),
}
_LINE = {"pixel_values": _floats(tiny.BATCH, 3, 48, 160)}
_TALL = {"pixel_values": _floats(tiny.BATCH, 3, 96, 160)}
_SIGLIP2 = {
    "pixel_values": _floats(tiny.BATCH, 16, 3 * 8 * 8),
    "pixel_attention_mask": _ones(tiny.BATCH, 16),
    "spatial_shapes": lambda draw: torch.tensor([[4, 4]] * tiny.BATCH),
}

_TOKENS, _ATOMS = 6, 12


def _atoms(draw: Draw) -> Any:
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    token = (torch.arange(_ATOMS) // (_ATOMS // _TOKENS)).expand(tiny.BATCH, -1)
    return EsmFold2AtomInputs(
        ref_pos=draw.floats(tiny.BATCH, _ATOMS, 3),
        ref_charge=draw.floats(tiny.BATCH, _ATOMS),
        atom_attention_mask=torch.ones(tiny.BATCH, _ATOMS, dtype=torch.bool),
        ref_element=torch.randint(1, 20, (tiny.BATCH, _ATOMS), generator=draw.generator),
        ref_atom_name_chars=torch.randint(0, 40, (tiny.BATCH, _ATOMS, 4), generator=draw.generator),
        ref_space_uid=token,
        atom_to_token=token,
    )


def _counted(draw: Draw) -> torch.Tensor:
    return torch.arange(_TOKENS).expand(tiny.BATCH, -1)


_FOLD: dict[str, Callable[[Draw], Any]] = {
    "token_index": _counted,
    "residue_index": _counted,
    **dict.fromkeys(("asym_id", "sym_id", "entity_id", "mol_type"), _zeros(tiny.BATCH, _TOKENS)),
    "res_type": lambda draw: torch.randint(2, 22, (tiny.BATCH, _TOKENS), generator=draw.generator),
    "token_bonds": _zeros(tiny.BATCH, _TOKENS, _TOKENS, 1, dtype=torch.float32),
    "attention_mask": _ones(tiny.BATCH, _TOKENS, dtype=torch.bool),
    "atom_inputs": _atoms,
    "input_ids": _words(tiny.BATCH, _TOKENS),
    "msa": lambda draw: torch.randint(2, 22, (tiny.BATCH, 3, _TOKENS), generator=draw.generator),
}
SPECIAL: dict[str, dict[str, Callable[[Draw], Any]]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(("dac", "encodec", "mimi", "mimi_encoder", "pe_audio_encoder", "xcodec"), _MONO),
    **dict.fromkeys(("pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_encoder"), _MONO),
    **dict.fromkeys(("vibevoice_acoustic_tokenizer",), _MONO),
    **dict.fromkeys(("glmasr_encoder", "qwen2_audio_encoder", "voxtral_encoder", "voxtral_realtime_encoder"), _mel(128)),
    **dict.fromkeys(("videomae", "timesformer", "vivit"), _VIDEO),
    **dict.fromkeys(("mobilevitv2", "rf_detr", "d_fine", "deimv2"), _PICTURES),
    **dict.fromkeys(("pix2struct_vision_model", "kosmos_2_5_vision_model"), _PATCHES),
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "colqwen2", "glmga"), _TEXT
    ),
    **dict.fromkeys(("dots3_note", "granite_docling", "cohere2_vision", "janus", "step3p7", "embedding_gemma2"), _TEXT),
    **dict.fromkeys(("sam3_detr_decoder", "sam3_lite_text_detr_decoder"), _SAM3),
    "audio-spectrogram-transformer": {"input_values": _floats(tiny.BATCH, 1024, 128)},
    "blip_2_qformer": {"query_embeds": _floats(tiny.BATCH, 8, 32), "encoder_hidden_states": _floats(tiny.BATCH, 16, 32)},
    "bros": {**_TEXT, "bbox": lambda draw: torch.rand(tiny.BATCH, tiny.LENGTH, 8, generator=draw.generator)},
    "clap_audio_model": {"input_features": _floats(tiny.BATCH, 1, 64, 32)},
    "clap": {**_TEXT, "input_features": _floats(tiny.BATCH, 1, 64, 32)},
    "clvp": {**_TEXT, **_mel(80)},
    "decision_transformer": {
        "states": _floats(tiny.BATCH, 4, 17),
        "actions": _floats(tiny.BATCH, 4, 4),
        "rewards": _floats(tiny.BATCH, 4, 1),
        "returns_to_go": _floats(tiny.BATCH, 4, 1),
        "timesteps": _ones(tiny.BATCH, 4),
        "attention_mask": _ones(tiny.BATCH, 4),
    },
    "gemma3n_audio": {
        "audio_mel": _floats(tiny.BATCH, FRAMES, 128),
        "audio_mel_mask": _zeros(tiny.BATCH, FRAMES, dtype=torch.bool),
    },
    "idefics2_perceiver": {"context": _floats(tiny.BATCH, 16, 32), "attention_mask": _ones(tiny.BATCH, 16)},
    "instructblip": {"input_ids": _placed(4), "pixel_values": VALUES["pixel_values"], "qformer_input_ids": VALUES["input_ids"]},
    "instructblipvideo": {
        "input_ids": _placed(8, "video_token_id"),
        "pixel_values": _floats(tiny.BATCH, 2, 3, 32, 32),
        "qformer_input_ids": VALUES["input_ids"],
    },
    "blip-2": {"input_ids": _placed(4), "pixel_values": VALUES["pixel_values"]},
    "kosmos-2": {
        **_TEXT,
        "pixel_values": VALUES["pixel_values"],
        "image_embeds_position_mask": lambda draw: (torch.arange(tiny.LENGTH) < 4).expand(tiny.BATCH, tiny.LENGTH),
    },
    "csm": {"input_ids": _words(tiny.BATCH, 8, 4), "labels": _words(tiny.BATCH, 8, 4)},
    "idefics": {
        **_TEXT,
        "pixel_values": _floats(tiny.BATCH, 2, 3, 32, 32),
        "image_attention_mask": _ones(tiny.BATCH, tiny.LENGTH, 2),
    },
    "oneformer": {**_PICTURES, "task_inputs": _words(tiny.BATCH, 16), "text_inputs": _words(tiny.BATCH, 4, 16)},
    "colpali": {"input_ids": _placed(16, each=24), "pixel_values": VALUES["pixel_values"]},
    "gemma4_vision": {
        "pixel_values": _floats(tiny.BATCH, 36, 3 * 8 * 8),
        "pixel_position_ids": lambda draw: torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(tiny.BATCH, 36, 2),
    },
    "voxtral_realtime": {**_TEXT, **_mel(128)},
    "voxtral_realtime_text": {**_TEXT, "t_cond": _floats(1, 1, 32)},
    "vibevoice": {
        "input_ids": _placed(8, "audio_token_id"),
        "input_values": _floats(tiny.BATCH, 1, 32),
        "padding_mask": _ones(tiny.BATCH, 32),
    },
    **{
        name: {"input_features": _floats(128, 2 * FRAMES), "feature_lens": lambda draw: torch.tensor([FRAMES] * 2)}
        for name in ("qwen2_5_omni_audio_encoder", "qwen3_omni_moe_audio_encoder")
    },
    **dict.fromkeys(("sam3_detr_encoder", "sam3_lite_text_detr_encoder"), _SAM3_ENCODER),
    **dict.fromkeys(("sam3_mask_decoder", "sam3_lite_text_mask_decoder"), _SAM3_MASKS),
    **dict.fromkeys(("glm_image", "nemotron_h_omni"), _TEXT),
    "qwen2_5_omni_dit": {
        "hidden_states": _floats(tiny.BATCH, 8, 80),
        "condition_vector": _floats(tiny.BATCH, 16, 80),
        "speaker_embedding": _floats(tiny.BATCH, 8, 192),
        "quantized_code": _words(tiny.BATCH, 4),
        "time_step": lambda draw: torch.rand(tiny.BATCH, generator=draw.generator),
    },
    "qwen2_5_omni_token2wav": {
        "code": _words(1, 4),
        "conditioning": _floats(1, 192),
        "reference_mel": _floats(1, 16, 80),
        "num_steps": lambda draw: 2,
    },
    "deepseek_ocr2_encoder": {"inputs_embeds": Draw.hidden, "num_patches": lambda draw: 8},
    "colmodernvbert": {"input_ids": _placed(1), "pixel_values": _floats(tiny.BATCH, 1, 3, 32, 32)},
    "uvdoc": _PICTURES,
    "fun_asr_nano": {
        "input_ids": _placed(32, "audio_token_id", each=40),
        "input_features": _floats(tiny.BATCH, 32, 560),
        "input_features_mask": _ones(tiny.BATCH, 32),
    },
    "fun_asr_nano_encoder": {"input_features": _floats(tiny.BATCH, 32, 560), "input_features_mask": _ones(tiny.BATCH, 32)},
    **{
        name: {"pixel_values": _floats(1, 3, 8, 8 * 32), "target_sizes": lambda draw: torch.tensor([[4, 4]] * 2)}
        for name in ("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision")
    },
    "molmo2_adapter": {
        "image_features": _floats(tiny.BATCH, 16, 64),
        "pooled_patches_idx": lambda draw: torch.arange(tiny.BATCH * 16).reshape(-1, 4),
    },
    "rag": {
        "input_ids": VALUES["input_ids"],
        "context_input_ids": _words(2 * tiny.BATCH, tiny.LENGTH),
        "context_attention_mask": _ones(2 * tiny.BATCH, tiny.LENGTH),
        "doc_scores": _floats(tiny.BATCH, 2),
        "decoder_input_ids": VALUES["input_ids"],
    },
    "lightglue": {"pixel_values": _floats(tiny.BATCH, 2, 3, 64, 64)},
    "lxmert": {**_TEXT, "visual_feats": _floats(tiny.BATCH, 4, 2048), "visual_pos": _floats(tiny.BATCH, 4, 4)},
    "mimi_decoder": {"latents": _floats(tiny.BATCH, 32, 16)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": _floats(tiny.BATCH, 32, 16)},
    "mllama_vision_model": {
        "pixel_values": _floats(tiny.BATCH, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": _ones(tiny.BATCH, 1),
        "aspect_ratio_mask": _ones(tiny.BATCH, 1, 4),
    },
    "pi0": {
        "action_embeds": _floats(tiny.BATCH, 4, 32),
        "input_ids": _placed(16, each=24),
        "pixel_values": _floats(tiny.BATCH, 1, 3, 32, 32),
        "pixel_attention_mask": _ones(tiny.BATCH, 1, dtype=torch.bool),
    },
    "pix2struct": {**_PATCHES, "decoder_input_ids": VALUES["input_ids"]},
    "phi4_multimodal_audio": {
        "hidden_states": _floats(tiny.BATCH, FRAMES, 80),
        "mask": _ones(tiny.BATCH, FRAMES, dtype=torch.bool),
    },
    "pop2piano": {"input_features": _floats(tiny.BATCH, 16, 32), "decoder_input_ids": VALUES["input_ids"]},
    "qwen3_omni_moe_talker_code_predictor": {"inputs_embeds": Draw.hidden},
    "siglip2_vision_model": _SIGLIP2,
    "superglue": {"pixel_values": _floats(tiny.BATCH, 2, 3, 64, 64)},
    "t5gemma2_decoder": {**_TEXT, "encoder_hidden_states": Draw.hidden},
    "timesfm": {
        "past_values": _floats(tiny.BATCH, 64),
        "past_values_padding": _zeros(tiny.BATCH, 64),
        "freq": _zeros(tiny.BATCH, 1),
    },
    "timesfm2_5": {"past_values": _floats(tiny.BATCH, 64)},
    "unlimited_ocr_vision_encoder": {"patch_embeds": _floats(tiny.BATCH, 32, 4, 4)},
    "video_llama_3_vision": {
        "pixel_values": Draw.patches,
        "grid_thw": VALUES["grid_thw"],
        "merge_sizes": _ones(tiny.BATCH),
    },
    "wav2vec2-bert": {"input_features": _floats(tiny.BATCH, FRAMES, 160)},
    **{
        name: {"input_features": _floats(tiny.BATCH, FRAMES, 320)}
        for name in ("granite_speech5_ctc", "granite_speech5_encoder")
    },
    **{
        name: {"hidden_states": _floats(tiny.BATCH, FRAMES, 160)}
        for name in ("granite_speech_encoder", "granite_speech_plus_encoder")
    },
    **dict.fromkeys(("pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec"), _LINE),
    **dict.fromkeys(("pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec"), _TALL),
    **{name: {"hidden_states": _floats(tiny.BATCH, 3, 64, 64)} for name in ("florence_vision",)},
    **{name: {**_TEXT, **_PICTURES} for name in ("grounding-dino", "mm-grounding-dino")},
    "audioflamingo3_encoder": {**_mel(128), "input_features_mask": _ones(tiny.BATCH, 2 * FRAMES)},
    "dia": {**_TEXT, "decoder_input_ids": _words(tiny.BATCH, tiny.LENGTH, 2)},
    "dia_decoder": {"input_ids": _words(tiny.BATCH, tiny.LENGTH, 2), "encoder_hidden_states": Draw.hidden},
    "efficientloftr": {"pixel_values": _floats(tiny.BATCH, 2, 3, 64, 64)},
    "kimi_k25_vision": {"pixel_values": _floats(32, 3, 8, 8)},
    "kyutai_speech_to_text": {"input_ids": _words(tiny.BATCH, tiny.LENGTH, 33)},
    "molmo2_vision": {"pixel_values": _floats(tiny.BATCH, 16, 192)},
    "moss_transcribe_diarize_audio": {"input_features": _floats(tiny.BATCH, 80, 128)},
    "musicgen": {**_TEXT, "decoder_input_ids": _words(8, tiny.LENGTH)},
    "musicgen_decoder": {"input_ids": _words(8, tiny.LENGTH)},
    "musicgen_melody": {**_TEXT, "input_features": _floats(tiny.BATCH, 16, 12), "decoder_input_ids": _words(8, tiny.LENGTH)},
    "musicgen_melody_decoder": {"input_ids": _words(8, tiny.LENGTH)},
    "pe_audio": {**_TEXT, **_MONO},
    "qwen2_5_omni_bigvgan": {"mel_spectrogram": _floats(tiny.BATCH, 80, 16)},
    "qwen3_asr_encoder": {"input_features": _floats(tiny.BATCH, 128, 100), "input_features_mask": _ones(tiny.BATCH, 100)},
    "seggpt": {name: _floats(tiny.BATCH, 3, 32, 32) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")},
    "siglip2": {**_TEXT, **_SIGLIP2},
    "speech-encoder-decoder": {"input_values": _floats(tiny.BATCH, SAMPLES), "decoder_input_ids": VALUES["input_ids"]},
    "t5gemma2_encoder": _TEXT,
    "udop": {**_TEXT, "bbox": _floats(tiny.BATCH, tiny.LENGTH, 4), "decoder_input_ids": VALUES["input_ids"]},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": _floats(tiny.BATCH, 32, 16)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": _floats(tiny.BATCH, 1, 512)},
    **dict.fromkeys(("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan"), _SPOKEN),
    "tvp": {"input_ids": _words(1, tiny.LENGTH), "pixel_values": _floats(1, 2, 3, 32, 32)},
    "xclip": {**_TEXT, "pixel_values": _floats(tiny.BATCH, 8, 3, 32, 32)},
    "xclip_vision_model": {"pixel_values": _floats(16, 3, 32, 32)},
    "gemma4_audio": {"input_features": _floats(tiny.BATCH, FRAMES, 128), "attention_mask": _ones(tiny.BATCH, FRAMES)},
    **dict.fromkeys(("hunyuan_vl",), _TEXT),
    "molmo2": {**_TEXT, "mm_token_type_ids": _zeros(tiny.BATCH, tiny.LENGTH)},
    "moshi_depth": {"input_ids": _words(tiny.BATCH, 8), "last_hidden_state": _floats(tiny.BATCH, 1, 32)},
    "blt_local_encoder": {
        **_TEXT,
        "num_patches": lambda draw: 4,
        "patch_ids": lambda draw: (torch.arange(tiny.LENGTH) // 4).expand(tiny.BATCH, -1),
    },
    "blt_local_decoder": {"inputs_embeds": Draw.hidden, "patch_embeds": _floats(tiny.BATCH, 4, 32)},
    **{
        name: {"input_values": _floats(tiny.BATCH, 1, SAMPLES)}
        for name in ("omniasr_audio", "omniasr_ctc", "wavtokenizer", "wavtokenizer_encoder")
    },
    "inkling_audio": {"audio_input_ids": _words(tiny.BATCH, tiny.LENGTH, 80)},
    "inkling_vision": {"pixel_values": _floats(4, 2, 8, 8, 3)},
    "inkling2_vision": {
        "pixel_values": _floats(8, 16, 16, 3),
        "image_grid_thw": lambda draw: torch.tensor([[1, 2, 2]] * tiny.BATCH),
    },
    "gemma4_unified_assistant": {
        "inputs_embeds": _floats(tiny.BATCH, 1, 64),
        "position_ids": lambda draw: torch.full((tiny.BATCH, 1), tiny.LENGTH),
        "shared_kv_states": lambda draw: {
            name: (draw.floats(tiny.BATCH, 2, tiny.LENGTH, 8), draw.floats(tiny.BATCH, 2, tiny.LENGTH, 8))
            for name in ("full_attention", "sliding_attention")
        },
    },
    "muse_glimmer_assistant": {
        "noise_embeds": Draw.hidden,
        "context_hidden_states": lambda draw: draw.floats(tiny.BATCH, 8, 32 * len(draw.config.target_layer_ids)),
        "attention_mask": lambda draw: dict.fromkeys(("full_attention", "sliding_attention")),
    },
    "dots3_note_audio_encoder": {
        "input_features": lambda draw: draw.floats(tiny.BATCH, draw.size("num_mel_bins", default=128), FRAMES),
        "chunk_sample_lengths": lambda draw: torch.tensor([FRAMES, FRAMES // 2]) * draw.config.hop_length,
    },
    "jev": {
        "input_ids": _words(1, tiny.LENGTH),
        "marks": lambda draw: torch.tensor([[5, 9, tiny.LENGTH]]),
        "num_options": lambda draw: torch.tensor([[2, 6, 16]]),
        "question_type_ids": lambda draw: torch.tensor([[0, 1, 2]]),
    },
    "esmfold2": _FOLD,
    "paddleocr_vl_vision": {"pixel_values": _floats(1, 32, 3, 8, 8), "grid_thw": VALUES["grid_thw"]},
}
"""By model type: what a forward is given, if its names do not tell."""


def loss(output: Any, scale: float = 1.0) -> torch.Tensor:
    """Mean squares of all that comes out in floating point; weighted, for those of what a norm puts out are constant."""
    found = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in _tensors(output)]
    found = [tensor for tensor in found if tensor.is_floating_point() and tensor.requires_grad and tensor.numel()]
    if not found:
        raise ValueError("nothing comes out that a gradient could come from")
    return scale * torch.stack([(_weights(tensor) * tensor.square()).mean() for tensor in found]).sum()


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """Between a half and one and a half, another one for each place."""
    return 1 + 0.5 * torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).reshape(tensor.shape)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _with_inner(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if tiny._is_config(value):
            yield from _with_inner(value)
