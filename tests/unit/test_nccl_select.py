"""Which form of transport p2p is taken on GPUs, and what is said. No GPU is needed: what asks for one is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.device import cuda
from commfuse_dp.errors import TransportError
from commfuse_dp.transport import select
from commfuse_dp.transport.grouped import exchange as grouped
from commfuse_dp.transport.grouped import transport as nccl

CUDA = torch.device("cuda", 0)
OPTIONS: dict[str, Any] = {"group": None, "inbox_bytes": 1 << 20, "deadline_s": 1.0, "probe": None, "device": CUDA}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was opened, with a peer whose answers are `theirs`."""
    seen: dict[str, Any] = {"theirs": None, "device": "device"}

    def exchange(item: Any) -> list[Any]:
        return [item, item if isinstance(item, tuple) else seen["theirs"]]

    def device(torch_device: torch.device) -> Any:
        if isinstance(seen["device"], Exception):
            raise seen["device"]
        return seen["device"]

    monkeypatch.setattr(select, "exchange_of", lambda group: exchange)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)  # no backend is asked for
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(cuda, "CudaDevice", device)
    monkeypatch.setattr(grouped.torch.cuda, "current_device", lambda: seen.get("current", 0))
    monkeypatch.setattr(nccl, "open_nccl", lambda group, *, device, **_: SimpleNamespace(made=("nccl", device)))
    return seen


def test_streams_where_the_caller_can_use_them(opened: dict[str, Any]) -> None:
    transport, reason = select.open_transport("p2p", **OPTIONS, stream_ordered=True)
    assert transport.made == ("nccl", "device") and "asked for" in reason and "streams" in reason


@pytest.mark.parametrize("kind", ["p2p", "auto"])
def test_nothing_waits_on_the_host(opened: dict[str, Any], kind: Any) -> None:
    with pytest.raises(TransportError, match=r"cuda:0.*wait for every transfer on the host.*own collectives are better"):
        select.open_transport(kind, **OPTIONS)


@pytest.mark.parametrize("whose", ["own", "theirs"])
def test_all_ranks_refuse_if_one_has_no_streams(opened: dict[str, Any], whose: str) -> None:
    if whose == "own":
        opened["device"] = TransportError("cuda-bindings is missing")
    else:
        opened["theirs"] = "cuda-bindings is missing"
    with pytest.raises(TransportError, match=f"rank {int(whose == 'theirs')}: cuda-bindings is missing"):
        select.open_transport("p2p", **OPTIONS, stream_ordered=True)


def test_another_current_device_is_an_error_on_all_ranks(opened: dict[str, Any]) -> None:
    opened["current"] = 1
    with pytest.raises(TransportError, match=r"rank 0: .*cuda:0 while the current device is cuda:1.*set_device\(0\)"):
        select.open_transport("p2p", **OPTIONS, stream_ordered=True)
    opened.update(current=0, theirs="grouped exchanges on cuda:1 while ...")
    with pytest.raises(TransportError, match="rank 1: grouped exchanges"):
        select.open_transport("p2p", **OPTIONS, stream_ordered=True)
