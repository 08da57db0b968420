"""Tiny models of transformers with random weights, saved and loaded again as a user would: whole, or tensor-parallel."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY = 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def config_of(kind: str, **settings: Any) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})


@contextmanager
def saved(kind: str, *, dtype: torch.dtype = torch.float64, **settings: Any) -> Iterator[str]:
    """A folder with the model, which all ranks see; gone afterwards. Norms have weights other than one."""
    import transformers

    box = [tempfile.mkdtemp(prefix="model-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **settings), dtype=dtype)
        for param in model.parameters():
            if param.dim() == 1:
                nn.init.uniform_(param, 0.5, 1.5)
        with quiet():
            model.save_pretrained(box[0])
    dist.barrier()
    try:
        yield box[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])


def load(path: str, ranks: int = 1, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    plan = {key: settings.pop(key) for key in ("tp_plan", "enable_sequence_parallel") if key in settings}
    distributed = {"distributed_config": DistributedConfig(tp_size=ranks, **plan)} if ranks > 1 else {}
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **distributed, **settings)


@contextmanager
def quiet() -> Iterator[None]:
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def batch(step: int, *, size: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(1000 + step))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module, tokens: torch.Tensor, **kw: Any) -> dict[str, torch.Tensor]:
    """The loss, and all gradients in full."""
    loss = model(tokens, labels=tokens, **kw).loss
    loss.backward()
    found = {"loss": full(loss)}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        found[name] = full(param.grad)
    model.zero_grad()
    return found


def train(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    found = {}
    for step in range(steps):
        tokens = batch(step)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = full(loss)
    found.update({name: full(param) for name, param in model.named_parameters()})
    return found


def alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        scale = max(float(value.abs().max()), 1e-6)  # below it: what is zero but for rounding
        error = float((found[name] - value).abs().max()) / scale
        assert error <= tolerance, (name, error)
