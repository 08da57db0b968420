"""Attaching that fails at any stage, on one rank or on all: every function of ours that it enters is a stage."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from commfuse_dp.errors import CommFuseError
from tests.support.raising import Injected, functions_entered, inside, raising_in

FOLDER = "integrations"
AGREEMENT = ("attach/ranks.py", "attach/fingerprint.py")
"""What the agreement itself does cannot be agreed on."""

Where = Callable[[FrameType], bool]
TOGETHER = inside("together", but_not=("open", "_open", "_open_gather", "connect"))
"""In what ranks do together, but for the opening of the transport, which ends by its deadline."""


def anywhere(frame: FrameType) -> bool:
    return True


def stages_of(attach: Callable[[], Any], detach: Callable[[], Any]) -> list[str]:
    """Collective: functions that every `attach()` enters on all ranks, in order. (The first enters what is found out once in a
    process; what a garbage collection calls is entered now and then.)"""
    found = []
    for _ in range(3):
        found.append(functions_entered(FOLDER, attach))
        detach()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found[1:])
    return [name for name in everyone[0][0] if all(name in names for of_one in everyone for names in of_one)]


def agreed_on(stages: list[str]) -> list[str]:
    """Those whose failure on one rank all others hear of."""
    remembers = " on_undo"  # a change that may have been made already
    return [name for name in stages if not name.startswith(AGREEMENT) and not name.endswith(remembers)]


def fails(name: str, culprit: int | None, attach: Callable[[], Any], *, wanted: Where = anywhere) -> bool:
    """Collective: whether `attach()` failed everywhere when `name` raised on rank `culprit` (None: on all ranks).

    The others must be told who and where."""
    mine, entered, failed = culprit is None or culprit == dist.get_rank(), False, True
    try:
        if mine:
            entered = raising_in(FOLDER, name, attach, wanted=wanted)
        else:
            attach()
    except Injected:
        assert mine
    except CommFuseError as error:
        assert name in str(error) and (culprit is None or (not mine and f"rank {culprit}" in str(error))), error
    else:
        assert not entered, f"an exception in {name} did not come out"
        failed = False
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failed)
    assert len(set(everyone)) == 1, f"an exception in {name} came out on some ranks only: {everyone}"
    return failed
