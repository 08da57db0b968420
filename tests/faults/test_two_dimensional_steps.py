"""An exception on one rank of data parallelism over tensor parallelism, or on all: who raises what, and that the next step is
stock's.

Two transports break and recover together: a rank that is no peer of the one that raised, on neither of them, hears of it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.forwards import TENSOR_ATTACHMENT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.hooks import RemovableHandle

from commfuse_dp import BrokenStepError
from commfuse_dp.collectives.steps import steps_of
from commfuse_dp.transport.base import Transport
from tests.parity.tensor_parallel.block import batch, parallelize, whole
from tests.parity.tensor_parallel.test_tensor_layers import gradients as llama_gradients
from tests.parity.tensor_parallel.test_tensor_slices import alike, build, data, gradients, grid
from tests.support import serving
from tests.support.cells import slow
from tests.support.raising import Boom, Injected, blow, blow_in_backward, functions_entered, inside, raising_in

DEADLINE_S = 60.0  # what ends sooner ended because ranks were told


# ---- places: each returns a handle that takes the hook back ------------------------------------------------------------
def _before_a_layer(net: Any, x: torch.Tensor) -> RemovableHandle:
    return net.blocks[1].up.register_forward_pre_hook(blow)


def _behind_a_forward(net: Any, x: torch.Tensor) -> RemovableHandle:
    return net.blocks[1].register_forward_hook(blow)


def _first_hook(net: Any, x: torch.Tensor) -> RemovableHandle:
    """Of a backward: all that follows communicates."""
    return net.blocks[1].down.register_forward_hook(blow_in_backward)


def _hook(net: Any, x: torch.Tensor) -> RemovableHandle:
    return net.blocks[0].register_forward_hook(blow_in_backward)


def _last_hook(net: Any, x: torch.Tensor) -> RemovableHandle:
    """Nothing of tensor parallelism follows: only data parallelism's peers wait."""
    return x.register_hook(blow)


HOOKS = (_before_a_layer, _behind_a_forward, _first_hook, _hook, _last_hook)


# ---- steps -----------------------------------------------------------------------------------------------------------
def _attempt(net: nn.Module, x: torch.Tensor, between: Callable[..., object] = lambda loss: None) -> Exception | None:
    try:
        loss = net(x).square().mean()
        between(loss)
        loss.backward()
    except Exception as error:
        return error
    finally:
        net.zero_grad()
    return None


def _next_is_stock(net: nn.Module, mesh: DeviceMesh, wanted: list[torch.Tensor], error: Exception | None) -> None:
    """error: of the step before. If some ranks went through with it, all hear of that first, for their optimizers may have
    moved alone."""
    told = False
    try:
        found = gradients(net, mesh)
    except BrokenStepError as parted:
        assert "went through with it" in str(parted), parted
        told, found = True, gradients(net, mesh)
    alike(found, wanted)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (error is None, told))
    through = [went for went, _ in everyone]
    assert {told for _, told in everyone} == {any(through) and not all(through)}, everyone


def _hooks(rank: int, world_size: int, settings: dict[str, Any], victims: tuple[int, ...]) -> None:
    mesh = grid(world_size)
    wanted, net = gradients(build(mesh), mesh), build(mesh)
    with serving.applied(net, deadline_s=DEADLINE_S, **settings):
        x = data(mesh, 0).requires_grad_()
        for victim, place in itertools.product(victims, HOOKS):
            alike(gradients(net, mesh), wanted)
            with place(net, x) if rank == victim else nullcontext():
                error = _attempt(net, x)
            if rank == victim:
                assert isinstance(error, Boom), (place, error)
            elif place is not _last_hook:
                assert isinstance(error, BrokenStepError), (place, error)
                assert "no more" in str(error) or "an exception in its backward" in str(error), error
            _next_is_stock(net, mesh, wanted, error)
        for victim in victims:  # between forward and backward
            error = _attempt(net, x, blow if rank == victim else lambda loss: None)
            assert isinstance(error, Boom if rank == victim else BrokenStepError), error
            _next_is_stock(net, mesh, wanted, error)
        for place in HOOKS:  # on all ranks alike: each has its own exception, and nothing else
            with place(net, x):
                assert isinstance(_attempt(net, x), Boom)
            alike(gradients(net, mesh), wanted)


SMALL = {"transport": "tcp", "inbox_bytes": 1 << 10, "prefetch_bytes": 1 << 10}


@pytest.mark.parametrize(
    ("settings", "victims"),
    [({"transport": "shm"}, (1,)), slow({"transport": "tcp"}, (0, 1, 2, 3)), slow(SMALL, (0, 3)), slow({}, (0, 2, 3))],
)
def test_an_exception_in_code_of_the_user(workers: Any, settings: dict[str, Any], victims: tuple[int, ...]) -> None:
    workers(4).run(_hooks, settings, victims, timeout=300)


def _inside(rank: int, world_size: int, transport: str, victim: int, stride: int) -> None:
    """At the first time that a step enters a function of ours: with messages half sent, places reserved, sums begun."""
    mesh = grid(world_size)
    wanted, net = gradients(build(mesh), mesh), build(mesh)
    with serving.applied(net, deadline_s=DEADLINE_S, transport=transport):
        gradients(net, mesh)
        names = [functions_entered("ops", lambda: gradients(net, mesh))]
        dist.broadcast_object_list(names)
        assert len(names[0]) > 30
        for name in names[0][::stride]:
            x, error = data(mesh, 0), None
            try:
                if rank == victim:
                    step = lambda x=x: net(x).square().mean().backward()  # noqa: E731
                    raising_in("ops", name, step, wanted=inside("_inside", but_not=("begin_step",)))
                else:
                    net(x).square().mean().backward()
            except (Injected, BrokenStepError) as caught:
                error = caught
            net.zero_grad()
            _next_is_stock(net, mesh, wanted, error)


@pytest.mark.parametrize(("transport", "victim", "stride"), [slow("shm", 2, 3), slow("tcp", 1, 3)])
def test_an_exception_inside_a_layer(workers: Any, transport: str, victim: int, stride: int) -> None:
    workers(4).run(_inside, transport, victim, stride, timeout=400)


def _llama(rank: int, world_size: int, transport: str) -> None:
    """With what FSDP2 serves over our hooks, and collectives of DTensor's own; `output` is a unit of the root's group."""
    mesh = grid(world_size)

    def built() -> Any:
        model = parallelize(whole(), mesh["tp"])
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    wanted, model = llama_gradients(built(), batch(rank // 2)), built()
    tokens = batch(rank // 2)[:, :-1]
    feed_forward = model.layers[0].feed_forward
    registers = (
        lambda: feed_forward.register_forward_pre_hook(blow),
        lambda: feed_forward.register_forward_hook(blow_in_backward),
    )
    with serving.applied(model, transport=transport, deadline_s=DEADLINE_S):
        for victim, register in itertools.product((1, 2), registers):
            with register() if rank == victim else nullcontext():
                error = _attempt(model, tokens)
            assert isinstance(error, Boom if rank == victim else BrokenStepError), error
            alike(llama_gradients(model, batch(rank // 2)), wanted, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_beside_layers_of_the_framework(workers: Any, transport: str) -> None:
    workers(4).run(_llama, transport, timeout=200)


def _unequal(rank: int, world_size: int, victims: tuple[int, ...]) -> None:
    """A rank begins a call more than its row, which waits for nobody, and nobody raises: the row hears of it, nobody else."""
    mesh = grid(world_size)
    wanted, net = gradients(build(mesh), mesh), build(mesh)
    with serving.applied(net, deadline_s=DEADLINE_S):
        for victim in victims:
            alike(gradients(net, mesh), wanted)
            if rank == victim:
                steps_of(tensor_transport(net)).call()
            if rank // 2 == victim // 2:
                with pytest.raises(BrokenStepError, match="went through with it"):
                    gradients(net, mesh)
            alike(gradients(net, mesh), wanted)
        alike(gradients(net, mesh), wanted)


def tensor_transport(net: nn.Module) -> Transport:
    return vars(net)[TENSOR_ATTACHMENT].transport  # type: ignore[no-any-return]


@pytest.mark.parametrize("victims", [(2,), slow((0, 1, 2, 3))])
def test_ranks_of_a_row_that_begin_unequally_many_calls(workers: Any, victims: tuple[int, ...]) -> None:
    workers(4).run(_unequal, victims, timeout=100)


def _interrupted(rank: int, world_size: int, victims: tuple[int, ...]) -> None:
    """A Ctrl-C in the recovery of tensor parallelism, behind that of data parallelism: peers wait for this rank in both."""
    mesh = grid(world_size)
    wanted, net = gradients(build(mesh), mesh), build(mesh)
    x = data(mesh, 0)
    with serving.applied(net, deadline_s=DEADLINE_S):
        steps = steps_of(tensor_transport(net))
        assert steps is not None
        recover = steps.recover

        def interrupted() -> None:
            steps.recover = recover  # type: ignore[method-assign, union-attr]
            raise KeyboardInterrupt

        for victim in victims:
            alike(gradients(net, mesh), wanted)
            with _hook(net, x) if rank == victim else nullcontext():
                assert isinstance(_attempt(net, x), Boom if rank == victim else BrokenStepError)
            if rank == victim:
                steps.recover = interrupted  # type: ignore[method-assign]
                with pytest.raises(KeyboardInterrupt):
                    net(x)
            else:
                error = _attempt(net, x)
                assert isinstance(error, BrokenStepError) and "KeyboardInterrupt" in str(error), error
            alike(gradients(net, mesh), wanted)


@pytest.mark.parametrize("victims", [(1,), slow((0, 1, 2, 3))])
def test_an_interrupted_recovery_is_made_up_for(workers: Any, victims: tuple[int, ...]) -> None:
    workers(4).run(_interrupted, victims, timeout=100)
