"""How transport hierarchical is put together on GPUs: which ranks meet where, and that all ranks decide alike. The parts are
stand-ins, as there is no GPU; the process groups are real."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import TransportError
from commfuse_dp.probe import Probe
from commfuse_dp.transport import select
from commfuse_dp.transport.grouped import exchange as grouped
from commfuse_dp.transport.hierarchical import rail as hierarchical_rail
from commfuse_dp.transport.hierarchical import transport as hierarchical
from commfuse_dp.transport.select import open_transport
from commfuse_dp.transport.symmetric import open as symmetric_open
from commfuse_dp.transport.symmetric.open import Verdict

CUDA = torch.device("cuda", 0)


@contextmanager
def parts(names: str, *, survey: str = "", inner: str = "", between: str = ""):
    """survey, inner, between: ranks, as digits, on which that step fails."""
    me = str(dist.get_rank())
    seen: dict[str, Any] = {}

    def fake_survey(device: Any, hosts: Any, exchange: Any) -> Any:
        everyone = exchange(me in survey)
        return Verdict(not any(everyone), "by NVLink" if not any(everyone) else "no peer access"), []

    def fake_symmetric(group: Any, rank: int, world_size: int, exchange: Any, cards: Any, **settings: Any) -> Any:
        if any(exchange(me in inner)):
            raise TransportError("cannot get symmetric memory")
        seen.update(host=dist.get_process_group_ranks(group), place=rank, **settings)
        return SimpleNamespace(close=lambda: seen.update(closed=True), device=None), "words"

    def fake_grouped(group: Any, **settings: Any) -> Any:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, me in between, group=group)
        if any(everyone):
            raise TransportError("cannot make a communicator")
        seen.update(rail=dist.get_process_group_ranks(group))
        return SimpleNamespace(rank=dist.get_rank(group))

    def fake_transport(rank: int, hosts: Any, inner: Any, outer: Any, **settings: Any) -> Any:
        return SimpleNamespace(name="hierarchical", rank=rank, hosts=hosts)

    patches = [
        (torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30)),
        (select, "host_identity", lambda: names[dist.get_rank()]),
        (symmetric_open, "survey", fake_survey),
        (symmetric_open, "open_symmetric", fake_symmetric),
        (grouped, "open_grouped", fake_grouped),
        (hierarchical_rail, "Rail", lambda *_, **__: None),
        (hierarchical, "HierarchicalTransport", fake_transport),
    ]
    kept = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield seen
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def options(order: str) -> dict[str, Any]:
    return {
        "group": None, "inbox_bytes": 14 << 20, "deadline_s": 9.0, "probe": Probe(), "device": CUDA,
        "stream_ordered": True, "order": order,
    }  # fmt: skip


def opened(rank: int, world_size: int, names: str) -> tuple[Any, ...]:
    with parts(names) as seen:
        transport, reason = open_transport("auto", **options("auto"))
    assert transport.name == "hierarchical" and transport.rank == rank
    assert "symmetric inside a host (by NVLink" in reason and "NCCL between hosts" in reason
    assert seen["inbox_bytes"] == 2 << 20 and seen["kernels_may_wait"] is False
    return seen["host"], seen["place"], seen["rail"]


@pytest.mark.parametrize(
    ("names", "hosts", "rails"), [("aabb", ["01", "23"], ["02", "13"]), ("abab", ["02", "13"], ["01", "23"])]
)
def test_who_meets_where(workers, names, hosts, rails):
    for rank, (host, place, rail) in enumerate(workers(4).run(opened, names)):
        assert "".join(map(str, host)) in hosts and host[place] == rank
        assert "".join(map(str, rail)) in rails and rank in rail


def failing(rank: int, world_size: int, what: str) -> tuple[str, bool]:
    with parts("aabb", **{what: "3"}) as seen:
        try:
            open_transport("auto", **options("hierarchical"))
        except TransportError as error:
            return str(error), seen.get("closed", False)
    return "", False


@pytest.mark.parametrize(
    ("what", "part", "closed"),
    [
        ("survey", "no peer access", []),
        ("inner", "cannot get symmetric memory", [0, 1]),
        ("between", "cannot make a communicator", [0, 1, 2, 3]),
    ],
)
def test_one_rank_that_cannot_stops_all_and_what_was_opened_is_closed(workers, what, part, closed):
    results = workers(4).run(failing, what)
    assert len({text for text, _ in results}) == 1
    for rank, (text, was_closed) in enumerate(results):
        assert part in text and "rank 3" in text and "asked for" in text
        assert was_closed is (rank in closed)


def left_out(rank: int, world_size: int) -> str:
    """auto: the flat p2p is tried instead, on all ranks, and needs a GPU."""
    with parts("aabb", survey="2"):
        try:
            open_transport("auto", **options("auto"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return os.devnull


def test_auto_falls_back_on_all_ranks(workers):
    for text in workers(4).run(left_out):
        assert text != os.devnull and "hierarchical" not in text
