"""Processes and real transports: fused against the reference, and the same bits over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp import collectives
from commfuse_dp.collectives import Owner, reference, sessions
from commfuse_dp.errors import MismatchError, PeerLostError
from commfuse_dp.transport.select import open_transport
from tests.conformance.collectives.worlds import left_fold, rows

SIZES = {2: (37, 20), 3: (30, 0, 25)}


def _everything(module: Any, transport: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """All functions of `module`, called in all their ways; what they returned or handed to callbacks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = SIZES[n]
    out: list[torch.Tensor] = []
    for order in ("pairwise", "ring"):
        common: dict[str, Any] = {"order": order, "slices_per_rank": 2, "transport": transport}
        shard = rows(sizes[rank], 4, seed=rank, dtype=dtype)
        whole = torch.zeros(sum(sizes), 4, dtype=dtype)

        def keep(owner: Owner, part: torch.Tensor, whole: torch.Tensor = whole) -> None:
            whole[owner.start : owner.stop] = part

        module.all_gather(shard, keep, sizes=sizes, **common)
        out += [whole, module.all_gather(shard, **common)]

        partials = rows(sum(sizes), 4, seed=50 + rank, dtype=dtype)

        def fill(owner: Owner, buffer: torch.Tensor, partials: torch.Tensor = partials) -> None:
            buffer.copy_(partials[owner.start : owner.stop])

        mine = torch.empty(sizes[rank], 4, dtype=dtype)
        out.append(module.reduce_scatter(fill, mine, op="mean", **common))
        out.append(module.reduce_scatter(fill, sizes=sizes, shape=(sum(sizes), 4), dtype=dtype, **common))
        out.append(module.reduce_scatter(partials, **common))
        out.append(module.all_reduce(partials, **common))
        in_place = partials.clone()
        assert module.all_reduce(in_place, in_place, op="mean", **common) is in_place
        out.append(in_place)

        blocks = rows(n * (rank + 2) + 1, 4, seed=90 + rank, dtype=dtype)
        out.append(module.all_to_all(blocks, **common))
        got: dict[int, list[torch.Tensor]] = {}
        table = [[(source + to) % 3 for to in range(n)] for source in range(n)]

        def stamp(to: Owner, buffer: torch.Tensor) -> None:
            buffer.fill_(100 * rank + 10 * to + to.offset)

        def collect(source: Owner, part: torch.Tensor, got: dict[int, list[torch.Tensor]] = got) -> None:
            got.setdefault(int(source), []).append(part.clone())

        module.all_to_all(stamp, collect, sizes=table, row_shape=(2,), **common)
        out += [torch.cat(got[source]) for source in sorted(got)]
    return out


def _against_reference(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        fused = _everything(collectives, None, dtype)
        plain = _everything(reference, None, dtype)
        assert len(fused) == len(plain)
        for number, (a, b) in enumerate(zip(fused, plain, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype, number
            scale = max(1.0, b.abs().max().item() if b.numel() else 0.0)
            # Sums in another order: N roundings of the wide type; for bfloat16 one rounding may then fall to the other side.
            eps = 4 * world_size * torch.finfo(torch.float32).eps if dtype == torch.float32 else torch.finfo(dtype).eps
            assert torch.allclose(a.double(), b.double(), rtol=0, atol=eps * scale), number
    assert [transport.name for transport in sessions.opened()] == ["shm"]  # one transport for all these calls
    collectives.close_transports()


@pytest.mark.parametrize("n", [2, 3])
def test_fused_equals_reference(workers: Any, n: int) -> None:
    workers(n).run(_against_reference, timeout=120)


def _over(rank: int, world_size: int, kind: Any, inbox_bytes: int) -> list[torch.Tensor]:
    transport, _ = open_transport(
        kind, group=None, inbox_bytes=inbox_bytes, deadline_s=60.0, probe=None, device=torch.device("cpu")
    )
    try:
        first = _everything(collectives, transport, torch.float32)
        again = _everything(collectives, transport, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        dist.barrier()
        return first
    finally:
        transport.close()


@pytest.mark.parametrize("n", [2, 3])
def test_the_same_bits_over_every_transport(workers: Any, n: int) -> None:
    pool = workers(n)
    results = {
        kind: pool.run(_over, kind, size, timeout=120) for kind, size in (("shm", 1 << 20), ("tcp", 1 << 20), ("p2p", 256))
    }
    for kind, by_rank in results.items():
        for rank, tensors in enumerate(by_rank):
            wanted = results["shm"][rank]
            assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True)), (kind, rank)
    partials = [rows(sum(SIZES[n]), 4, seed=50 + rank) for rank in range(n)]
    total = left_fold(partials, torch.float32, None, torch.float32)
    for rank in range(n):
        assert torch.equal(results["tcp"][rank][5], total)  # all_reduce, pairwise


def _mismatch(rank: int, world_size: int) -> None:
    with pytest.raises(MismatchError, match=r"same row shape and dtype"):
        collectives.all_gather(torch.zeros(2, 3 + rank))
    # Whoever meets it first tells the other, which may hear of it before it sees the message itself.
    with pytest.raises((MismatchError, PeerLostError), match=r"in a message of \d+ bytes instead of \d+"):
        collectives.all_gather(torch.zeros(2, 3 + rank), sizes=(2, 2))
    with pytest.raises((ZeroDivisionError, PeerLostError), match="by zero") as caught:
        collectives.all_gather(torch.zeros(2), lambda owner, part: 1 // rank, sizes=(2, 2))
        collectives.all_reduce(torch.zeros(2))
    assert caught.type is (PeerLostError if rank else ZeroDivisionError)
    assert not sessions.opened()
    dist.barrier()
    assert collectives.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]  # on a transport opened anew
    collectives.close_transports()


def test_ranks_that_do_not_fit_together_are_told(workers: Any) -> None:
    workers(2).run(_mismatch, timeout=60)
