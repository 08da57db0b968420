"""Which cases there are, and the few of them that stand for all in make test-all."""

from __future__ import annotations

from tests.parity.sweep.adapters import ADAPTERS
from tests.parity.sweep.cases import TASKS, Case, architectures
from tests.parity.sweep.vision import MODELS

CHECKPOINTED = ("llama", "gpt2", "mixtral", "opt", "gemma2", "falcon", "phi", "qwen3_moe", "mamba", "bloom", "deepseek_v3")

FLOORS = {"causal": 150, "masked": 40, "seq2seq": 25, "image": 20, "timm": 25}
"""Models that must have been compared in `make sweep`: fewer, and the sweep itself has lost its way."""

REPRESENTATIVES = {
    "decoders": [
        Case("causal", model)
        for model in (
            *("llama", "gpt2", "falcon", "opt", "bloom", "gptj", "gemma2", "gemma4_text", "phi", "olmo2", "hy_v4"),
            *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "falcon_mamba", "jamba"),
        )
    ],
    "encoders": [
        *(Case("masked", model) for model in ("bert", "roberta", "electra", "deberta-v2", "albert")),
        *(Case("seq2seq", model) for model in ("t5", "switch_transformers", "bart")),
        *(Case("image", model) for model in ("vit", "resnet", "pvt_v2", "beit")),
    ],
    "timm": [
        Case("timm", model)
        for model in (
            *("vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "swinv2_tiny_window8_256"),
            *("swin_tiny_patch4_window7_224", "convnext_atto", "resnet18"),
        )
    ],
    "adapters": [
        *(
            Case("causal", "llama", adapter)
            for adapter in [
                "lora",
                "lora-with-head",
                "lora-with-norms",
                "dora",
                "ia3",
                "lokr",
                "vera",
                "oft",
                "prompt-tuning",
                "qlora",
            ]
        ),
        *(Case("causal", "gpt2", adapter) for adapter in ("lora", "dora")),
        Case("seq2seq", "t5", "lora"),
    ],
    "checkpointing": [
        *(Case("causal", model, checkpointing=True) for model in ("llama", "gpt2", "mixtral", "mamba")),
        *(Case("causal", "llama", adapter, checkpointing=True) for adapter in ("lora", "dora")),
        Case("seq2seq", "t5", checkpointing=True),
    ],
}


def everything() -> list[Case]:
    cases = [Case(task, model) for task in TASKS for model in architectures(task)]
    cases += [Case("causal", "llama", adapter) for adapter in ADAPTERS]
    cases += [Case("causal", model, adapter) for model in ("qwen3_moe", "gpt2", "opt") for adapter in ("lora", "dora")]
    cases += [Case("seq2seq", "t5", adapter) for adapter in ("lora", "dora")]
    cases += [Case("causal", model, checkpointing=True) for model in CHECKPOINTED]
    cases += [Case("causal", "llama", adapter, checkpointing=True) for adapter in ("lora", "dora", "lora-with-head")]
    cases += [Case("seq2seq", "t5", checkpointing=True)]
    return cases + [Case("timm", model) for model in MODELS]
