"""Which transport a group gets, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import ConfigError, MismatchError, TransportError
from commfuse_dp.transport.select import choose, host_identity, open_transport
from tests.support import single
from tests.support.processes import RankPipe, RankProcesses

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("kind", "hosts", "device", "expected", "part"),
    [
        ("auto", ["a", "a"], CPU, "shm", "share memory"),
        ("auto", ["a"], CPU, "shm", "one rank"),
        ("auto", ["a", "b", "a"], CPU, "tcp", "3 ranks on 2 hosts"),
        ("auto", ["a", "a"], CUDA, "p2p", "cuda"),
        ("shm", ["a", "a"], CPU, "shm", "configuration"),
        ("tcp", ["a", "a"], CPU, "tcp", "configuration"),
        ("p2p", ["a", "b"], CUDA, "p2p", "configuration"),
        ("mpi", ["a", "b"], CPU, "mpi", "configuration"),
    ],
)
def test_choice(kind: str, hosts: list[str], device: torch.device, expected: str, part: str) -> None:
    chosen, reason = choose(kind, hosts, device)
    assert chosen == expected and part in reason


@pytest.mark.parametrize(
    ("kind", "hosts", "device", "part"),
    [
        ("shm", ["a", "b"], CPU, "2 hosts"),
        ("shm", ["a", "a"], CUDA, "cuda:0"),
        ("tcp", ["a", "b"], CUDA, "cuda:0"),
        ("mpi", ["a", "b"], CUDA, "cuda:0"),
    ],
)
def test_a_request_that_cannot_be_met(kind: str, hosts: list[str], device: torch.device, part: str) -> None:
    with pytest.raises(TransportError, match=part) as caught:
        choose(kind, hosts, device)
    assert "auto" in str(caught.value)


def options(**changes: Any) -> dict[str, Any]:
    return {"group": None, "inbox_bytes": 4096, "deadline_s": 20.0, "probe": None, "device": CPU, **changes}


def test_one_rank_without_torch_distributed() -> None:
    transport, reason = open_transport("auto", **options())
    assert (transport.name, transport.rank, transport.world_size) == ("shm", 0, 1) and "one rank" in reason
    transport.close()
    with pytest.raises(TransportError, match="torchrun"):
        open_transport("p2p", **options())
    with pytest.raises(ConfigError, match="auto, shm, tcp, symmetric, p2p, mpi"):
        open_transport("shn", **options())  # type: ignore[arg-type]


def test_host_identity_is_stable() -> None:
    assert host_identity() == host_identity() != ""


def opens(rank: int, pipe: RankPipe, store: str) -> list[str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    transport, reason = open_transport("auto", **options())
    found = [transport.name, reason]
    transport.expose([[4, 4]])
    transport.segments[0].fill_(rank)
    transport.publish((0,), 1)
    found.append(str(single.pull(transport, 1 - rank, 0, 1).wait().tolist()))
    transport.finish(1)
    transport.close()
    for changes in ({"kind": ("shm", "tcp")[rank]}, {"inbox_bytes": 64 + rank}):
        try:
            open_transport(changes.pop("kind", "auto"), **options(**changes))  # type: ignore[arg-type]
        except MismatchError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


def test_two_ranks_over_a_process_group(tmp_path: Any) -> None:
    with RankProcesses(2, opens, str(tmp_path / "store")) as ranks:
        results = ranks.results(90)
    for rank in range(2):
        name, reason, pulled, kinds, sizes = results[rank]
        assert name == "shm" and "2 ranks on one host" in reason and pulled == str([1 - rank] * 4)
        assert "rank 0: 'shm', rank 1: 'tcp'" in kinds and "rank 0: 64, rank 1: 65" in sizes
