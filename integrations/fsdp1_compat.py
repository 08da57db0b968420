"""The private names of FSDP1 (FullyShardedDataParallel) that its hook uses, checked in one place. Tried with torch 2.13.

Without them the hook works all the same, but every reduction blocks backward.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

_STATE_FIELDS = ("_comm_hook", "_comm_hook_state", "_handle", "_is_root", "_exec_order_data")
_HANDLE_FIELDS = (
    "flat_param",
    "_offload_params",
    "_keep_low_precision_grads",
    "uses_sharded_strategy",
)


def probe(model: FullyShardedDataParallel) -> str | None:
    """None if this torch's FSDP1 has all that an overlapped reduction needs, else what is missing."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        missing = [name for name in _STATE_FIELDS if not hasattr(module, name)]
        handle = getattr(module, "_handle", None)
        if handle is not None:
            missing += [name for name in _HANDLE_FIELDS if not hasattr(handle, name)]
        if missing:
            return f"torch {torch.__version__}: FSDP1 has no {', '.join(sorted(set(missing)))}"
    return None


def registered_hook(model: FullyShardedDataParallel) -> Any:
    return next(
        (hook for module in FullyShardedDataParallel.fsdp_modules(model) if (hook := getattr(module, "_comm_hook", None))), None
    )


def forward_has_run(model: FullyShardedDataParallel) -> bool:
    order = getattr(model, "_exec_order_data", None)
    if order is None or getattr(model, "_is_root", None) is None:  # not even initialised, which the first forward does
        return False
    seen = getattr(order, "handles_pre_forward_order", ()) or getattr(order, "handles_post_forward_order", ())
    return bool(seen) or not getattr(order, "is_first_iter", True)


def enclosing(model: FullyShardedDataParallel) -> FullyShardedDataParallel | None:
    """An FSDP1 module that this one is a part of, or None.

    A module does not know its parents, and asking FSDP1 (`check_is_root`) would initialise the part as a root for good. So
    all objects are looked through, once per state. (`type(...)`, not isinstance: the latter would wake lazy proxies.)
    """
    for item in gc.get_objects():
        if (
            issubclass(type(item), FullyShardedDataParallel)
            and item is not model
            and any(part is model for part in item.modules())
        ):
            return item
    return None


def original_parameters(model: FullyShardedDataParallel) -> list[tuple[str, int, nn.Parameter | None]]:
    """(name, elements, flat parameter) of all parameters of the model before it was sharded."""
    found: list[tuple[str, int, nn.Parameter | None]] = []
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            flat = handle.flat_param
            parts = zip(getattr(flat, "_fqns", ()), getattr(flat, "_shapes", ()), strict=False)
            found += [(_clean(f"{name}.{part}" if name else part), math.prod(shape), flat) for part, shape in parts]
    return found or [(_clean(name), param.numel(), None) for name, param in model.named_parameters()]


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def may_finish_later(module: FullyShardedDataParallel) -> bool:
    """Whether nobody reads the reduced shard before the end of backward: FSDP1 only stores it."""
    handle: Any = module._handle
    return (
        not hasattr(handle.flat_param, "_saved_grad_shard")  # else it is added to that at once
        and not handle._offload_params
        and not getattr(handle, "_has_optim_in_backward", True)  # there since the first forward
        and not handle._keep_low_precision_grads
    )


def flat_dtype(module: FullyShardedDataParallel) -> torch.dtype:
    """Of its flat parameter."""
    handle: Any = module._handle
    dtype: torch.dtype = handle.flat_param.dtype
    return dtype


def set_hook_state(module: FullyShardedDataParallel, state: object) -> None:
    module._comm_hook_state = state


def unregister(model: FullyShardedDataParallel, hook: Any) -> None:
    """Take a hook off all modules that have it: FSDP1 has no name for that."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if getattr(module, "_comm_hook", None) is hook:
            module._comm_hook = module._comm_hook_state = None
