"""apply(), remove() and claim() that fail, at any stage, on all ranks or on one: the model is stock everywhere, and works."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commfuse_dp.integrations.attach.attachment import attachment_of
from commfuse_dp.integrations.attach.transaction import Transaction
from commfuse_dp.integrations.fsdp2 import compat
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import commfuse_dp
from commfuse_dp import CommFuseError
from tests.parity.fsdp2 import pair
from tests.support.cells import slow
from tests.support.leftovers import assert_nothing_left, leftovers


class Injected(Exception):
    pass


def state_of(model: nn.Module) -> list[Any]:
    """All that CommFuse changes in a model and in FSDP2's own objects."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [name, type(module), sorted(vars(module)), {key: id(p) for key, p in module._parameters.items()}]
        found += [*module._forward_hooks, len(module._forward_pre_hooks), len(module._load_state_dict_post_hooks)]
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found.append(list(state._states_to_forward_prefetch))
            for group in compat.param_groups(module):
                found += [sorted(vars(group)), list(map(id, group.fsdp_params))]
                found += [type(group._all_gather_comm), type(group._reduce_scatter_comm)]
    return found


@contextlib.contextmanager
def failing(owner: Any, name: str, call: int, *, after: bool) -> Iterator[list[int]]:
    """The `call`-th call of `owner.name` raises, before or after its work. Yields the number of calls, as a list of one."""
    original = getattr(owner, name)
    calls = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        now = calls[0] == call
        if now and not after:
            raise Injected(f"{name}, call {call}")
        result = original(*args, **kwargs)
        if now:
            raise Injected(f"{name}, call {call}")
        return result

    setattr(owner, name, counted)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


def modules() -> dict[str, Any]:
    names = ("attach.attachment", "fsdp2.apply", "fsdp2.compat", "fsdp2.select", "fsdp2.claim")
    return {name: importlib.import_module(f"commfuse_dp.integrations.{name}") for name in names}


def stages() -> list[tuple[Any, str]]:
    """Everything that an installation calls, in the order of the calls; each of its calls is made to fail once."""
    at = modules()
    attachment, apply, compat = at["attach.attachment"], at["fsdp2.apply"], at["fsdp2.compat"]
    return [
        (apply, "_prepare"),
        (at["fsdp2.select"], "_select_from_groups"),
        (apply, "Unit"),
        (attachment, "open_for"),
        (attachment, "Engine"),
        (attachment, "UnitOperand"),
        (attachment, "serve"),
        (compat, "detach_param"),
        (compat, "collectives"),
        (apply, "_hook_rest"),
        (apply, "hook_root"),
        (apply, "_hook_reset"),
        (apply, "_minimum_bytes"),
        (attachment, "Report"),
        (Transaction, "on_undo"),
        (Transaction, "do"),
        (Transaction, "acquire"),
        (Transaction, "set"),
        (Transaction, "set_class"),
    ]


def one_failure(
    rank: int, net: nn.Module, owner: Any, name: str, call: int, *, after: bool, everywhere: bool, **settings: Any
) -> bool:
    """Whether there was such a call to fail."""
    before = state_of(net)
    there = everywhere or rank == dist.get_world_size() - 1
    with failing(owner, name, call if there else -1, after=after) as calls:
        try:
            commfuse_dp.apply(net, pair.config(**settings))
        except Injected:
            assert there
        except CommFuseError as error:
            assert not there
            assert f"rank {dist.get_world_size() - 1} " in str(error) and f"{name}, call {call}" in str(error), str(error)
        else:
            assert calls[0] < call or not there
            commfuse_dp.remove(net)
            assert state_of(net) == before, f"remove() after {name}"
            return False
    assert state_of(net) == before, f"{name}, call {call}, {after=}, {everywhere=}"
    return True


def works(rank: int, world_size: int, net: nn.Module, stock: nn.Module, step: int) -> None:
    """As stock FSDP2; and a second apply() succeeds, trains and is taken back."""
    with pytest.raises(commfuse_dp.ConfigError, match="has no CommFuse"):
        commfuse_dp.remove(net)
    pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)
    before = state_of(net)
    with pair.applied(net):
        pair.assert_gradients_of_one_step(net, stock, rank, world_size, step + 1)
    assert state_of(net) == before
    pair.assert_gradients_of_one_step(net, stock, rank, world_size, step)


def every_stage(rank: int, world_size: int, everywhere: bool, transport: str, stride: int) -> int:
    net, stock = pair.build(1), pair.build(1)
    pair.assert_gradients_of_one_step(net, stock, rank, world_size)  # FSDP2 has initialised what it does late
    works(rank, world_size, net, stock, 1)
    before, failures = leftovers(), 0
    for number, (owner, name) in enumerate(stages()):
        # Between the return of open_for and the note that it must be closed nothing can fail.
        moments = (False,) if name in ("open_for", "acquire") else (False, True)
        call, failed = 1, True
        while failed:
            for after in moments:
                failed = one_failure(rank, net, owner, name, call, after=after, everywhere=everywhere, transport=transport)
                failures += failed
            call += stride
        assert call > 1 + stride, f"{name} was never called: no stage of apply() any more"
        if number % (4 * stride) == 0:
            works(rank, world_size, net, stock, number)
    works(rank, world_size, net, stock, 0)
    assert_nothing_left(before)
    return failures


@pytest.mark.parametrize(("everywhere", "transport"), [slow(True, "shm"), (False, "tcp")])
@pytest.mark.parametrize("stride", [slow(1), slow(4), 9])
def test_apply_that_fails_at_any_stage(workers, everywhere, transport, stride):
    """In make test at every stage, at every ninth of its calls."""
    first, second = workers(2).run(every_stage, everywhere, transport, stride, timeout=200)
    assert first == second > 40


def undo_that_fails(rank: int, world_size: int) -> None:
    net, stock = pair.build(1), pair.build(1)
    pair.assert_gradients_of_one_step(net, stock, rank, world_size)
    net.zero_grad()
    before = state_of(net)
    commfuse_dp.apply(net, pair.config())
    transaction = attachment_of(net).transaction
    transaction.on_undo(lambda: (_ for _ in ()).throw(Injected("an undo")))
    with pytest.raises(Injected, match="an undo"):
        commfuse_dp.remove(net)
    assert state_of(net) == before
    works(rank, world_size, net, stock, 1)


def test_an_undo_that_fails_does_not_stop_the_others(workers):
    workers(2).run(undo_that_fails)


def claims(rank: int, world_size: int) -> int:
    at = modules()
    claim = at["fsdp2.claim"]
    stages = [(claim, name) for name in ("_shard", "ClaimedLayer", "plain", "serve")]
    failures = 0
    torch.manual_seed(0)
    net = pair.Net(1)
    before = state_of(net)
    for owner, name in [*stages, *((Transaction, name) for name in ("on_undo", "do", "set", "set_class"))]:
        for after in (False, True):
            call = 1
            while True:
                with failing(owner, name, call, after=after) as calls:
                    try:
                        claimed = commfuse_dp.claim(net, pair.config())
                    except Injected:
                        failures += 1
                    else:
                        break
                assert state_of(net) == before, f"{name}, call {call}, {after=}"
                call += 1
            assert calls[0] < call and call > 1 and claimed.layers
            torch.manual_seed(0)
            net = pair.Net(1)
            before = state_of(net)
    assert not any(isinstance(param, DTensor) for param in net.parameters())
    still, stock = pair.shard(net), pair.build(1)
    pair.assert_gradients_of_one_step(still, stock, rank, world_size)
    return failures


def test_claim_that_fails_at_any_stage(workers):
    assert min(workers(2).run(claims)) > 40
