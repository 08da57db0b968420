"""PyTorch's tensor parallelism with sequence parallelism (`parallelize_module`), alone or below `fully_shard`: see `apply`.

Imported with torch.distributed.tensor.parallel (autohook), so the names come when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.tensor_parallel.select import parallelized
    from commfuse_dp.integrations.tensor_parallel.serving import applied, apply, remove

_HOME = {"applied": "serving", "apply": "serving", "remove": "serving", "parallelized": "select"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = ["applied", "apply", "parallelized", "remove"]
