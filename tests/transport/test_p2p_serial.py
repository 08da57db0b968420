"""Transport p2p over communicators that behave as NCCL's do: no tags, and one transfer after the other in each.

Gloo carries the bytes; `SerialGroup` takes the tags away and starts a transfer only when the one before it has ended.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_dp.errors import DeadlineError, Where
from commfuse_dp.transport import paired
from commfuse_dp.transport.base import CHANNEL_GRAD, CONTROL_LANE, GRAD_LANE, PARAM_LANE, Tag
from commfuse_dp.transport.p2p import TorchP2PTransport, not_bound_to_a_device
from commfuse_dp.transport.paired import FOREVER_S, PairedTransport
from tests.support.threads import ExchangeFn, run_ranks
from tests.support.transports import pattern

WHERE = Where("blocks.1.fc", 3, "1/0", 64)


class SerialWork:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, patience: datetime.timedelta) -> None:
        if not self.ended.wait(patience.total_seconds()):
            raise RuntimeError("timed out")


class SerialGroup:
    """One stream per peer, as torch has one communicator per pair for ungrouped transfers."""

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group = group
        self._queues: dict[int, queue.SimpleQueue[Any]] = defaultdict(self._stream)
        self.rank, self.size = group.rank, group.size
        self.directions: set[str] = set()

    def name(self) -> str:
        return "nccl"

    def send(self, buffers: list[torch.Tensor], dst: int, tag: int) -> SerialWork:
        return self._post(dst, f"send {'up' if dst > self.rank() else 'down'}", self._group.send, buffers)

    def recv(self, buffers: list[torch.Tensor], src: int, tag: int) -> SerialWork:
        return self._post(src, f"recv {'up' if src < self.rank() else 'down'}", self._group.recv, buffers)

    def _post(self, peer: int, what: str, call: Any, buffers: list[torch.Tensor]) -> SerialWork:
        self.directions.add(what.split()[1])
        work = SerialWork()
        self._queues[peer].put((work, lambda: call(buffers, peer, 0).wait()))
        return work

    def _stream(self) -> queue.SimpleQueue[Any]:
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            while True:
                work, transfer = waiting.get()
                with contextlib.suppress(RuntimeError):  # gloo's timeout, where transfers stand still on purpose
                    transfer()
                    work.ended.set()

        threading.Thread(target=run, daemon=True).start()
        return waiting


def run(world_size: int, body: Any, *, split: bool, deadline_s: float = 20.0) -> list[Any]:
    store, limit = dist.HashStore(), datetime.timedelta(seconds=20 if split else 5)

    def main(rank: int, exchange: ExchangeFn) -> Any:
        def gloo(name: str) -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, world_size, limit)

        up: dict[int, Any] = {lane: SerialGroup(gloo(f"up{lane}")) for lane in (PARAM_LANE, GRAD_LANE)}
        down = {lane: SerialGroup(gloo(f"down{lane}")) for lane in up} if split else up
        control = {CONTROL_LANE: gloo("control")}
        two_sided = TorchP2PTransport({**up, **control}, down={**down, **control}, deadline_s=FOREVER_S)
        assert not two_sided.keeps_tags
        transport = PairedTransport(two_sided, exchange, inbox_bytes=4096, deadline_s=deadline_s)
        try:
            transport.expose([[300] * world_size, [200] * world_size])
            result = body(transport, exchange)
        finally:
            transport.close()
        if split:
            assert all(group.directions <= {"up"} for group in up.values())
            assert all(group.directions <= {"down"} for group in down.values())
        return result

    return run_ranks(world_size, main)


def exchange_everything(transport: PairedTransport, exchange: ExchangeFn) -> int:
    """Both ways at once, and requests that come before their time in another order than the publications."""
    rank, n, read = transport.rank, transport.world_size, 0
    peers = [(rank + step) % n for step in range(1, n)]
    for epoch in (1, 2, 3):
        transport.wait_finished(epoch - 1, WHERE)
        pulls = []
        for peer in peers:
            for key, size in ((1, 200), (0, 300)):
                out = torch.empty(size, dtype=torch.uint8)
                pulls.append((peer, key, transport.pull(peer, key, epoch, out=out)))
        exchange("all requests are on their way")
        for key, size in ((0, 300), (1, 200)):
            transport.segment(key).copy_(pattern(rank, key, epoch, nbytes=size))
            transport.publish(key, epoch)
        for peer in peers:
            buffer = transport.try_reserve(peer, 500)
            assert buffer is not None
            buffer.copy_(pattern(rank, peer, epoch, nbytes=500))
            transport.send(peer, Tag(CHANNEL_GRAD, 0, epoch), buffer)
        for peer, key, pull in pulls:
            assert torch.equal(pull.wait(WHERE), pattern(peer, key, epoch, nbytes=(300, 200)[key]))
            read += 1
        for peer in peers:
            assert torch.equal(transport.receive(peer, Tag(CHANNEL_GRAD, 0, epoch)), pattern(peer, rank, epoch, nbytes=500))
            transport.release(peer, Tag(CHANNEL_GRAD, 0, epoch))
        transport.finish(epoch)
    return read


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_directions_at_once(world_size: int) -> None:
    assert run(world_size, exchange_everything, split=True) == [6 * (world_size - 1)] * world_size


def test_one_communicator_for_both_directions_would_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there are two: see [Note: NCCL, one direction per communicator] in p2p.py."""
    monkeypatch.setattr(paired, "LINGER_S", 0.1)
    monkeypatch.setattr(paired, "_left_behind", [])
    with pytest.raises(DeadlineError, match=r"blocks\.1\.fc"):
        run(2, exchange_everything, split=False, deadline_s=0.5)


def test_new_groups_do_not_inherit_the_device() -> None:
    class World:
        bound_device_id: Any = torch.device("cuda", 3)

    before = dist.group.WORLD
    dist.group.WORLD = World  # type: ignore[assignment]
    try:
        with not_bound_to_a_device():
            assert World.bound_device_id is None
    finally:
        dist.group.WORLD = before
    assert World.bound_device_id == torch.device("cuda", 3)
