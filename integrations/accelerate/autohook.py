"""What makes `accelerate launch --commfuse train.py` work on an unmodified script: hooks set at the first import of accelerate.

In the launcher (commands.launch is imported) the flags are added; in a worker with COMMFUSE=1 the places where Accelerate wraps
models are followed up (prepare.py). Nothing of accelerate or torch is imported from here.

[Note: Which modules to wait for]
This may run from inside accelerate's own first import of torch, when `accelerate` and `accelerate.accelerator` are already
being imported: a hook on these never runs. `utils.fsdp_utils` is imported later. The class Accelerator is patched when a
module has come that accelerate/__init__ imports after it; several are watched, as their order is accelerate's affair.
"""

from __future__ import annotations

import sys
from types import ModuleType

_AFTER_THE_CLASS = ("accelerate.accelerator", "accelerate.inference", "accelerate.launchers", "accelerate.local_sgd")


def register() -> None:
    """Called once, at the first import of accelerate in this process."""
    from commfuse_dp.autoload import when_imported

    when_imported("accelerate.commands.launch")(_hook_launcher)
    when_imported("accelerate.utils.fsdp_utils")(_hook_fsdp2)
    for name in _AFTER_THE_CLASS:
        when_imported(name)(_hook_accelerator)


def _hook_launcher(module: ModuleType) -> None:
    from commfuse_dp.integrations.accelerate.flags import add_to

    add_to(module)


def _hook_fsdp2(module: ModuleType) -> None:
    if _asked_for():
        from commfuse_dp.integrations.accelerate.prepare import follow_fsdp2

        follow_fsdp2(module)


def _hook_accelerator(module: ModuleType) -> None:
    home = sys.modules.get("accelerate.accelerator")
    if hasattr(home, "Accelerator") and _asked_for():
        from commfuse_dp.integrations.accelerate.prepare import follow_accelerator

        follow_accelerator(home)


def _asked_for() -> bool:
    from commfuse_dp.config import asked_for

    return asked_for()
