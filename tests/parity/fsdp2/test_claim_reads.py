"""Parameters of claimed layers that are read beside their layer's call: as of stock FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import commfuse_dp
from tests.parity.fsdp2.models import mean_square
from tests.parity.fsdp2.readers import WIDTH, Readers
from tests.parity.fsdp2.test_claim import claimed_model, stock_model
from tests.parity.fsdp2.twin import RTOL64, SEED, compare, gradients, settings
from tests.support.cells import slow


def read(rank: int, world_size: int, transport: str) -> None:
    """Of claimed layers, too, a forward reads whole parameters in the compute dtype; outside they are sharded."""
    kind = lambda: Readers().double()  # noqa: E731
    stock, (fused, _) = stock_model(kind=kind), claimed_model(kind=kind)
    report = commfuse_dp.apply(fused, settings(transport))
    generator = torch.Generator().manual_seed(SEED + rank)
    for checkpointed in (False, True):
        for model in (stock, fused):
            model.call = lambda block, x: checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)  # noqa: B023
        for _ in range(2):
            x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
            for model in (stock, fused):
                mean_square(model, x).backward()
            compare("gradients", gradients(stock), gradients(fused), RTOL64)
            for model in (stock, fused):
                model.zero_grad()
    assert report.reads and all(type(param) is DTensor for param in fused.parameters())
    with pytest.raises(TypeError):
        fused(x, x)  # no forward is under way after one that raised
    assert type(fused.head.weight) is DTensor

    def refuse(*_: object) -> None:
        raise ValueError("refused before anything else")

    hook = fused.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="refused"):
        fused(x)
    hook.remove()
    for model in (stock, fused):  # a forward that was never entered is not counted as left
        mean_square(model, x).backward()
    compare("gradients", gradients(stock), gradients(fused), RTOL64)
    commfuse_dp.remove(fused)


@pytest.mark.parametrize(("world_size", "transport"), [(2, "shm"), slow(3, "tcp")])
def test_parameters_read_beside_their_layer(workers, world_size, transport):
    workers(world_size).run(read, transport, timeout=120)


def read_dtype(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = []

    def look(kind: str, block: Readers) -> None:
        weight = block.up.weight
        found.append((kind, type(weight) is DTensor, block.dtype, weight.shape, float(weight.float().sum().detach())))

    def seen(model: torch.nn.Module) -> list[tuple[object, ...]]:
        found.clear()
        block = model.layers[0]
        block.norm.register_forward_pre_hook(lambda *_: look("inside", block))
        block.register_forward_hook(lambda *_: found.append(("behind", type(block.up.weight) is DTensor)))
        model(torch.ones(6, WIDTH))
        return list(found)

    one = lambda: Readers("own dtype")  # noqa: E731
    stock, (fused, _) = stock_model(kind=one, mp_policy=policy), claimed_model(kind=one, mp_policy=policy)
    commfuse_dp.apply(fused, settings())
    wanted, got = seen(stock), seen(fused)
    assert wanted == got and got[0][2] == torch.bfloat16, (wanted, got)
    commfuse_dp.remove(fused)


def test_what_is_read_is_in_the_compute_dtype(workers):
    workers(2).run(read_dtype)
