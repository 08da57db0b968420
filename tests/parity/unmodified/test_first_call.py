"""Which model is served, and at which call: `watch` is what the hooks of an unmodified script call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.fsdp2 import engine_of
from commfuse_dp.integrations.unmodified import first_call
from commfuse_dp.integrations.wrapped import kind_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import commfuse_dp
from commfuse_dp import BrokenStepError
from tests.support.cells import slow
from tests.support.raising import Boom, blow
from tests.support.serving import config

SETTINGS = {"COMMFUSE_DEADLINE_S": "30", "COMMFUSE_INBOX_BYTES": "65536"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Sequential):
    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return self(x / 2)


class Around(nn.Module):
    """A task around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def sharded(*, root: bool = True) -> Any:
    """Watched as an unmodified script's."""
    torch.manual_seed(0)
    net = Net(*[Block() for _ in range(2)]).double()
    for block in net:
        first_call.watch(fully_shard(block))
    return first_call.watch(fully_shard(net)) if root else net


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def losses(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    optimizer, found = optimizer or descent(model), []
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = call(torch.rand(3, 6, dtype=torch.float64)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def on(model: nn.Module) -> bool:
    kind = kind_of(model)
    return kind is not None and kind.served(model)


@contextmanager
def alone() -> Iterator[list[str]]:
    """What is said; nothing waits before or afterwards."""
    said: list[str] = []
    with (
        mock.patch.dict("os.environ", SETTINGS),
        mock.patch.object(first_call, "warn", said.append),
        mock.patch.object(first_call, "announce", said.append),
        mock.patch.object(first_call, "announce_report", lambda report: said.append(report.summary)),
    ):
        assert first_call._handle is None
        yield said
    assert not first_call._waiting and first_call._handle is None


def expected() -> list[float]:
    net = sharded()
    first_call.forget(net)
    return losses(net, net)


def _plain(rank: int, world_size: int) -> None:
    """Called itself, around it, by its blocks alone, and as a lone layer."""
    wanted = expected()
    with alone() as said:
        net = sharded()
        assert losses(net, net) == pytest.approx(wanted, rel=1e-12)
        assert engine_of(net).step == 2 and len(said) == (rank == 0)  # type: ignore[union-attr]
        commfuse_dp.remove(net)
        losses(net, net)
        assert engine_of(net) is None  # not again
    with alone():
        net = sharded()
        task = Around(net)
        assert losses(task, net) == pytest.approx(wanted, rel=1e-12)
        assert engine_of(net) is not None and engine_of(task) is None
        commfuse_dp.remove(net)
    with alone():
        net = sharded(root=False)
        assert losses(net, net) == pytest.approx(wanted, rel=1e-12)
        assert engine_of(net) is not None
        commfuse_dp.remove(net)
    with alone():
        results = []
        for watched in (False, True):
            torch.manual_seed(0)
            layer = fully_shard(nn.Linear(6, 3).double())
            results.append(losses(first_call.watch(layer) if watched else layer, layer))
        assert results[0] == pytest.approx(results[1], rel=1e-12) and on(layer)
        commfuse_dp.remove(layer)


def _compiled(rank: int, world_size: int, how: str) -> None:
    wanted = expected()
    with alone():
        net = sharded()
        call: Any = net
        if how == "wrapper":
            call = torch.compile(net, backend="eager")
        elif how == "in place":
            net.compile(backend="eager")
        else:
            for block in net:
                block.compile(backend="eager", fullgraph=True)
            with torch.inference_mode():
                net(torch.zeros(1, 6, dtype=torch.float64))
            assert on(net)
        assert losses(call, net) == pytest.approx(wanted, rel=1e-12)
        assert on(net)
        commfuse_dp.remove(net)
    torch.compiler.reset()


def _first_without_training(rank: int, world_size: int) -> None:
    """What is made in the first forward is used in training."""
    wanted = expected()
    for context in (torch.inference_mode, torch.no_grad):
        with alone():
            net = sharded()
            with context():
                net(torch.zeros(1, 6, dtype=torch.float64))
            assert on(net) and torch.is_grad_enabled()
            assert losses(net, net) == pytest.approx(wanted, rel=1e-12)
            commfuse_dp.remove(net)


def _breaks_off(rank: int, world_size: int) -> None:
    """The first forward is a step like any other: one rank's exception is heard by its peers at once."""
    wanted = expected()
    with alone():
        net = sharded()
        optimizer = descent(net)
        handle = net[1].register_forward_pre_hook(blow) if rank == 1 else None
        with pytest.raises(Boom if rank == 1 else BrokenStepError):
            losses(net, net, optimizer)
        dist.barrier()  # rank 1 begins no other step before the other has heard of it
        if handle is not None:
            handle.remove()
        assert losses(net, net, optimizer) == pytest.approx(wanted, rel=1e-12)
        commfuse_dp.remove(net)


def _not_yet(rank: int, world_size: int) -> None:
    """A call that is only looked at, a part that is called by itself, and a method that calls the forward: FSDP2 is in the
    middle of it."""
    stock = sharded()
    register_fsdp_forward_method(stock, "halved")
    first_call.forget(stock)
    wanted = [loss for call in (stock.halved, stock, stock.halved) for loss in losses(call, stock)]
    with alone():
        net = sharded()
        register_fsdp_forward_method(net, "halved")
        with FlopCounterMode(display=False):
            net(torch.zeros(1, 6, dtype=torch.float64))
        found = losses(net.halved, net)
        assert not on(net) and first_call._handle is not None
        found += losses(net, net)
        assert on(net)
        found += losses(net.halved, net)
        assert found == pytest.approx(wanted, rel=1e-12)
        commfuse_dp.remove(net)
    with alone():
        net = sharded()
        net[0](torch.zeros(1, 6, dtype=torch.float64))  # a part: FSDP2 takes it for a root from now on
        assert not on(net[0])
        first_call.forget(net)


def _by_the_script(rank: int, world_size: int) -> None:
    """What the script serves itself is served once, and what it has left as it is not at all; others' calls cost one look."""
    wanted = expected()
    with alone() as said:
        net = sharded()
        commfuse_dp.apply(net, config())
        assert first_call._handle is None
        assert losses(net, net) == pytest.approx(wanted, rel=1e-12)
        commfuse_dp.remove(net)
        assert not said
    with alone():
        net, other = sharded(), nn.Linear(2, 2)
        other(torch.zeros(2))
        with mock.patch.object(nn.Module, "modules", side_effect=AssertionError("looked again")):
            other(torch.zeros(2))
        first_call.forget(net)
    with alone():
        net, other = sharded(), nn.Linear(2, 2)
        del net  # never called
        gc.collect()
        other(torch.zeros(2))
    with alone() as said, mock.patch.dict("os.environ", {"COMMFUSE_ENABLED": "0"}):
        net = sharded()
        assert losses(net, net) == pytest.approx(wanted, rel=0.0)
        assert not on(net) and said == ["CommFuse does nothing in this run: enabled=False"] * (rank == 0)


def _hooks(rank: int, world_size: int) -> None:
    """DDP and FSDP1: the object itself, whatever is around it."""

    def model(kind: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(*[Block() for _ in range(2)]).double()
        if kind is DistributedDataParallel:
            return first_call.watch(DistributedDataParallel(net))
        device = torch.device("cpu")
        inner = nn.Sequential(*[first_call.watch(FullyShardedDataParallel(part, device_id=device)) for part in net])
        return first_call.watch(FullyShardedDataParallel(inner, device_id=device))

    for kind in (DistributedDataParallel, FullyShardedDataParallel):
        stock = model(kind)
        first_call.forget(stock)
        wanted = losses(stock, stock)
        for around in (Around, lambda net: net, lambda net: torch.compile(net, backend="eager")):
            with alone() as said:
                wrapped = model(kind)
                call = around(wrapped)
                if kind is DistributedDataParallel and rank == 0:  # evaluates on the main process
                    call.eval()
                    with torch.no_grad():
                        call(torch.zeros(1, 6, dtype=torch.float64))
                    call.train()
                assert not said
                assert losses(call, wrapped) == pytest.approx(wanted, rel=1e-12)
                assert "\n" not in "".join(said)  # the list of parameters is for the log
                assert on(wrapped) and [line.partition(":")[0] for line in said] == [
                    f"CommFuse for {'DDP' if kind is DistributedDataParallel else 'FSDP1'}"
                ] * (rank == 0)
            torch.compiler.reset()
    with alone():
        wrapped = model(DistributedDataParallel)
        wrapped.training = False  # as Lightning leaves it, around a module that trains
        losses(wrapped, wrapped)
        assert on(wrapped)
    with alone() as said:
        wrapped = model(DistributedDataParallel)
        if rank == 1:
            wrapped.register_comm_hook(None, allreduce_hook)
        losses(wrapped, wrapped)
        assert not on(wrapped)
        assert all("on rank 1 the script set a communication hook of its own" in line for line in said)


@pytest.mark.parametrize("program", [_plain, _first_without_training, _breaks_off, _not_yet, _by_the_script, slow(_hooks)])
def test_the_model_that_is_served(workers: Any, program: Any) -> None:
    workers(2).run(program, timeout=120)


@pytest.mark.parametrize("how", ["blocks", slow("wrapper"), slow("in place")])
def test_compiled_before_it_is_served(workers: Any, how: str) -> None:
    workers(2).run(_compiled, how, timeout=120)
