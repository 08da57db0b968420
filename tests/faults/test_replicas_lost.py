"""A rank of hybrid sharding that is killed: every survivor names it by its number in the default group, and soon.

Neither the ranks that it shares its shards with nor its replicas are all: one survivor is neither, and hears of it by both.
"""

from __future__ import annotations

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp import CommFuseError
from commfuse_dp.transport import exchange
from tests.parity.fsdp2 import pair
from tests.parity.tensor_parallel import test_tensor_slices as slices
from tests.support.cells import slow
from tests.support.processes import RankPipe, RankProcesses

DEADLINE_S = 120.0  # whatever ends sooner has not waited for it
FIRST, LATER = 0, 2  # steps
MESHES = {"replicas": ("replicate", "shard"), "tensor parallel": ("dp", "tp")}


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_backward(out: torch.Tensor) -> None:
    out.register_hook(die)


def die_in_exchange(number: int) -> None:
    """Of the small objects that ranks exchange while they attach."""
    call, count = exchange._Star.__call__, 0

    def counted(star: exchange._Star, item: object) -> list[object]:
        nonlocal count
        count += 1
        if count == number:
            die()
        return call(star, item)

    exchange._Star.__call__ = counted  # type: ignore[method-assign]


def attach(kind: str, size: int, victim: bool, phase: str) -> tuple[torch.nn.Module, torch.Tensor | None]:
    names = MESHES[kind]
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=names)
    net = pair.build(2, mesh=mesh) if kind == "replicas" else slices.build(mesh)
    dist.barrier()
    if victim and phase.startswith("apply"):
        die_in_exchange(int(phase.split()[1]))
    commfuse_dp.apply(net, commfuse_dp.CommFuseConfig(deadline_s=DEADLINE_S))
    return net, None if kind == "replicas" else slices.data(mesh, 0)


def train(net: torch.nn.Module, data: torch.Tensor | None, rank: int, size: int, step: int) -> None:
    if data is None:
        pair.loss_of(net, pair.batch(rank, size, step)).backward()
    else:
        net(data).square().mean().backward()


def dying(rank: int, pipe: RankPipe, port: int, size: int, kind: str, victim: int, phase: str) -> tuple[str, int, str, float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=100))
    torch.set_num_threads(1)
    step_of_death = LATER if "later" in phase else FIRST
    start = time.monotonic()
    try:
        net, data = attach(kind, size, rank == victim, phase)
        for step in range(6):
            if rank == victim and step == step_of_death:
                middle = net.get_submodule("blocks.1")
                if "forward" in phase:
                    middle.register_forward_pre_hook(die)
                elif "backward" in phase:
                    middle.register_forward_hook(lambda module, args, out: die_in_backward(out))
            start = time.monotonic()
            train(net, data, rank, size, step)
            for param in net.parameters():
                param.grad = None
    except CommFuseError as error:
        return type(error).__name__, getattr(error, "peer", -1), str(error), time.monotonic() - start
    raise AssertionError("nothing was raised")


CASES = [
    (4, "replicas", 2, "first backward"),
    (4, "replicas", 3, "apply 4"),
    slow(4, "replicas", 1, "apply 2"),
    slow(4, "replicas", 0, "first backward"),
    slow(4, "replicas", 3, "first forward"),
    slow(4, "replicas", 2, "later backward"),
    slow(4, "replicas", 1, "later forward"),
    slow(6, "replicas", 3, "first backward"),
    slow(6, "replicas", 2, "later backward"),
    slow(4, "tensor parallel", 2, "later backward"),
    slow(4, "tensor parallel", 3, "first forward"),
    slow(4, "tensor parallel", 1, "apply 6"),
]


@pytest.mark.parametrize(("size", "kind", "victim", "phase"), CASES)
def test_every_survivor_names_the_rank_that_was_killed(monkeypatch, size, kind, victim, phase):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankProcesses(size, dying, store.port, size, kind, victim, phase) as ranks:
        results = ranks.results(90.0)
    assert set(results) == set(range(size)) - {victim}
    for rank, (error, peer, text, seconds) in results.items():
        assert f"lost rank {victim}" in text, (rank, error, text)
        assert not text.startswith(f"rank {victim}"), (rank, text)
        if not phase.startswith("apply"):  # there a rank that was told of by another one raises what stands for all failures
            assert (error, peer) == ("PeerLostError", victim), (rank, error, peer, text)
        assert seconds < DEADLINE_S / 2, (rank, seconds, text)
