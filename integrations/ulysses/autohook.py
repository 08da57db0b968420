"""What serves Ulysses in an unmodified script: DeepSpeed's two modules are followed up when they are imported and CommFuse is
asked for by then, or as soon as an engine with the block "commfuse" has been built."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def register() -> None:
    """Called once, at the first import of deepspeed in this process."""
    from commfuse_dp.integrations.ulysses.compat import CLASSES

    from commfuse_dp.autoload import when_imported

    for name in CLASSES:
        when_imported(name)(_follow)


def configure(config: Any) -> None:
    """An engine has been built whose configuration says `config` (a CommFuseConfig)."""
    from commfuse_dp.integrations.ulysses.compat import CLASSES
    from commfuse_dp.integrations.ulysses.settings import configure

    configure(config)
    for name in CLASSES:
        module = sys.modules.get(name)
        if module is not None:
            _follow(module)


def _follow(module: ModuleType) -> None:
    from commfuse_dp.integrations.ulysses.settings import current

    if current() is not None:
        from commfuse_dp.integrations.ulysses.serve import install

        install(module)
