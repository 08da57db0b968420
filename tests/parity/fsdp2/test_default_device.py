"""`with torch.device(...)` around apply() and around steps: tensors of ours stay where they belong."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import commfuse_dp
from tests.parity.fsdp2 import pair


def inside(rank: int, world_size: int, transport: str) -> None:
    """All of a model's construction inside, as FSDP2 allows it for meta initialisation; then whole steps."""
    stock = pair.build(seed=4)
    values = get_model_state_dict(stock, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with torch.device("meta"):
        net = pair.shard(pair.Net())
        commfuse_dp.apply(net, pair.config(transport=transport))
    net.to_empty(device="cpu")
    set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for step in range(3):
        data = pair.batch(rank, world_size, step)
        for model in (stock, net):
            model.zero_grad()
            with torch.device("meta"):
                pair.loss_of(model, data).backward()
        pair.assert_same_gradients(net, stock)
    with torch.device("meta"):
        commfuse_dp.remove(net)


@pytest.mark.parametrize("transport", ["shm", "tcp", "p2p"])
def test_a_default_device_is_not_that_of_communication(workers, transport):
    workers(2).run(inside, transport)
