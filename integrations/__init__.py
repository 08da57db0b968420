"""Thin layers between CommFuse and the frameworks people train with; the only place that knows their private names.

Communication hooks, imported when first used:

    model.register_comm_hook(DDPState(model), ddp_hook)        # DistributedDataParallel
    model.register_comm_hook(FSDP1State(model), fsdp1_hook)    # FullyShardedDataParallel
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.ddp import DDPState, ddp_hook, register_ddp
    from commfuse_dp.integrations.fsdp1 import FSDP1State, fsdp1_hook, register_fsdp1

_HOME = {
    "DDPState": "ddp",
    "ddp_hook": "ddp",
    "register_ddp": "ddp",
    "FSDP1State": "fsdp1",
    "fsdp1_hook": "fsdp1",
    "register_fsdp1": "fsdp1",
}
_FRAMEWORKS = ("accelerate", "ddp", "deepspeed", "fsdp1", "fsdp2", "lightning", "tensor_parallel")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _FRAMEWORKS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = ["DDPState", "FSDP1State", "ddp_hook", "fsdp1_hook", "register_ddp", "register_fsdp1"]
