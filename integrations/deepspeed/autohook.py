"""What makes the block work in an unmodified script: every DeepSpeedEngine, once built, asks whether it is meant."""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from types import ModuleType
from typing import Any

log = logging.getLogger("commfuse_dp")

_stock_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # built before any engine was served


def register() -> None:
    """Called once, at the first import of deepspeed in this process."""
    from commfuse_dp.integrations.ulysses import autohook as ulysses

    from commfuse_dp.autoload import when_imported

    when_imported("deepspeed.runtime.config")(_check_configurations)
    when_imported("deepspeed.runtime.engine")(_hook_engines)
    ulysses.register()


def _check_configurations(module: ModuleType) -> None:
    import wrapt

    def check(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from commfuse_dp.integrations.deepspeed.block import check_block

        settings = _settings(args[0] if args else kwargs.get("config"))
        if settings is not None:
            check_block(settings)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "DeepSpeedConfig.__init__", check)


def _hook_engines(module: ModuleType) -> None:
    import wrapt
    from commfuse_dp.integrations.ulysses import autohook as ulysses

    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from commfuse_dp.integrations.deepspeed.block import config_of

        known = kwargs.get("config_class")
        settings = getattr(known, "_param_dict", None)
        if settings is None:
            settings = _settings(kwargs.get("config"))
        config = config_of(settings if settings is not None else {})  # before the engine is built: errors come at once
        wrapped(*args, **kwargs)
        if config is not None:  # also if it says enabled=false: a rank that says otherwise would wait for this one for ever
            switch_on(instance, config)
            ulysses.configure(config)
        if config is None or not config.enabled:
            _leave_alone(instance)

    wrapt.wrap_function_wrapper(module, "DeepSpeedEngine.__init__", build)


def switch_on(engine: Any, config: Any) -> None:
    import torch.distributed as dist
    from commfuse_dp.integrations.attach.announce import announce
    from commfuse_dp.integrations.deepspeed.apply import apply_to_engine
    from commfuse_dp.integrations.deepspeed.backend import leave_alone

    for stock in list(_stock_engines):
        leave_alone(stock)
    _stock_engines.clear()
    report = apply_to_engine(engine, config)
    if config.enabled and dist.get_rank() == 0:
        announce(str(report))


def _leave_alone(engine: Any) -> None:
    module = sys.modules.get("commfuse_dp.integrations.deepspeed.backend")
    if module is None:  # no engine of this process is served so far: should one be later, this one tells itself apart then
        _stock_engines.add(engine)
    else:
        module.leave_alone(engine)


def _settings(config: Any) -> dict[str, Any] | None:
    """The raw configuration; None if DeepSpeed has to find out what it is."""
    if isinstance(config, dict):
        return config
    if isinstance(config, (str, os.PathLike)) and os.path.isfile(config):
        try:
            with open(config, encoding="utf-8") as file:
                content = json.load(file)
        except ValueError:
            return None  # DeepSpeed also reads laxer forms of JSON; the engine's hook sees what it made of them
        return content if isinstance(content, dict) else None
    return None
