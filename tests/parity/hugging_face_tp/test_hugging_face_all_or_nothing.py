"""apply() on a tensor-parallel model of transformers that fails on one rank: all have it as it was."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from commfuse_dp.integrations.hugging_face_tp import trial
from torch import nn

import commfuse_dp
from commfuse_dp.errors import MismatchError
from tests.parity.fsdp2.test_all_or_nothing import state_of
from tests.parity.hugging_face_tp.models import alike, batch, gradients, load, saved
from tests.support.serving import config


def all_of(model: nn.Module) -> list[Any]:
    """transformers' styles are closures in the modules' dictionaries."""
    return [*state_of(model), *[vars(module).get("forward") for module in model.modules()], model.config._attn_implementation]


def one_cannot(rank: int, world_size: int) -> None:
    """What is tried may fail on one rank, for want of memory, say: the others would wait for it in the first step."""
    with saved("llama") as path:
        model = load(path, world_size)
    stock, before = gradients(model, batch(0)), all_of(model)

    def failing(changes: Any, layer: nn.Module) -> None:
        if rank == 1:
            raise OSError("on purpose")
        original(changes, layer)

    original = trial._train
    with mock.patch.object(trial, "_train", failing), pytest.raises(MismatchError) as error:
        commfuse_dp.apply(model, config())
    assert "rank 1 cannot serve 'model.layers.0'" in str(error.value) and "on purpose" in str(error.value)
    assert all_of(model) == before
    alike(gradients(model, batch(0)), stock, 0.0)


def test_a_layer_that_one_rank_cannot_serve(workers: Any) -> None:
    workers(2).run(one_cannot, timeout=60)
