"""A Mixtral of transformers, tensor-parallel over all ranks by its own plan, as a model for llama.py's variants."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models_llama import Shape

EXPERTS, OF_A_TOKEN = 8, 2


class Mixtral(nn.Module):
    """tokens [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        return logits


def build(shape: Shape, seed: int) -> nn.Module:
    """Saved by rank 0 and loaded by all, as transformers shards."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    os.environ.setdefault("TQDM_DISABLE", "1")
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_local_experts=EXPERTS,
        num_experts_per_tok=OF_A_TOKEN,
        sliding_window=None,
    )
    box = [tempfile.mkdtemp(prefix="mixtral-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            if dist.get_rank() == 0:
                MixtralForCausalLM(config).save_pretrained(box[0])
            dist.barrier()
            plan = DistributedConfig(tp_size=dist.get_world_size())
            model = MixtralForCausalLM.from_pretrained(box[0], dtype=torch.float32, distributed_config=plan)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
    return Mixtral(model.train())
