"""Models whose linears are no nn.Linear: GPT-2 (Conv1D, weight [in, out]) and Falcon (a subclass with a forward of its own)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commfuse_dp
from tests.parity.fsdp2.twin import Twin, settings

WIDTH, TOKENS = 12, 17

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")


def gpt2(dtype: torch.dtype) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=WIDTH,
        n_inner=21,
        vocab_size=TOKENS,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return GPT2LMHeadModel(config).to(dtype)


def falcon(dtype: torch.dtype) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=WIDTH, vocab_size=TOKENS, bias=True, ffn_hidden_size=21
    )
    return FalconForCausalLM(config).to(dtype)


MODELS = {"gpt2": gpt2, "falcon": falcon}
LINEARS = {"gpt2": ("c_attn", "c_proj", "c_fc"), "falcon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")}


def shard(model: nn.Module, **options: Any) -> None:
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, **options)
    fully_shard(model, **options)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def all_trained(rank: int, world_size: int) -> None:
    for name in MODELS:
        trained(rank, world_size, name)


def trained(rank: int, world_size: int, name: str) -> None:
    def batch(twin: Twin) -> torch.Tensor:
        return torch.randint(0, TOKENS, (2, 9), generator=twin.generator)

    with Twin(lambda: MODELS[name](torch.float64), shard=shard, config=settings("tcp", slices_per_rank=2)) as twin:
        linears = {key: path for key, path in twin.paths.items() if key.split(".")[-2] in LINEARS[name]}
        assert len(linears) == 2 * 2 * 4 and set(linears.values()) == {"fused"}, twin.paths
        assert "computes a linear" in next(row.reason for row in twin.report.rows if row.name in linears)
        for _ in range(3):
            twin.step(loss, batch(twin), rtol=1e-6)  # the loss is taken in float32
        twin.fused.eval(), twin.stock.eval()
        with torch.no_grad():
            ids = batch(twin)
            twin.check_outputs(lambda model: model(input_ids=ids, use_cache=False).logits)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # float64 is left alone by autocast
            twin.step(loss, batch(twin), rtol=1e-6, update=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with Twin(lambda: MODELS[name](torch.float32), shard=shard, config=settings("shm"), mp_policy=policy) as twin:
        twin.step(loss, batch(twin), rtol=2.0**-5, update=False)  # roundings of 2**-9 in other places, over two layers
    with Twin(lambda: MODELS[name](torch.float32), shard=shard, config=settings("shm")) as twin:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            twin.step(loss, batch(twin), rtol=2.0**-5, update=False)
        commfuse_dp.remove(twin.fused)
        twin.each(lambda model: model.zero_grad())
        twin.step(loss, batch(twin), rtol=0.0, update=False)
        commfuse_dp.apply(twin.fused, settings("shm"))


@pytest.mark.slow
def test_trained_as_by_stock(workers):
    workers(2).run(all_trained, timeout=300)
