"""Cases that cannot be compared, by reason. What stands here and is compared fails the sweep; so does what is missing here."""

from __future__ import annotations

from collections.abc import Iterator

UNMADE: dict[str, str] = {
    "not made with this head from token ids or pictures alone; its base may be": """
        causal: gemma4_assistant gemma4_unified_assistant git musicgen musicgen_melody reformer
        masked: perceiver
        seq2seq: encoder-decoder voxtral_realtime
        image: imagegpt pp_lcnet shieldgemma2 siglip2
        text-of-multimodal: blip blip-2 diffusion_gemma emu3 git idefics instructblip instructblipvideo
            kosmos-2 molmo2 pi0 pix2struct pp_formulanet udop vision-encoder-decoder
    """,
    "needs timm, which is not installed (transformers' way to timm needs torchvision, too)": """
        causal: gemma3n
        image: timm_wrapper
        text-of-multimodal: fast_vlm gemma3n perception_lm
        base: edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder
            pe_video pe_video_encoder perception_lm timm_backbone timm_wrapper
        detection: omdet-turbo
    """,
    "needs natten, which is not installed": """
        image: dinat
        base: dinat
    """,
    "transformers has no model with a forward for this configuration alone: it is a part of another one, or a name for it": """
        base: apertus1p5_vision_tokenizer
            bark chameleon_vqgan edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder
            edgetam_video_prompt_encoder emu3_vqgan gemma4_unified_audio gemma4_unified_vision glm_image_vqmodel
            idefics_perciever idefics_vision layoutxlm nougat pp_chart2table_vision qwen2_5_omni
            qwen3_omni_moe sam2_mask_decoder sam2_prompt_encoder sam2_video_mask_decoder
            sam2_video_prompt_encoder sam3_geometry_encoder sam3_lite_text_geometry_encoder
            sam3_tracker_mask_decoder sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder
            sam3_tracker_video_prompt_encoder sam_hq_mask_decoder sam_hq_prompt_encoder sam_mask_decoder
            sam_prompt_encoder sapiens2_head t5_gemma_module vibevoice_diffusion
    """,
    "more than 8,000,000 parameters in what no configuration makes smaller": """
        pictures: chmv2 depth_pro
        base: neucodec xcodec2
    """,
    "stock cannot shard it, or train it sharded: a parameter without elements": """
        base: dinov3_vit
    """,
    "a forward takes a session over a video, which is built with gradients switched off": """
        base: edgetam_video sam2_video sam3_tracker_video sam3_video
    """,
    "needs torchaudio, which is not installed": """
        base: higgs_audio_v2_tokenizer
    """,
    "needs detectron2, which is not installed": """
        documents: layoutlmv2
    """,
    "its experts' weights are left as the memory was (torch.empty without an initialization), at times not finite": """
        base: qwen3_omni_moe_talker_text
    """,
    "fails in transformers 5.24 without pictures: its output wants those of its vision model": """
        text-of-multimodal: llama4
    """,
    "transformers refuses its own default configuration": """
        base: gemma4_assistant
    """,
    "nothing comes out that a gradient could come from: codes, by argmax": """
        base: flava_image_codebook wavtokenizer_encoder
    """,
    "batch norm carries last bits beyond the bound, and its head computes in float32 whatever the model's dtype: no fp64": """
        base: slanet
    """,
}
"""Reason -> lines of a task with its model types."""


def _cases(lines: str) -> Iterator[str]:
    task = ""
    for word in lines.split():
        if word.endswith(":"):
            task = word
        else:
            yield task + word


_REASONS = {case: why for why, lines in UNMADE.items() for case in _cases(lines)}


def reason(case: object) -> str | None:
    return _REASONS.get(str(case))


def listed() -> set[str]:
    """The names of all of them."""
    return set(_REASONS)
