"""Selective activation checkpointing of tensor-parallel layers: to it they are gathers, products and reduce-scatters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.tensor_parallel.block import Llama, batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import alike, gradients, mesh_of
from tests.support.selective import GATHER, POLICIES, PRODUCTS, SCATTER, selective
from tests.support.serving import applied

LAYERS, LENGTH = 2, 48

# Policy -> transfers of a recomputed block, of two gathers and two sums. The second sum is behind the last saved tensor: it is
# not computed again. To save a gather alone is of no use: its slices are gone, and products that are not saved ask for them.
AGAIN = {
    "shard": {"nothing": 3, "products": 1, "every second product": 3, "sums": 2, "products and sums": 0, "gathers": 3},
    "gathered": {"nothing": 3, "products": 3, "every second product": 3, "sums": 2, "products and sums": 2, "gathers": 3},
}


def _received(model: Llama, report: Any, tokens: torch.Tensor) -> int:
    """Bytes of one forward and backward."""
    before = report.probe.counters.snapshot()
    gradients(model, tokens)
    moved = report.probe.counters.since(before)
    return moved.param_bytes_received + moved.grad_bytes_received


def _policies(rank: int, world_size: int, save: str) -> None:
    mesh, tokens = mesh_of(world_size), batch(0, length=LENGTH)
    stock, model = (parallelize(whole(layers=LAYERS), mesh) for _ in range(2))
    wanted, received = gradients(stock, tokens), {}
    with applied(model, save_activations=save) as report:
        _, plain = (_received(model, report, tokens) for _ in range(2))  # the ranks compare shapes in the first
        for policy in POLICIES[:-1]:  # to save everything is nothing that stock can do: a norm's output is changed in place
            model.run_block = selective(policy)
            for _ in range(2):  # the first compares the ranks' shapes in its recomputations, the second does not
                alike(gradients(model, tokens), wanted)
            received[policy] = _received(model, report, tokens)
    transfer = tokens[:, :-1].numel() // world_size * model.tok_embeddings.embedding_dim * 8
    # Recomputations exchange the lengths of the sequence anew: some small messages, of less than one transfer.
    again = {policy: (total - plain) // transfer / LAYERS for policy, total in received.items()}
    assert again == AGAIN[save], again


@pytest.mark.slow
@pytest.mark.parametrize("save", ["shard", "gathered"])
def test_gradients_and_what_moves(workers: Any, save: str) -> None:
    workers(2).run(_policies, save)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (*PRODUCTS, GATHER, SCATTER):
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


BLOCK = ["all_gather_into_tensor", "mm", "mm", "mm", "mm", "reduce_scatter_tensor"]
FEED_FORWARD = ["all_gather_into_tensor", "mm", "mm", "mm", "reduce_scatter_tensor"]


def _seen(rank: int, world_size: int) -> None:
    mesh, tokens = mesh_of(world_size), batch(0, length=LENGTH)
    model = parallelize(whole(layers=LAYERS, bias=False), mesh)
    with FlopCounterMode(display=False) as products:
        gradients(model, tokens)
    of_all_ranks = products.get_total_flops()  # DTensor shows whole products
    with applied(model):
        for _ in range(2):
            with FlopCounterMode(display=False) as products:
                gradients(model, tokens)
            assert products.get_total_flops() * world_size == of_all_ranks
            with Seen() as seen, torch.no_grad():
                model(tokens[:, :-1])
            _, *names, _ = seen.names  # around them: the embedding's sum, and the gather of the whole output
            assert names == LAYERS * [*BLOCK, *FEED_FORWARD] + ["all_gather_into_tensor", "mm"]


def test_what_modes_see(workers: Any) -> None:
    workers(2).run(_seen)
