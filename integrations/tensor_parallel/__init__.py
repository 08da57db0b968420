"""PyTorch's tensor parallelism with sequence parallelism (`parallelize_module`), alone or below `fully_shard`, and that of
transformers: see `apply`; and styles that need no call of it: see styles.py.

The styles are imported where plans are made, so the names come when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.tensor_parallel.select import parallelized
    from commfuse_dp.integrations.tensor_parallel.serving import applied, apply, remove
    from commfuse_dp.integrations.tensor_parallel.styles import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

_STYLES = ("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel")
_HOME = {"applied": "serving", "apply": "serving", "remove": "serving", "parallelized": "select"}
_HOME.update(dict.fromkeys(_STYLES, "styles"))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "RowwiseParallel",
    "SequenceParallel",
    "applied",
    "apply",
    "parallelized",
    "remove",
]
