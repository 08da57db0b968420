"""What differs between the ranks of a group is said of their numbers in the default group, wherever ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from torch.distributed.device_mesh import init_device_mesh

import commfuse_dp
from commfuse_dp import CommFuseError, DeadlineError, MismatchError, TransportError
from commfuse_dp.collectives.functions import all_gather
from commfuse_dp.transport.select import open_transport
from commfuse_dp.transport.tcp.connect import ADDRESS_VARIABLE
from tests.parity.fsdp2 import pair
from tests.parity.tensor_parallel import test_tensor_slices as slices
from tests.support.raising import ranks_said
from tests.support.serving import config

ODD = 3  # the rank that differs: the second of its group, of which rank 2 is the first


def heard(rank: int, kind: type[CommFuseError], call: Callable[[], Any]) -> None:
    """Every rank raises, and names no rank that is not in the group of the odd one."""
    with pytest.raises(kind) as caught:
        call()
    numbers = ranks_said(str(caught.value))
    assert numbers and numbers <= {2, ODD}, f"rank {rank}: {caught.value}"


def settings_at_attach(rank: int, world_size: int, kind: str) -> None:
    if kind == "replicas":
        net: Any = pair.build(1, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        net = slices.build(slices.grid(world_size))
    own = config(inbox_bytes=1 << (21 if rank == ODD else 20))
    heard(rank, MismatchError, lambda: commfuse_dp.apply(net, own))


def transports(rank: int, world_size: int) -> None:
    group, _ = dist.new_subgroups(2)
    where: dict[str, Any] = {"group": group, "probe": None, "device": torch.device("cpu")}

    def opened(**settings: Any) -> None:
        chosen = {"kind": "tcp", "inbox_bytes": 4096, "deadline_s": 20.0, **settings}
        open_transport(chosen.pop("kind"), **chosen, **where)

    def exposed(kind: str) -> None:
        transport, _ = open_transport(kind, inbox_bytes=4096, deadline_s=20.0, **where)
        try:
            transport.expose([[64, 64 + rank]])
        finally:
            transport.close()

    if rank < 2:
        return
    heard(rank, MismatchError, lambda: opened(inbox_bytes=4096 + rank))
    heard(rank, MismatchError, lambda: opened(kind="shm" if rank == ODD else "tcp"))
    for kind in ("shm", "tcp", "p2p"):
        heard(rank, MismatchError, lambda kind=kind: exposed(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, "203.0.113.7" if rank == ODD else "127.0.0.1")  # of no machine (RFC 5737)
        heard(rank, TransportError, opened)


def waited_in_vain(rank: int, group: Any) -> None:
    """The second rank of the group does not call the collective."""
    transport, _ = open_transport("shm", group=group, inbox_bytes=4096, deadline_s=20.0, probe=None, device=torch.device("cpu"))
    if rank != ODD:
        transport.deadline_s = 0.2
        with pytest.raises(DeadlineError) as caught:
            all_gather(torch.zeros(2, 2), sizes=(2, 2), transport=transport)
        text = str(caught.value)
        assert "slice 0 of owner 3 (rank 3)" in text and ranks_said(text) == {2, 3}, text
    dist.barrier(group=group)
    transport.close()


def calls(rank: int, world_size: int) -> None:
    """What is compared in a step: rows of a collective, inputs of tensor-parallel layers."""
    group, _ = dist.new_subgroups(2)
    if rank >= 2:
        heard(rank, MismatchError, lambda: all_gather(torch.zeros(2, 2 + rank), group=group))
        waited_in_vain(rank, group)
    mesh = slices.grid(world_size)
    net = slices.build(mesh)
    commfuse_dp.apply(net, config())
    found = attachment_of(net, TENSOR_ATTACHMENT)
    assert found is not None and found.transport.membership.numbers == [rank // 2 * 2, rank // 2 * 2 + 1]
    x = torch.zeros(2 + (rank == ODD), slices.POSITIONS, slices.WIDTH, dtype=torch.float64)
    error: Exception | None = None
    try:
        net(x).sum().backward()
    except CommFuseError as raised:
        error = raised
    if rank >= 2:
        assert isinstance(error, MismatchError) and ranks_said(str(error)) == {2, 3}, error
    dist.barrier()
    commfuse_dp.remove(net)


@pytest.mark.parametrize("kind", ["replicas", "tensor parallel"])
def test_settings_that_differ_at_attach(workers: Any, kind: str) -> None:
    workers(4).run(settings_at_attach, kind)


def test_transports_that_differ(workers: Any) -> None:
    workers(4).run(transports)


def test_calls_that_differ(workers: Any) -> None:
    workers(4).run(calls)
