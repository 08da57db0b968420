"""PEFT over a model of transformers: what each method adds, drawn from a seed, so that no gradient is zero by its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _lora(**options: Any) -> Callable[[Any], Any]:
    return lambda peft: peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **options})


def _other(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda peft: getattr(peft, name)(**{"target_modules": ["q_proj", "v_proj"], **options})


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "lora": _lora(),
    "lora-with-head": _lora(modules_to_save=["lm_head"]),
    "lora-with-embedding": _lora(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    "lora-with-norms": _lora(modules_to_save=["norm"]),
    "lora-with-bias": _lora(bias="all"),
    "rslora": _lora(use_rslora=True),
    "dora": _lora(use_dora=True),
    "pissa": _lora(init_lora_weights="pissa"),
    "trainable-tokens": _lora(trainable_token_indices=[41, 42]),
    "ia3": _other("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": _other("LoHaConfig", r=4),
    "lokr": _other("LoKrConfig", r=4),
    "adalora": _other("AdaLoraConfig", init_r=4, target_r=2, total_step=100),
    "vera": _other("VeraConfig", r=4),
    "oft": _other("OFTConfig", r=0, oft_block_size=8),
    "boft": _other("BOFTConfig", boft_block_size=4),
    "hra": _other("HRAConfig", r=4),
    "fourierft": _other("FourierFTConfig", n_frequency=8),
    "vblora": _other("VBLoRAConfig", r=4, num_vectors=8, vector_length=8, topk=2),
    "miss": _other("MissConfig", r=4),
    "randlora": _other("RandLoraConfig", r=4),
    "road": _other("RoadConfig"),
    "c3a": _other("C3AConfig", block_size=8),
    "ln-tuning": _other("LNTuningConfig", target_modules=["input_layernorm", "norm"]),
    "prompt-tuning": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=4),
    "p-tuning": lambda peft: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16),
    "qlora": _lora(),
}


QUANTISED = "qlora"


def adapt(model: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """dtype: of a model whose base is in 4 bits, which nothing can cast any more."""
    import peft

    if name == QUANTISED:
        _rounded(model)
        _quantise(model, dtype)
    config = ADAPTERS[name](peft)
    config.task_type = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    for option in ("lora_dropout", "dropout", "module_dropout", "boft_dropout", "vera_dropout"):
        if hasattr(config, option):
            setattr(config, option, 0.0)
    adapted: nn.Module = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in adapted.parameters():
            if param.requires_grad and param.is_floating_point():
                param.add_(0.02 * torch.randn(param.shape, generator=generator))
    if name == QUANTISED:
        _rounded(adapted, dtype)
    return adapted


def _rounded(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """All values that are not in 4 bits, rounded to bfloat16 and kept in `dtype`: the same whatever that is."""
    for param in model.parameters():
        if not hasattr(param, "quant_state"):
            param.data = param.data.bfloat16().to(dtype)


def _quantise(model: nn.Module, dtype: torch.dtype) -> None:
    """Linears of the layers in 4 bits, kept as bytes of `dtype`: FSDP2 shards what has the dtype of its group, and casts none
    of it to the compute dtype if that is the same."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            parent, _, leaf = name.rpartition(".")
            quantised = Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=dtype,
                quant_type="nf4",
                quant_storage=dtype,
            )
            quantised.weight = Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", quant_storage=dtype, module=quantised
            )
            if module.bias is not None:
                quantised.bias = module.bias
            setattr(model.get_submodule(parent), leaf, quantised.to("cpu"))
