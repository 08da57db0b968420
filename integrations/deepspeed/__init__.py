"""DeepSpeed ZeRO-1, 2 and 3, switched on by the block "commfuse" of its JSON configuration: see `block` and `apply`.

Imported with every `import deepspeed` (autohook), so the names come when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commfuse_dp.integrations.attach.attachment import engine_of
    from commfuse_dp.integrations.deepspeed.apply import apply_to_engine, remove, report_of


def __getattr__(name: str) -> Any:
    if name in __all__:
        from commfuse_dp.integrations.attach import attachment
        from commfuse_dp.integrations.deepspeed import apply

        return getattr(attachment if name == "engine_of" else apply, name)
    raise AttributeError(f"module 'commfuse_dp.integrations.deepspeed' has no attribute {name!r}")


__all__ = ["apply_to_engine", "engine_of", "remove", "report_of"]
