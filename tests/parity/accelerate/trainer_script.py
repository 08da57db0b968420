"""A Hugging Face Trainer script as somebody would write it who never heard of this project. Usage: trainer_script.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class RandomText(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(folder: str) -> None:
    set_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=RandomText(),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        result = {
            "world_size": trainer.args.world_size,
            "loss": [entry["loss"] for entry in history],
            "grad_norm": [entry["grad_norm"] for entry in history],
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    trainer.save_model(f"{folder}/model")


if __name__ == "__main__":
    main(sys.argv[1])
