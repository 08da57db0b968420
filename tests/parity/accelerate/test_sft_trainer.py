"""TRL's SFTTrainer over Accelerate's FSDP2, two ranks: with CommFuse it learns what it learns without."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parity.accelerate import harness

pytestmark = pytest.mark.slow

RTOL = 2e-5  # fp32, four steps: sums in slices differ in last bits
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def _train(rank: int, world_size: int, on: bool, variant: dict[str, Any], folder: str) -> dict[str, Any]:
    """Losses and gradient norms of the steps, the sum of the weights' squares at the end, and whether CommFuse was there."""
    from accelerate.state import DistributedType, PartialState
    from commfuse_dp.integrations.fsdp2 import engine_of

    import commfuse_dp

    harness.reset()
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment = {key: str(value) for key, value in launcher.items()} | {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "FSDP_VERSION": "2",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    found = ("gloo", DistributedType.MULTI_GPU)
    with (
        mock.patch.object(PartialState, "_prepare_backend", lambda *_: found),
        mock.patch.dict(os.environ, environment),
        harness.commfuse(on),
    ):
        trainer = _trainer(variant, folder)
        trainer.train()
        model = trainer.model_wrapped
        served = [module for module in model.modules() if engine_of(module) is not None]
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        with torch.no_grad():
            weights = {name: param.full_tensor().clone() for name, param in model.named_parameters() if param.requires_grad}
        for module in served:
            commfuse_dp.remove(module)
    harness.reset()
    return {
        "loss": [entry["loss"] for entry in history],
        "norm": [float(entry["grad_norm"]) for entry in history],
        "weights": weights,
        "served": bool(served),
    }


def _trainer(variant: dict[str, Any], folder: str) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    options = dict(variant)
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0) if options.pop("lora", False) else None
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0"))
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(2, 96, (32, 16), generator=generator).tolist()
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=1,
        )
    )
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            optim="sgd",  # AdamW turns last bits of gradients near zero into whole steps
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            seed=7,
            fsdp="full_shard",
            fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            **{"gradient_checkpointing": False, **options},
        ),
        train_dataset=Dataset.from_dict({"input_ids": texts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w1"),
        peft_config=adapter,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_sft_trainer_learns_the_same(name, workers, tmp_path):
    stock, ours = (workers(2).run(_train, on, VARIANTS[name], str(tmp_path), timeout=200)[0] for on in (False, True))
    assert ours["served"] and not stock["served"]
    assert len(stock["loss"]) == 4
    assert ours["loss"] == pytest.approx(stock["loss"], rel=RTOL)
    assert ours["norm"] == pytest.approx(stock["norm"], rel=RTOL)
    assert list(ours["weights"]) == list(stock["weights"])
    for parameter, weight in stock["weights"].items():
        torch.testing.assert_close(ours["weights"][parameter], weight, rtol=RTOL, atol=RTOL, msg=parameter)
