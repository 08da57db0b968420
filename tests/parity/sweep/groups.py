"""Which cases there are."""

from __future__ import annotations

from tests.parity.sweep import unmade
from tests.parity.sweep.adapters import ADAPTERS
from tests.parity.sweep.cases import TASKS, Case, architectures, further
from tests.parity.sweep.vision import MODELS

CHECKPOINTED = ("llama", "gpt2", "mixtral", "opt", "gemma2", "falcon", "phi", "qwen3_moe", "mamba", "bloom", "deepseek_v3")

FLOORS = {
    **{"causal": 215, "masked": 46, "seq2seq": 36, "image": 34, "text-of-multimodal": 74, "timm": 31},
    **{"base": 300, "speech": 30, "detection": 22, "segmentation": 8, "pictures": 10, "documents": 7, "heads": 12, "series": 1},
}
"""For each task the models that must have been compared: fewer, and the sweep itself has lost its way."""

COMPARED = frozenset(Case("causal", "llama", adapter) for adapter in ("lora", "dora", "ia3", "lora-with-head", "qlora"))
"""What must have been compared in each of its dtypes, whatever may be left out of the others."""


def model_types() -> list[str]:
    """All that transformers has a configuration for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def plain(case: Case) -> bool:
    """Whether it is a model type of transformers as it is made: compared, or in `unmade`."""
    return case.task != "timm" and not case.adapter and not case.checkpointing


def everything() -> list[Case]:
    """Every model type in each task with a loss of its own that knows it; in one more if it is made in none of these."""
    cases = [Case(task, model) for task in TASKS for model in architectures(task)]
    trained = {case.model for case in cases if unmade.reason(case) is None}
    cases += [further(model) for model in model_types() if model not in trained]
    cases += [Case("causal", "llama", adapter) for adapter in ADAPTERS]
    cases += [Case("causal", model, adapter) for model in ("qwen3_moe", "gpt2", "opt") for adapter in ("lora", "dora")]
    cases += [Case("seq2seq", "t5", adapter) for adapter in ("lora", "dora")]
    cases += [Case("causal", model, checkpointing=True) for model in CHECKPOINTED]
    cases += [Case("causal", "llama", adapter, checkpointing=True) for adapter in ("lora", "dora", "lora-with-head")]
    cases += [Case("seq2seq", "t5", checkpointing=True)]
    return cases + [Case("timm", model) for model in MODELS]
