"""When transport 'symmetric' is taken, and what is said when it is not. No GPU is needed: the facts are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_dp.device.base import Stream
from commfuse_dp.device.cuda import Card
from commfuse_dp.errors import TransportError
from commfuse_dp.transport import select
from commfuse_dp.transport.budget import Room
from commfuse_dp.transport.select import choose, open_transport
from commfuse_dp.transport.symmetric import open as symmetric_open
from commfuse_dp.transport.symmetric.open import Verdict, judge, try_writes
from tests.support.fake_device import FakeDevice, FakeWorld
from tests.support.fake_symmetric import FakeSymmetricMemory, open_fake
from tests.support.threads import ExchangeFn, run_ranks

H200 = Card(0, "uuid-0", "NVIDIA H200", (9, 0), None)
OTHER = H200._replace(uuid="uuid-1", ordinal=1)


def links(way: str | None, count: int = 2) -> list[list[str | None]]:
    return [[way if a != b else "one GPU" for b in range(count)] for a in range(count)]


@pytest.mark.parametrize(
    ("hosts", "cards", "way", "possible", "parts"),
    [
        ("aa", [H200, OTHER], "NVLink", True, ["2 ranks on one host", "NVLink"]),
        ("aa", [H200, OTHER], "PCIe", True, ["PCIe"]),
        ("aa", [H200, H200], "one GPU", True, ["one GPU"]),
        ("aa", [H200, OTHER], "unknown", True, ["not visible"]),
        ("a", [H200], None, True, ["1 ranks on one host"]),
        ("ab", [H200, OTHER], "unknown", False, ["2 hosts", "'p2p'"]),
        ("aa", [H200, OTHER], None, False, ["no peer access", "rank 0", "rank 1", "topo", "'p2p'"]),
        ("aa", [H200, OTHER._replace(name="NVIDIA A100", capability=(8, 0))], "PCIe", False, ["mixed", "rank 1: NVIDIA A100"]),
        ("aa", [H200, OTHER._replace(problem="cuda-bindings is missing: ... pip install")], "NVLink", False, ["rank 1", "pip"]),
    ],
)
def test_verdicts(hosts: str, cards: list[Card], way: str | None, possible: bool, parts: list[str]) -> None:
    verdict = judge(list(hosts), cards, links(way, len(cards)))
    assert verdict.possible is possible
    for part in parts:
        assert part in verdict.reason


def test_cpu_parameters_and_other_callers_are_refused() -> None:
    with pytest.raises(TransportError, match=r"CUDA GPUs.*cpu.*auto"):
        choose("symmetric", ["a", "a"], torch.device("cpu"))
    with pytest.raises(TransportError, match="FSDP2"):
        open_transport(
            "symmetric",
            group=None,
            inbox_bytes=1 << 20,
            deadline_s=1.0,
            probe=None,
            device=torch.device("cuda"),
            stream_ordered=False,
        )


@pytest.mark.parametrize("kind", ["auto", "symmetric"])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_missing_is_logged_or_raised(
    kind: Any, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """auto: a logged fallback to NCCL, unless ranks share a GPU, which NCCL refuses; by name: an error with the reason."""
    cards = [H200, H200 if shared else OTHER]
    verdict = Verdict(False, "no peer access: look at topo")
    monkeypatch.setattr(symmetric_open, "survey", lambda device, hosts, exchange: (verdict, cards))
    options: dict[str, Any] = {"device": torch.device("cuda"), "deadline_s": 1.0, "probe": None, "stream_ordered": True}
    room = Room(1 << 20, 2, 0)
    wanted = select.Wanted(kind, "pairwise", None, 0, ["a", "a"], lambda item: [item, item], room, published_bytes=0, **options)
    if kind == "symmetric" or shared:
        with pytest.raises(TransportError, match="no peer access: look at topo") as caught:
            select._open_symmetric(wanted)
        assert ("asked for" if kind == "symmetric" else "NCCL refuses") in str(caught.value)
        return
    assert select._open_symmetric(wanted) == verdict.reason
    monkeypatch.setattr(select, "exchange_of", lambda group: lambda item: [item, item])
    with pytest.raises(TransportError, match="init_process_group"):  # p2p was tried
        open_transport(kind, group=None, inbox_bytes=1 << 20, **options)
    assert "no peer access: look at topo" in caplog.text and "'p2p'" in caplog.text


class PartialDevice(FakeDevice):
    """Its stream writes do not reach peers, or fail; 4-byte copies may."""

    peer_writes: Any = "value"
    broken: tuple[str, ...] = ()
    raises = False

    def write_values(self, stream: Stream, words: Any) -> None:
        if self.peer_writes not in self.broken:
            super().write_values(stream, words)
        elif self.raises:
            raise TransportError("cuStreamBatchMemOp failed: CUDA_ERROR_NOT_SUPPORTED")
        else:
            super().write_values(stream, [word for word in words if word.pad is words[self.rank].pad])

    def peek(self, pad: torch.Tensor) -> list[int]:
        self.world.advance()  # streams go on while words are looked at
        return super().peek(pad)


@pytest.mark.parametrize(
    ("broken", "raises", "expected"),
    [((), False, "stream memory operations"), (("value",), False, "4-byte copies"), (("value",), True, "NOT_SUPPORTED")],
)
def test_the_trial_finds_a_way_to_write_words(broken: Any, raises: bool, expected: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(symmetric_open, "TRIAL_S", 0.2)
    world = FakeWorld(2, deferred=False)

    def body(rank: int, exchange: ExchangeFn) -> tuple[str, str]:
        device = PartialDevice(world, rank)
        device.broken, device.raises = (broken if rank == 1 else ()), raises
        memory = FakeSymmetricMemory(world, rank, exchange)
        how = try_writes(device, memory, rank, 2, exchange)
        return how, device.peer_writes

    for how, way in run_ranks(2, body):
        assert expected in how and way == ("value" if not broken else "copy")


def test_no_way_to_write_words_is_said_on_all_ranks(monkeypatch: Any) -> None:
    monkeypatch.setattr(symmetric_open, "TRIAL_S", 0.1)
    world = FakeWorld(2, deferred=False)

    def body(rank: int, exchange: ExchangeFn) -> str:
        device = PartialDevice(world, rank)
        device.broken = ("value", "copy") if rank == 1 else ()
        with pytest.raises(TransportError, match=r"cannot write each other.*p2p") as caught:
            try_writes(device, FakeSymmetricMemory(world, rank, exchange), rank, 2, exchange)
        return str(caught.value)

    assert all("rank 0: words are [2, 0]" in text for text in run_ranks(2, body))


def test_too_little_memory_says_how_much_and_which_setting() -> None:
    world = FakeWorld(2)

    def body(rank: int, exchange: ExchangeFn) -> str:
        with pytest.raises(TransportError) as caught:
            open_fake(world, rank, exchange, inbox_bytes=1 << 20, deadline_s=1.0, room=1 << 20 if rank else None)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "rank 1: cannot get" in text and "bytes of symmetric memory for inboxes (inbox_bytes = 1048576" in text
