"""A backward that is broken off between the microbatches of an accumulation: no rank goes on with what it has left."""

from __future__ import annotations

import contextlib

import pytest
from commfuse_dp.integrations.fsdp2 import compat

from commfuse_dp.errors import CommFuseError
from tests.parity.fsdp2.models import token_loss, wide_bytes
from tests.parity.fsdp2.twin import Twin, settings
from tests.support.cells import slow
from tests.support.raising import Boom, blow_in_backward


def broken(twin: Twin, raises: bool) -> None:
    handle = twin.fused.layers[1].up.register_forward_hook(blow_in_backward) if raises else None
    with pytest.raises((Boom, CommFuseError)) if raises else contextlib.suppress(CommFuseError):
        token_loss(twin.fused, twin.batch()).backward()
    if handle is not None:
        handle.remove()


def window(twin: Twin, sync: bool) -> None:
    for last in (False, False, True):
        twin.each(lambda model, last=last: model.set_requires_gradient_sync(sync or last))
        twin.backward()
    twin.check_gradients()
    twin.update()


def accumulated(rank: int, world_size: int, sync: bool, ranks: list[int], exclude: tuple[str, ...]) -> None:
    with Twin(wide_bytes, config=settings(exclude=exclude)) as twin:
        twin.step()
        for earlier in (2, 0) if ranks == ALL else (2,):  # microbatches of the window that went well
            twin.each(lambda model: model.set_requires_gradient_sync(sync))
            for _ in range(earlier):
                twin.backward()
            broken(twin, rank in ranks)
            twin.stock.zero_grad()
            if earlier:
                for _ in range(2):
                    with pytest.raises(CommFuseError, match=r"zero_grad|went through"):
                        twin.fused(twin.batch()[0])
            if sync:
                twin.optimizers[1].zero_grad()
            else:
                twin.fused.zero_grad()
            for module in twin.stock.modules():
                for group in compat.param_groups(module):
                    compat.forget_gradients(group)
            window(twin, sync)


ALL, ONE = [0, 1], [1]


@pytest.mark.parametrize(
    ("sync", "ranks", "exclude"),
    [
        (False, ALL, ()),
        (True, ALL, ()),
        slow(False, ALL, ("embedding",)),
        slow(True, ALL, ("embedding",)),
        slow(False, ONE, ()),
        slow(True, ONE, ()),
    ],
)
def test_no_rank_goes_on_before_gradients_are_cleared(workers, sync, ranks, exclude):
    workers(2).run(accumulated, sync, ranks, exclude)
