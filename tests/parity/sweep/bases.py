"""The class for a model type that no task with a loss of its own trains: one with a head, or whatever there is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from tests.parity.sweep import tiny

HEADS = {
    "speech": ("CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "RNNT", "TDT"),
    "detection": ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION"),
    "segmentation": ("UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION"),
    "pictures": ("DEPTH_ESTIMATION", "VIDEO_CLASSIFICATION", "IMAGE_TO_IMAGE"),
    "documents": ("DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING", "VISUAL_QUESTION_ANSWERING", "TEXT_RECOGNITION"),
    "series": ("TIME_SERIES_PREDICTION",),
    "heads": ("TOKEN_CLASSIFICATION", "PRETRAINING"),
}
"""Tasks, and the mappings of transformers that they are made of. A model type is in the first one that knows it."""

BASE = "base"
"""The task of all other model types, and of PLAIN."""

PLAIN = {
    "blip": "its head wants labels and a decoder's beginning",
    "dpt": "its head takes hidden states of a third and fourth stage",
    "flava": "its head wants pictures in the words of a codebook",
    "sapiens2": "its head has a configuration of its own, which is None by default",
    "splinter": "its head wants question tokens",
    "timesfm": "what comes out of its head is the model, too",
}
"""Model types that are trained without the head that they have, and why."""

WHOLE = {
    "slanext": "SLANeXtForTableRecognition",
}
"""Model types whose usual class is a part of what they are, to the whole."""


def task(model_type: str) -> str:
    if model_type not in PLAIN:
        for name, mappings in HEADS.items():
            if any(model_type in _names(mapping) for mapping in mappings):
                return name
    return BASE


def model_class(name: str, model_type: str) -> Any:
    """The class for a model type in a task of HEADS, or BASE."""
    for mapping in HEADS.get(name, ()):
        if model_type in _names(mapping):
            return tiny.model_class(f"MODEL_FOR_{mapping}", model_type)
    named = WHOLE.get(model_type) or _names("", "MODEL").get(model_type, ())
    named = (named,) if isinstance(named, str) else named
    found = _classes(model_type)
    if not found and not named:
        raise ValueError("no class of transformers has this configuration as its own")
    if not found:
        return tiny.model_class("MODEL", model_type)
    return min(
        found,
        key=lambda cls: (
            cls.__name__ not in named,
            not cls.__name__.endswith(("Model", "Backbone")),
            "For" not in cls.__name__,
            len(cls.__name__),
        ),
    )


def _names(mapping: str, whole: str = "") -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"{whole or f'MODEL_FOR_{mapping}'}_MAPPING_NAMES")
    return names


def _classes(model_type: str) -> list[Any]:
    """All models of a type's package that are made from its configuration."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    config = tiny.config_class(model_type)
    package = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
    found = []
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.startswith("modeling_"):
            module = importlib.import_module(f"{package.__name__}.{entry.name}")
            found += [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
    return [
        cls
        for cls in found
        if issubclass(cls, PreTrainedModel)
        and cls.config_class is config
        and cls.forward is not PreTrainedModel.forward
        and not cls.__name__.endswith("PreTrainedModel")
    ]
