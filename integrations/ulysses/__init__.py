"""DeepSpeed's Ulysses (`DistributedAttention`, `UlyssesSPAttentionHF`, accelerate's sp_size) served by `ops.ulysses_attention`.

Switched on by the block "commfuse" of a DeepSpeed configuration, or by COMMFUSE=1, in an unmodified script: see autohook.py.
`print(report())` says which attention is served, and why another stays with DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.ulysses.local import LocalAttention
    from commfuse_dp.integrations.ulysses.report import report

_HOME = {"LocalAttention": "local", "report": "report"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found  # instead of the module of that name, which the import has put there
    return found


__all__ = ["LocalAttention", "report"]
