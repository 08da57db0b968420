"""What is swept: names of models with their task, and how a worker makes one.

model, batch, loss = prepare(case)               # batch(step) -> keyword arguments of this rank; loss(output) -> scalar
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.sweep import bases, inputs, tiny

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM",
    "masked": "MODEL_FOR_MASKED_LM",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "text-of-multimodal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
}


class Case(NamedTuple):
    task: str
    """a key of TASKS or of bases.HEADS, bases.BASE, or "timm" """
    model: str
    """model type of transformers, or a name of timm"""
    adapter: str = ""
    """a key of adapters.ADAPTERS: PEFT over the model"""
    checkpointing: bool = False
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    """fp32 first: bf16 is measured against it"""

    def __str__(self) -> str:
        extra = [self.adapter, "checkpointing" if self.checkpointing else ""]
        return " ".join([f"{self.task}:{self.model}", *filter(None, extra)])


def architectures(task: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"{TASKS[task]}_MAPPING_NAMES"))


IN_FP32 = ("owlvit", "lightglue")
"""In bf16 stock's own update of the first is off by a third; the other one's convolutions take minutes on a CPU."""


TIED = ("d_fine", "deimv2")
"""They take the largest of numbers that are all the same as long as a head is zero: stock's own update in fp64 then changes by
a hundredth with weights that change by 1e-15."""
STEEP = dict.fromkeys(("moshi_depth", "tipsv2_dpt"), 1e-4)
"""What the loss is multiplied by: with stock, too, a first step of the usual size carries these beyond all numbers."""
FLAT = {"slanext": 1e3}
"""Likewise: what comes out of it is so small that a step else moves weights by their last bits."""


def further(model_type: str) -> Case:
    """What no task trains: with a loss made up from all that comes out."""
    return Case(bases.task(model_type), model_type, dtypes=("fp32",) if model_type in IN_FP32 else ("fp32", "bf16"))


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
    _no_scalars(model)
    if case.model in TIED:
        _no_zeros(model)
    model.train()
    loss = _own_loss if case.task in TASKS else functools.partial(inputs.loss, scale={**STEEP, **FLAT}.get(case.model, 1.0))
    _trial(model, _batch(case, model, config, 0), loss)
    return model, lambda step: _batch(case, model, config, step), loss


def _own_loss(output: Any) -> Any:
    return output.loss


def _transformer(case: Case) -> tuple[nn.Module, Any]:
    config = tiny.config(case.model)
    own = case.task in TASKS
    cls = tiny.model_class(TASKS[case.task], case.model) if own else bases.model_class(case.task, case.model)
    wanted = cls.config_class
    if wanted is not None and not isinstance(config, wanted) and isinstance(config.get_text_config(), wanted):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(param.numel() for param in cls(config).parameters())
    if size > 8_000_000:
        raise ValueError(f"{size:,} parameters: not tiny")
    torch.manual_seed(0)
    return cls(config), config


def _batch(case: Case, model: nn.Module, config: Any, step: int) -> dict[str, Any]:
    """Another batch for every rank and step."""
    if case.task not in TASKS:
        return inputs.arguments(model, config, step, dist.get_rank())
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


def _no_scalars(model: nn.Module) -> None:
    """Of shape [1] instead, as `fully_shard` tells whoever gives it one."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.ndim == 0:
                setattr(module, name, nn.Parameter(param.detach().float().reshape(1), requires_grad=param.requires_grad))


def _no_zeros(model: nn.Module) -> None:
    for param in model.parameters():
        if not param.any():
            nn.init.normal_(param, std=0.02)


def _trial(model: nn.Module, batch: dict[str, Any], loss_of: Callable[[Any], Any]) -> None:
    """Without any sharding: what fails here has nothing to do with FSDP2."""
    loss = loss_of(model(**batch))
    if loss is None or not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss is {loss}")
    loss.backward()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    if not gradients or not all(bool(grad.isfinite().all()) for grad in gradients):
        raise ValueError("no gradients, or not finite ones")
    model.zero_grad()
