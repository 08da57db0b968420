"""Every name of Accelerate that it does not promise to keep, checked in one place. Tried with accelerate 1.15.

What is missing is said once, and the part that needs it is left out; with fuse='always' it is an error.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MARK = "_commfuse"  # on functions that were replaced


def replace(holder: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """holder.name = make(holder.name), once. False if there is no such function."""
    original = getattr(holder, name, None)
    if not callable(original):
        return False
    if getattr(original, _MARK, False):
        return True
    new = functools.wraps(original)(make(original))
    setattr(new, _MARK, True)
    setattr(holder, name, new)
    return True


def replace_in_modules(module: ModuleType, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """The same, and in every module of accelerate that has imported the function by name already."""
    original = getattr(module, name, None)
    if not replace(module, name, make):
        return False
    for other in [m for key, m in list(sys.modules.items()) if key.partition(".")[0] == "accelerate"]:
        if other is not None and vars(other).get(name) is original:
            setattr(other, name, getattr(module, name))
    return True


def version() -> str:
    return str(getattr(sys.modules.get("accelerate"), "__version__", "?"))


def kind(accelerator: Any) -> str:
    """Name of the DistributedType: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, ..."""
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def processes_started() -> int:
    """How many processes the launcher says it has started (1 if none says so)."""
    counts = [1]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        text = os.environ.get(name, "")
        counts += [int(text)] if text.isdigit() else []
    return max(counts)


def is_first_process() -> bool:
    """By the launcher's word; also where Accelerate takes every process for the first."""
    return os.environ.get("RANK", "0") == "0"


def uncompiled(model: Any) -> Any:
    """The module inside torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)
