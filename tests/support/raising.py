"""An exception in a hook, or at any place of a piece of code: for statements about what is left behind when it fails there."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import nn


class Boom(Exception):
    pass


def blow(*_: Any) -> None:
    """A hook."""
    raise Boom("no more")


def blow_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    """A forward hook: the backward through the module's output raises Boom."""
    if out.requires_grad:
        out.register_hook(blow)


def ranks_said(text: str) -> set[int]:
    """Which ranks an error speaks of, one by one or as a list."""
    lists = " ".join(re.findall(r"\branks \[([\d, ]+)\]", text))
    return {int(number) for number in [*re.findall(r"\b(?:[Rr]ank|owner) (\d+)", text), *re.findall(r"\d+", lists)]}


class Injected(Exception):
    pass


def functions_entered(folder: str, action: Callable[[], Any]) -> list[str]:
    """Names of all functions of files in `folder` that `action` enters in this thread, in the order in which it first does."""
    seen: dict[str, None] = {}
    _watched(folder, lambda name, frame: seen.setdefault(name), action)
    return list(seen)


def raising_in(
    folder: str, name: str, action: Callable[[], Any], *, wanted: Callable[[FrameType], bool] = lambda frame: True
) -> bool:
    """Run `action`; the first time that it enters the function `name`, and `wanted(frame)`, that one raises Injected instead.

    Returns False if `action` returned without that; whatever it raises is not caught."""
    done = []

    def enter(found: str, frame: FrameType) -> None:
        if not done and found == name and wanted(frame):
            done.append(True)
            raise Injected(f"in {name}")  # ends the watching, too

    _watched(folder, enter, action)
    return bool(done)


def _watched(folder: str, enter: Callable[[str, FrameType], Any], action: Callable[[], Any]) -> None:
    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and f"/{folder}/" in code.co_filename and not code.co_name.startswith("<"):
            file = code.co_filename.rpartition(f"/{folder}/")[2]
            enter(f"{file}:{code.co_firstlineno} {code.co_name}", frame)

    collects = gc.isenabled()
    gc.disable()  # finalizers of what was dropped before are no part of the action, and what they raise comes to nobody
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def inside(name: str, *, but_not: Collection[str] = ()) -> Callable[[FrameType], bool]:
    """For `raising_in`: only below a call of a function of this name, and not below those."""

    def wanted(frame: FrameType) -> bool:
        above: FrameType | None = frame
        found = False
        while above is not None:
            if above.f_code.co_name in but_not:
                return False
            found |= above.f_code.co_name == name
            above = above.f_back
        return found

    return wanted
