"""Transport p2p on GPUs (in lockstep, over grouped exchanges) on the simulated device, beside the engine's programs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.errors import DeadlineError, MismatchError, TransportError, Where
from commfuse_dp.transport.base import CHANNEL_COLLECTIVE, CHANNEL_GRAD, PullRequest, Tag, Transfer
from commfuse_dp.transport.grouped.transport import NcclTransport
from commfuse_dp.transport.waiting import wait_until
from tests.support import single
from tests.support.cells import slow
from tests.support.fake_device import FakeWorld, Race
from tests.support.fake_grouped import FakeBoard
from tests.support.fake_nccl import open_fake_nccl
from tests.support.threads import ExchangeFn, run_ranks

WHERE = Where(layer="blocks.3.fc", step=12, slice="2/1", nbytes=4711)
Body = Callable[[NcclTransport, ExchangeFn], Any]


def run(
    world_size: int,
    body: Body,
    *,
    sizes: list[list[int]] | None = None,
    seed: int = 3,
    inbox_bytes: int = 1024,
    deadline_s: float = 20.0,
    execute: bool = True,
    **settings: Any,
) -> list[Any]:
    """Every rank enqueues its program, then all of it is executed (deferred), in an order of the seed."""
    world = FakeWorld(world_size, seed=seed, strict=True)
    board = FakeBoard(world)

    def main(rank: int, exchange: ExchangeFn) -> Any:
        transport = open_fake_nccl(board, rank, exchange, inbox_bytes=inbox_bytes, deadline_s=deadline_s, **settings)
        try:
            if sizes is not None:
                transport.expose(sizes)
            result = body(transport, exchange)
            exchange("enqueued")
            if rank == 0 and execute:
                world.run()
            exchange("executed")
            return result
        finally:
            world.devices[rank].world.deferred = False  # close() waits: streams go on by themselves
            transport.close()

    return run_ranks(world_size, main, timeout_s=40)


def _size(owner: int, number: int) -> int:
    return (0, 64, 100)[(owner + number) % 3]


def pull(
    transport: NcclTransport,
    owner: int,
    key: int,
    epoch: int,
    out: torch.Tensor,
    give: tuple[int, int],
    *,
    start: int = 0,
    after: Any = None,
) -> Transfer:
    return transport.pull(epoch, [PullRequest(owner, key, start, out.numel(), out, after, give)])[0]


def program(transport: NcclTransport, seen: list[tuple[Any, int]]) -> None:
    """Two keys a step and two messages to everybody, sizes uneven, buffers used again; what is read is noted in `seen`."""
    rank, n, device = transport.rank, transport.world_size, transport.device
    outs = {shift: torch.zeros(100, dtype=torch.uint8) for shift in range(1, n)}
    free: dict[int, Any] = {}

    def note(what: Any, data: torch.Tensor) -> None:
        device.launch(lambda: seen.append((what, int(data[0]) if data.numel() else -1)), reads=[data])

    for epoch in range(1, 4):
        transport.wait_finished(epoch - 1)
        for key in range(2):
            segment = transport.segments[key]
            value = 50 * key + 10 * rank + epoch
            device.launch(lambda s=segment, v=value: s.fill_(v), writes=[segment])
            transport.publish((key,), epoch)
        transport.progress()
        for key in range(2):
            for shift in range(1, n):
                owner = (rank + shift) % n
                out = outs[shift][: _size(owner, key)]
                give = (0, transport.segments[key].numel())
                pulled = pull(transport, owner, key, epoch, out, give, after=free.get(shift))
                note(("slice", owner, key, epoch), pulled.wait(WHERE))
                free[shift] = device.record(device.current_stream())
        for number in range(2):
            tag = Tag(CHANNEL_GRAD, 5, epoch, number)
            for shift in range(1, n):
                single.expect(transport, (rank - shift) % n, tag, _size(rank, number))
            for shift in range(1, n):
                dst = (rank + shift) % n
                buffer = single.reserve(transport, dst, _size(dst, number))
                value = 100 + 40 * number + 10 * rank + epoch
                device.launch(lambda b=buffer, v=value: b.fill_(v), writes=[buffer])
                single.send(transport, dst, tag, buffer)
            for shift in range(1, n):
                src = (rank - shift) % n
                assert single.arrived(transport, src, tag)
                note(("message", src, number, epoch), single.receive(transport, src, tag, WHERE))
                single.release(transport, src, tag)
        transport.finish(epoch)


@pytest.mark.parametrize("world_size", [1, 2, 3, slow(4)])
def test_programs_in_many_orders(world_size: int) -> None:
    sizes = [[_size(owner, key) for owner in range(world_size)] for key in range(2)]
    for seed in range(4):
        seen: dict[int, list[tuple[Any, int]]] = {rank: [] for rank in range(world_size)}

        def body(transport: NcclTransport, exchange: ExchangeFn, seen: Any = seen) -> tuple[int, ...]:
            program(transport, seen[transport.rank])
            c = transport.probe.counters
            return c.param_bytes_received, c.param_bytes_sent, c.grad_bytes_received, c.grad_bytes_sent

        counters = run(world_size, body, sizes=sizes, seed=seed)
        for rank, notes in seen.items():
            assert len(notes) == 3 * 4 * (world_size - 1)
            for (kind, peer, number, epoch), value in notes:
                size = _size(peer, number) if kind == "slice" else _size(rank, number)
                expected = (50 if kind == "slice" else 100 + 40 * number) + 10 * peer + epoch
                if kind == "slice":
                    expected += 50 * (number - 1)
                assert value == (expected if size else -1), (rank, kind, peer, number, epoch)
            others = [owner for owner in range(world_size) if owner != rank]
            into = 3 * sum(_size(owner, key) for owner in others for key in range(2))
            out = 3 * len(others) * sum(_size(rank, key) for key in range(2))
            assert counters[rank] == (into, out, out, into)


def test_a_segment_is_not_written_under_an_exchange() -> None:
    """Without wait_finished, and with an exchange that only gives, nothing else stands before the next packing."""
    sizes = [[64, 0], [64, 0]]
    with pytest.raises(Race):
        run(2, lambda transport, exchange: _give_only(transport, wait=False), sizes=sizes)
    run(2, lambda transport, exchange: _give_only(transport, wait=True), sizes=sizes)


def _give_only(transport: NcclTransport, *, wait: bool) -> None:
    device, other = transport.device, 1 - transport.rank
    for epoch in (1, 2):
        if wait:
            transport.wait_finished(epoch - 1)
        transport._free_to_write = epoch - 1
        segment = transport.segments[0]
        device.launch(lambda s=segment: s.fill_(1), writes=[segment])
        transport.publish((0,), epoch)
        out = torch.empty(64 * transport.rank, dtype=torch.uint8)
        pull(transport, other, 0, epoch, out, (0, segment.numel()))
        transport.finish(epoch)


def test_messages_that_are_held_keep_their_bytes() -> None:
    """Released in any order, through a ring of four places; what would overwrite a message that is held is refused."""
    seen: list[tuple[int, int]] = []

    def body(transport: NcclTransport, exchange: ExchangeFn) -> None:
        device, other = transport.device, 1 - transport.rank
        choose, held = random.Random(5), []
        for number in range(40):
            tag = Tag(CHANNEL_COLLECTIVE, part=number)
            single.expect(transport, other, tag, 64)
            buffer = single.reserve(transport, other, 64)
            device.launch(lambda b=buffer, v=number: b.fill_(v), writes=[buffer])
            single.send(transport, other, tag, buffer)
            held.append(tag)
            while len(held) > 2 or (held and held[0].part <= number - 3):
                oldest = held[0].part <= number - 3
                taken = held.pop(0 if oldest else choose.randrange(len(held)))
                data = single.receive(transport, other, taken, WHERE)
                device.launch(lambda d=data, n=taken.part: seen.append((n, int(d.min()))), reads=[data])
                single.release(transport, other, taken)
        tags = [Tag(CHANNEL_COLLECTIVE, 1, part=part) for part in range(5)]
        for taken in held:
            single.receive(transport, other, taken, WHERE)
            single.release(transport, other, taken)
        for tag in tags[:4]:
            single.expect(transport, other, tag, 64)
            single.send(transport, other, tag, single.reserve(transport, other, 64))
        single.expect(transport, other, tags[4], 64)
        buffer = single.reserve(transport, other, 64)
        with pytest.raises(TransportError, match=r"too few for what has come from rank .* was not released"):
            single.send(transport, other, tags[4], buffer)

    run(2, body, inbox_bytes=256)
    assert len(seen) >= 70 and all(number == value for number, value in seen)


def test_a_peer_that_never_comes_is_named_and_streams_go_on() -> None:
    world = FakeWorld(3, seed=1, deferred=False)
    board = FakeBoard(world)
    board.eager = 0.0

    def main(rank: int, exchange: ExchangeFn) -> str:
        transport = open_fake_nccl(board, rank, exchange, inbox_bytes=1024, deadline_s=0.5)
        transport.expose([[64] * 3])
        try:
            if rank == 2:
                exchange("over")
                return ""
            transport.segments[0].fill_(rank)
            transport.publish((0,), 1)
            start = time.monotonic()
            with pytest.raises(DeadlineError) as caught:
                out = torch.empty(64, dtype=torch.uint8)
                pull(transport, (rank + 1) % 3, 0, 1, out, (0, 64)).wait(WHERE)
            assert time.monotonic() - start > 0.4
            assert caught.value.where is not None and caught.value.where.step in (1, 12)
            with pytest.raises(DeadlineError):
                transport.publish((0,), 2)
            exchange("over")
            return str(caught.value)
        finally:
            transport.close()

    first, second, _ = run_ranks(3, main, timeout_s=40)
    assert "rank 1 and rank 2" in first and "rank 0 and rank 2" in second
    for text in (first, second):
        assert "0.5 s" in text and "deadline_s" in text and "bytes" in text


@pytest.mark.parametrize("what", ["slice", "message", "count"])
def test_other_programs_are_found_by_their_checksums(what: str) -> None:
    """Slices and messages of equal sizes are taken for each other; or a rank takes a step less, and streams stand."""

    def body(transport: NcclTransport, exchange: ExchangeFn) -> str:
        rank, other = transport.rank, 1 - transport.rank
        for key in range(2):
            transport.publish((key,), 1)
        for key in (0, 1) if rank == 0 or what != "slice" else (1, 0):
            if what != "count" or rank == 0 or key == 0:
                out = torch.empty(64, dtype=torch.uint8)
                pull(transport, other, key, 1, out, (0, 64)).wait(WHERE)
        tag = Tag(CHANNEL_GRAD, rank if what == "message" else 0)
        single.expect(transport, other, tag, 64)
        single.send(transport, other, tag, single.reserve(transport, other, 64))
        transport.finish(1)
        with pytest.raises(MismatchError, match=f"rank {other} .*step 1.*different programs") as caught:
            wait_until(transport, lambda: False, peer=other, where=WHERE, doing="to be found out")
        with pytest.raises(MismatchError):
            transport.publish((0,), 2)
        return str(caught.value)

    run(2, body, sizes=[[64, 64]] * 2, execute=False)


def test_misuse_is_refused() -> None:
    def body(transport: NcclTransport, exchange: ExchangeFn) -> None:
        rank, other = transport.rank, 1 - transport.rank
        out = torch.empty(8, dtype=torch.uint8)

        def bring(
            owner: int = other, key: int = 0, start: int = 0, give: tuple[int, int] = (0, 8), out: torch.Tensor = out
        ) -> None:
            pull(transport, owner, key, 1, out, give, start=start)

        with pytest.raises(TransportError, match="twice"):
            transport.expose([[8, 8]])
        with pytest.raises(TransportError, match="publish first"):
            bring()
        with pytest.raises(ValueError, match="rise by one"):
            transport.publish((0,), 2)
        transport.publish((0,), 1)
        with pytest.raises(TransportError, match=r"wait_finished\(1\)"):
            transport.publish((0,), 2)
        with pytest.raises(ValueError, match=r"\[4, 12\).*8 bytes"):
            bring(start=4)
        with pytest.raises(ValueError, match=r"give = \(4, 8\).*8 bytes"):
            bring(give=(4, 8))
        with pytest.raises(ValueError, match="no window"):
            bring(key=1)
        with pytest.raises(ValueError, match="is no peer"):
            bring(owner=rank)
        with pytest.raises(ValueError, match="contiguous uint8"):
            bring(out=torch.empty(2, dtype=torch.float32))
        with pytest.raises(ValueError, match=r"1025 bytes.*0 \.\. 1024.*inbox_bytes"):
            single.reserve(transport, other, 1025)
        tag = Tag(CHANNEL_GRAD)
        with pytest.raises(ValueError, match="not reserved"):
            single.send(transport, other, tag, torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(ValueError, match=rf"comes in the step in which rank {rank} sends .* to rank {other}"):
            single.receive(transport, other, tag)
        with pytest.raises(ValueError, match="no message"):
            single.release(transport, other, tag)
        single.expect(transport, other, tag, 8)
        with pytest.raises(TransportError, match="two messages"):
            single.expect(transport, other, tag, 8)
        buffer = single.reserve(transport, other, 8)
        with pytest.raises(ValueError, match=r"0 \.\. 2\*\*31-1"):
            single.send(transport, other, Tag(-1), buffer)
        single.send(transport, other, tag, buffer)
        with pytest.raises(ValueError, match="sent before"):
            single.send(transport, other, Tag(CHANNEL_GRAD, 1), buffer)
        with pytest.raises(ValueError, match="no message"):
            single.release(transport, other, tag)
        transport.device.captures = True
        with pytest.raises(TransportError, match="CUDA graph"):
            single.receive(transport, other, tag)
        transport.device.captures = False
        transport.finish(1)
        with pytest.raises(ValueError, match="is over"):
            bring()
        with pytest.raises(ValueError, match="epochs rise"):
            transport.finish(1)
        exchange("enqueued")
        transport.device.world.deferred = False  # type: ignore[attr-defined]
        transport.close()
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            transport.publish((0,), 2)

    run(2, body, sizes=[[8, 8]])


def test_different_windows_are_found_at_once() -> None:
    def body(transport: NcclTransport, exchange: ExchangeFn) -> None:
        with pytest.raises(MismatchError, match=r"key 1 .*same model"):
            transport.expose([[8, 8], [8, 8 + transport.rank]])

    run(2, body)
