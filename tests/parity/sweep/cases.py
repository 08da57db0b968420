"""What is swept: names of models with their task, and how a worker makes one.

model, batch, loss = prepare(case)               # batch(step) -> keyword arguments of this rank; loss(output) -> scalar
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.sweep import tiny

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM",
    "masked": "MODEL_FOR_MASKED_LM",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "text-of-multimodal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
}


class Case(NamedTuple):
    task: str
    """a key of TASKS, or "timm" """
    model: str
    """model type of transformers, or a name of timm"""
    adapter: str = ""
    """a key of adapters.ADAPTERS: PEFT over the model"""
    checkpointing: bool = False
    dtypes: tuple[str, ...] = ("fp32", "bf16")

    def __str__(self) -> str:
        extra = [self.adapter, "checkpointing" if self.checkpointing else ""]
        return " ".join([f"{self.task}:{self.model}", *filter(None, extra)])


def architectures(task: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"{TASKS[task]}_MAPPING_NAMES"))


def prepare(
    case: Case, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Callable[[int], dict[str, Any]], Callable[[Any], torch.Tensor]]:
    """dtype: see `adapters.adapt`; all other models are made in float32."""
    if case.task == "timm":
        from tests.parity.sweep import vision

        return vision.prepare(case.model)
    model, config = _transformer(case)
    if case.adapter:
        from tests.parity.sweep import adapters

        model = adapters.adapt(model, case.adapter, dtype)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.adapter:
            model.enable_input_require_grads()
    _no_dropout(model)
    model.train()
    _trial(model, _batch(case, config, 0))
    return model, lambda step: _batch(case, config, step), lambda output: output.loss


def _transformer(case: Case) -> tuple[nn.Module, Any]:
    config = tiny.config(case.model)
    cls = tiny.model_class(TASKS[case.task], case.model)
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(param.numel() for param in cls(config).parameters())
    if size > 4_000_000:
        raise ValueError(f"{size:,} parameters: not tiny")
    torch.manual_seed(0)
    return cls(config), config


def _batch(case: Case, config: Any, step: int) -> dict[str, Any]:
    """Another batch for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if case.task == "image":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        shape = (tiny.BATCH, getattr(config, "num_channels", 3), height, width)
        return {
            "pixel_values": torch.randn(shape, generator=generator),
            "labels": torch.randint(0, 2, (tiny.BATCH,), generator=generator),
        }
    ids = torch.randint(tiny.WORDS, tiny.VOCABULARY, (tiny.BATCH, tiny.LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _trial(model: nn.Module, batch: dict[str, Any]) -> None:
    """Without any sharding: what fails here has nothing to do with FSDP2."""
    loss = model(**batch).loss
    if loss is None or not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss is {loss}")
    loss.backward()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    if not gradients or not all(bool(grad.isfinite().all()) for grad in gradients):
        raise ValueError("no gradients, or not finite ones")
    model.zero_grad()
