"""Claimed models: initialisation, state dicts and checkpoints are those of stock FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import commfuse_dp
from tests.parity.fsdp2.models import shard_layers, token_batch, token_loss
from tests.parity.fsdp2.test_claim import Odd, claimed_model, stock_model, train
from tests.parity.fsdp2.twin import SEED, settings
from tests.support.cells import slow


def meta(rank: int, world_size: int) -> None:
    stock = stock_model()
    with torch.device("meta"):
        fused = Odd()
    claimed = commfuse_dp.claim(fused)
    params = claimed.params
    shard_layers(fused, ignored_params=params)
    fused.to_empty(device="cpu")
    assert params == claimed.params  # the same objects
    commfuse_dp.apply(fused, settings())
    fused.load_state_dict(stock.state_dict())
    train(stock, fused)
    commfuse_dp.remove(fused)


def test_meta_device(workers):
    workers(3).run(meta)


def same_state(rank: int, world_size: int) -> None:
    stock, (fused, claimed) = stock_model(), claimed_model()
    mine, theirs = fused.state_dict(), stock.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        other = theirs[name]
        assert (tensor.shape, tensor.stride(), tensor.placements) == (other.shape, other.stride(), other.placements)
        assert tensor.device_mesh == other.device_mesh
        assert torch.equal(tensor.to_local(), other.to_local()), name
    up = fused.layers[0].up.weight  # 37 rows by FSDP2's chunk rule
    assert up.to_local().shape[0] == ([13, 13, 11] if world_size == 3 else [19, 18])[rank]
    assert up.to_local().untyped_storage().nbytes() == up.to_local().nbytes  # the whole weight is not kept
    assert len(claimed.params) == len(mine) - 1 and claimed.left == {"": claimed.left[""]}
    assert "layers.0.up" in str(claimed)


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_keys_specs_and_rows_are_those_of_stock(workers, world_size):
    workers(world_size).run(same_state)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = token_loss(model, token_batch(torch.Generator().manual_seed(step)))  # the same on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def checkpoint(rank: int, world_size: int, folder: str, fused: bool, resume: bool) -> list[float]:
    seed = 99 if resume else SEED
    model = claimed_model(seed)[0] if fused else stock_model(seed)
    if fused:
        commfuse_dp.apply(model, settings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if resume else 0.01, eps=1e-4, fused=True)
    if not resume:
        _trained(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if resume:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        dcp.save(state, checkpoint_id=folder)
    losses = _trained(model, optimizer, range(3, 6))
    if fused:
        commfuse_dp.remove(model)
    return losses


@pytest.mark.parametrize("fused_first", [True, slow(False)], ids=["claimed-to-stock", "stock-to-claimed"])
def test_checkpoint_resumed_at_another_world_size(workers, tmp_path: Path, fused_first):
    folder = str(tmp_path / "checkpoint")
    reference = workers(2).run(checkpoint, folder, fused_first, False)[0]
    losses = workers(3).run(checkpoint, folder, not fused_first, True)[0]
    assert losses == pytest.approx(reference, abs=2e-5)
    assert reference[0] != pytest.approx(reference[2], abs=2e-4)
