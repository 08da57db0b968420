"""What a failure leaves behind on a device: streams go on with what never came, and nothing of it may look as if it had.

The host is ahead of the device: when a peer dies, or calls its layers in another order, an optimizer step may be enqueued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commfuse_dp.config import CommFuseConfig
from commfuse_dp.engine.engine import Engine
from commfuse_dp.engine.operand import UnitOperand
from commfuse_dp.engine.plan import Unit
from commfuse_dp.errors import CommFuseError, DeadlineError, MismatchError, PeerLostError, Where
from commfuse_dp.ops.linear import fused_linear
from commfuse_dp.transport.base import CHANNEL_GRAD, PullRequest, Tag, Transport
from commfuse_dp.transport.grouped.transport import NcclTransport
from commfuse_dp.transport.waiting import wait_until
from tests.simulated.test_engine import Policy, Slot, data, weights
from tests.support import fake_nccl, fake_symmetric, single
from tests.support.fake_device import FakeWorld
from tests.support.fake_grouped import FakeBoard
from tests.support.fake_nccl import open_fake_nccl
from tests.support.fake_symmetric import open_fake
from tests.support.threads import ExchangeFn, run_ranks

WHERE = Where(layer="blocks.3.fc", step=12, slice="1/0", nbytes=32)
BYTES = 32


class Device:
    """What a rank computes with what it receives: an output, and an optimizer step."""

    def __init__(self, transport: Transport, stale: float) -> None:
        self.device: Any = transport.device
        self.weight = torch.full((8,), stale)  # what lay in the buffer before
        self.output, self.param = torch.zeros(8), torch.full((8,), 7.0)

    def forward(self) -> None:
        self.device.launch(lambda: self.output.copy_(self.weight * 2), reads=[self.weight], writes=[self.output])

    def optimizer(self, partial: torch.Tensor) -> None:
        partial = partial.view(torch.float32)
        self.device.launch(lambda: self.param.sub_((1 + partial) / 2), reads=[partial], writes=[self.param])

    def lost(self) -> None:
        assert self.output.isnan().all(), self.output
        assert self.param.isnan().all(), self.param


def symmetric_step(transport: Transport, host: Device, *, epoch: int, sends: bool) -> None:
    """One parameter slice and one partial each way."""
    other, tag = 1 - transport.rank, Tag(CHANNEL_GRAD, 0, epoch)
    transport.wait_finished(epoch - 1, WHERE)
    if sends:
        segment = transport.segments[0]
        host.device.launch(lambda: segment.view(torch.float32).fill_(1.0), writes=[segment])
        transport.publish((0,), epoch)
    single.pull(transport, other, 0, epoch, out=host.weight.view(torch.uint8)).wait(WHERE)
    host.forward()
    single.expect(transport, other, tag, BYTES)
    if sends:
        buffer = single.reserve(transport, other, BYTES)
        host.device.launch(lambda: buffer.view(torch.float32).fill_(1.0), writes=[buffer])
        single.send(transport, other, tag, buffer)
    host.optimizer(single.receive(transport, other, tag, WHERE))
    single.release(transport, other, tag)
    transport.finish(epoch)


def test_an_optimizer_step_behind_a_dead_peer_finds_nan_only() -> None:
    """Symmetric memory. The first step is sound; of the second one the peer brings nothing."""
    world = FakeWorld(2, seed=5)

    def body(rank: int, exchange: ExchangeFn) -> str:
        transport = open_fake(world, rank, exchange, inbox_bytes=256, deadline_s=20.0)
        transport.expose([[BYTES, BYTES]])
        host = Device(transport, 3.0)
        symmetric_step(transport, host, epoch=1, sends=True)
        exchange("enqueued")
        if rank == 0:
            world.run()
            assert host.output.eq(2).all() and host.param.eq(6).all()
        exchange("executed")
        if rank == 1:
            fake_symmetric.die(transport)
            exchange("dead")
            return ""
        try:
            symmetric_step(transport, host, epoch=2, sends=False)
        except PeerLostError:  # heard of it while it still enqueued: then there is no optimizer step at all
            assert host.param.eq(6).all()
            host.output.fill_(torch.nan)
            host.param.fill_(torch.nan)
        exchange("dead")
        world.run(patience_s=30)
        host.lost()
        with pytest.raises(PeerLostError) as caught:
            transport.progress()
        world.deferred = False  # streams go on by themselves
        transport.close()
        return str(caught.value)

    text = run_ranks(2, body)[0]
    assert "lost rank 1" in text and "parameters of this rank may be lost" in text and "last checkpoint" in text


def test_an_optimizer_step_behind_a_late_peer_finds_nan_only() -> None:
    """Grouped exchanges: what is aborted leaves what lay in its buffer before."""
    world = FakeWorld(2, seed=5)
    board = FakeBoard(world)
    board.eager = 0.0

    def body(rank: int, exchange: ExchangeFn) -> str:
        transport = open_fake_nccl(board, rank, exchange, inbox_bytes=256, deadline_s=0.3, compare=False)
        transport.expose([[BYTES, BYTES]])
        host = Device(transport, 3.0)
        other, tag = 1 - rank, Tag(CHANNEL_GRAD, 0, 1)
        text = ""
        if rank == 0:
            transport.publish((0,), 1)
            request = PullRequest(other, 0, 0, BYTES, host.weight.view(torch.uint8), None, (0, BYTES))
            transport.pull(1, [request])[0].wait(WHERE)
            host.forward()
            single.expect(transport, other, tag, BYTES)
            single.send(transport, other, tag, single.reserve(transport, other, BYTES))
            host.optimizer(single.receive(transport, other, tag, WHERE))
            world.run(patience_s=30)
            host.lost()
            with pytest.raises(DeadlineError) as caught:
                transport.publish((0,), 2)
            text = str(caught.value)
        exchange("over")
        world.deferred = False
        fake_nccl.die(transport)
        return text

    text = run_ranks(2, body)[0]
    assert "rank 1" in text and "parameters of this rank may be lost" in text and "last checkpoint" in text


# ---- another order -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_another_order_reaches_no_optimizer_step(what: str) -> None:
    """Rank 1 exchanges the parameters, or the gradients, of two equal layers the other way round; no host waits for it."""
    world = FakeWorld(2, seed=4)
    board = FakeBoard(world)

    def body(rank: int, exchange: ExchangeFn) -> str:
        transport: NcclTransport = open_fake_nccl(board, rank, exchange, inbox_bytes=512, compare=False)
        transport.layers = ["layer a", "layer b"]
        transport.expose([[BYTES, BYTES]] * 2)
        host, other = Device(transport, 3.0), 1 - rank
        for key in (0, 1):
            transport.publish((key,), 1)
        for key in (1, 0) if rank and what == "parameters" else (0, 1):
            request = PullRequest(other, key, 0, BYTES, host.weight.view(torch.uint8), None, (0, BYTES))
            transport.pull(1, [request])[0].wait(WHERE)
            host.forward()
        tags = [Tag(CHANNEL_GRAD, key, 1) for key in (0, 1)]
        for tag in reversed(tags) if rank and what == "gradients" else tags:
            single.expect(transport, other, tag, BYTES)
            single.send(transport, other, tag, single.reserve(transport, other, BYTES))
            host.optimizer(single.receive(transport, other, tag, WHERE))
            single.release(transport, other, tag)
        exchange("enqueued")
        if rank == 0:
            world.run(patience_s=30)
        exchange("executed")
        assert host.param.isnan().all(), "an optimizer step on wrong data"
        with pytest.raises(MismatchError) as caught:
            wait_until(transport, lambda: False, peer=other, where=WHERE, doing="to be found out")
        fake_nccl.die(transport)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(2, body)):
        gave, took = text.split("What rank")[1:]
        assert f"rank {1 - rank} call their layers in different orders" in text and "last checkpoint" in text
        assert gave.startswith(f" {1 - rank} gave last") and took.startswith(f" {rank} took it for")
        if what == "parameters":
            orders = ["parameters of layer 'layer a', parameters of layer 'layer b'"]
            orders.append("parameters of layer 'layer b', parameters of layer 'layer a'")
        else:
            orders = ["gradient of layer 'layer a'", "gradient of layer 'layer b'"]
        assert orders[1 - rank] in gave and orders[rank] in took


def swapped(open_transport: Callable[[int, ExchangeFn], Transport], end: Callable[[Transport], None]) -> list[str]:
    """Two ranks call two equal layers in swapped orders; what each raises before a gradient is handed over."""
    params = weights(2, 9, False)

    def body(rank: int, exchange: ExchangeFn) -> str:
        transport = open_transport(rank, exchange)
        config = CommFuseConfig(inbox_bytes=4096, prefetch_bytes=4096, kernels="blas", slices_per_rank=1)
        slots = [[Slot(f"{i}.{j}", p, rank, 2) for j, p in enumerate(layer)] for i, layer in enumerate(params)]
        units = [Unit(i, f"layer{i}", layer, Policy(), 1) for i, layer in enumerate(slots)]
        engine = Engine(transport, units, config, device=torch.device("cpu"), replicas=None)
        operands = [UnitOperand(engine, unit) for unit in units]
        try:
            engine.begin_step()
            x = data(rank, 0)
            for operand in reversed(operands) if rank else operands:
                x = torch.tanh(fused_linear(x, operand, 0))
            engine.end_forward(True)
            with pytest.raises((MismatchError, PeerLostError)) as caught:
                x.sum().backward()
            assert all(slot.grad is None for layer in slots for slot in layer), "a gradient of wrong data was handed over"
            return f"{type(caught.value).__name__}: {caught.value}"
        finally:
            end(transport)

    return run_ranks(2, body)


def test_layers_in_swapped_orders_give_no_gradient() -> None:
    board = FakeBoard(FakeWorld(2, seed=6, deferred=False))
    texts = swapped(lambda rank, exchange: open_fake_nccl(board, rank, exchange, inbox_bytes=4096), fake_nccl.die)
    for rank, text in enumerate(texts):
        ways = ["parameters of layer 'layer0', parameters of layer 'layer1'"]
        ways.append("parameters of layer 'layer1', parameters of layer 'layer0'")
        gave, took = text.split("What rank")[1:]
        assert text.startswith("MismatchError") and ways[1 - rank] in gave and ways[rank] in took


def test_the_error_is_raised_again_by_every_call() -> None:
    board = FakeBoard(FakeWorld(2, seed=6, deferred=False))

    def end(transport: Any) -> None:
        for call in (
            transport.progress,
            lambda: transport.publish((0,), 2),
            lambda: single.reserve(transport, 1 - transport.rank, 8),
        ):
            with pytest.raises(CommFuseError, match="different orders"):
                call()
        fake_nccl.die(transport)

    swapped(lambda rank, exchange: open_fake_nccl(board, rank, exchange, inbox_bytes=4096), end)
