"""Wrong arguments get an error that says what was given and what is allowed; one rank alone needs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_dp import collectives
from commfuse_dp.collectives import reference
from commfuse_dp.collectives.bound import message_cuts
from commfuse_dp.errors import DeadlineError, PeerLostError
from tests.conformance.collectives.worlds import in_world

X = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize("module", [collectives, reference], ids=["fused", "reference"])
def test_one_rank_without_torch_distributed(module: Any) -> None:
    assert torch.equal(module.all_gather(X), X)
    assert torch.equal(module.reduce_scatter(X, op="mean"), X)
    assert torch.equal(module.all_reduce(X), X)
    assert torch.equal(module.all_to_all(X), X)
    seen: list[tuple[int, int]] = []
    module.all_gather(X, lambda owner, part: seen.append((owner, part.shape[0])), slices_per_rank=2)
    assert seen == [(0, 2), (0, 1)]
    got = module.reduce_scatter(
        lambda owner, buffer: buffer.fill_(owner.start), shape=(3,), dtype=torch.float64, slices_per_rank=3
    )
    assert got.tolist() == [0.0, 1.0, 2.0] and got.dtype == torch.float64
    needs_grad = X.clone().requires_grad_()
    assert not module.all_reduce(needs_grad).requires_grad


@pytest.mark.parametrize("module", [collectives, reference], ids=["fused", "reference"])
def test_bad_arguments(module: Any) -> None:
    with pytest.raises(ValueError, match=r"order='round'.*pairwise.*ring"):
        module.all_gather(X, order="round")
    with pytest.raises(ValueError, match=r"op='max': must be 'sum' or 'mean'"):
        module.all_reduce(X, op="max")
    with pytest.raises(ValueError, match=r"torch\.int64: only"):
        module.all_reduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"no dimensions.*reshape\(1\)"):
        module.all_gather(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"sizes=\[1, 2\]: one size"):
        module.all_gather(X, sizes=(1, 2))
    with pytest.raises(ValueError, match=r"has 3 rows, but sizes=\[4\]"):
        module.reduce_scatter(X, sizes=(4,))
    with pytest.raises(ValueError, match="pass out, or shape"):
        module.reduce_scatter(lambda owner, buffer: None)
    with pytest.raises(ValueError, match=r"out has shape \(2, 2\).*\(3, 2\)"):
        module.reduce_scatter(X, torch.empty(2, 2))
    with pytest.raises(ValueError, match="contradicts out"):
        module.reduce_scatter(X, torch.empty(3, 2), dtype=torch.float64)
    with pytest.raises(ValueError, match="pass sizes"):
        module.all_to_all(lambda to, buffer: None)


def test_fused_only_checks() -> None:
    with pytest.raises(ValueError, match=r"sizes\[0\]=5, but shard has 3 rows"):
        collectives.all_gather(X, sizes=(5,))
    with pytest.raises(ValueError, match="slices_per_rank=0"):
        collectives.all_gather(X, slices_per_rank=0)


@pytest.mark.parametrize("limit", [64, 100, 1 << 12])
def test_message_cuts(limit: int) -> None:
    for itemsize in (1, 2, 8):
        for elements in (0, 1, 7, 500, 5000):
            cuts = message_cuts(elements, itemsize, limit)
            assert [i for a, b in cuts for i in range(a, b)] == list(range(elements)) and cuts
            assert all((b - a) * itemsize <= limit and a * itemsize % 64 == 0 for a, b in cuts)
            if elements * itemsize <= limit // 2:
                assert len(cuts) == 1


def test_a_peer_that_does_not_come_is_named() -> None:
    def body(rank: int, transport: Any) -> str:
        if rank == 1:
            return ""
        with pytest.raises(DeadlineError, match=r"for rank 1: to send slice 0 of owner 1 .*layer 'all_gather'") as caught:
            collectives.all_gather(X, sizes=(3, 3), transport=transport)
        assert caught.value.peer == 1
        return "told"

    assert in_world(2, body, deadline_s=0.3)[0] == ["told", ""]


def test_a_peer_that_leaves_is_named() -> None:
    def body(rank: int, transport: Any) -> None:
        if rank == 1:
            transport.close()
            return
        with pytest.raises(PeerLostError) as caught:
            collectives.reduce_scatter(torch.ones(6, 2), transport=transport)
        assert caught.value.peer == 1

    in_world(2, body)
