"""The block "commfuse" of a DeepSpeed configuration.

    "commfuse": { "enabled": true, "prefetch_bytes": 67108864 }

Its keys are those of CommFuseConfig. A block without "enabled" is enabled. COMMFUSE=1 in the environment does the same as an
empty block, and COMMFUSE_<KEY> variables are the defaults of a block's settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, get_args

from commfuse_dp.config import CommFuseConfig, asked_for
from commfuse_dp.errors import ConfigError

KEY = "commfuse"


def check_block(settings: Mapping[str, Any]) -> None:
    """Refuse a block that is wrong or in the wrong place, before DeepSpeed reads the configuration. Raises ConfigError."""
    for place in _misplaced(settings, ()):
        raise ConfigError(
            f'the block "{KEY}" stands inside {place!r} of the DeepSpeed configuration; it belongs to the top level, beside '
            '"zero_optimization"'
        )
    if KEY in settings:
        _parse(settings[KEY])


def config_of(settings: Mapping[str, Any]) -> CommFuseConfig | None:
    """What a DeepSpeed configuration (or the environment) asks for; None: nothing. Raises ConfigError."""
    if KEY in settings:
        config = _parse(settings[KEY])
        if config.enabled and not _launched():
            raise ConfigError(
                f'"{KEY}" is enabled in the DeepSpeed configuration, but this process was not started by a distributed '
                "launcher (RANK and WORLD_SIZE are not set), so it would train alone. Start it with deepspeed, torchrun, "
                'accelerate launch or mpiexec -n N python -m commfuse_dp.run, or set "enabled": false.'
            )
        return config
    return CommFuseConfig.from_environment() if asked_for() else None


def _launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _parse(block: Any) -> CommFuseConfig:
    if isinstance(block, bool):
        block = {"enabled": block}
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'"{KEY}" in the DeepSpeed configuration is {block!r}; an object of settings is wanted: {{"enabled": true}}'
        )
    automatic = [key for key, value in block.items() if value == "auto" and "auto" not in _choices(key)]
    if automatic:
        raise ConfigError(
            f'"{KEY}": {{"{automatic[0]}": "auto"}} in the DeepSpeed configuration: nobody fills this in. Leave the key out to '
            "get its default."
        )
    try:
        return CommFuseConfig.from_environment(**block)
    except ConfigError as error:
        raise ConfigError(f'block "{KEY}" of the DeepSpeed configuration: {error}') from None


def _choices(key: str) -> tuple[object, ...]:
    """Of a setting that is one of several words."""
    field = CommFuseConfig.model_fields.get(key)
    return get_args(field.annotation) if field is not None else ()


def _misplaced(settings: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    found = []
    for key, value in settings.items():
        if key == KEY and path:
            found.append(".".join(path))
        elif isinstance(value, Mapping) and not (key == KEY and not path):
            found += _misplaced(value, (*path, str(key)))
    return found
