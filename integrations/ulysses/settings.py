"""What this process has been asked for: the block of the last DeepSpeed engine that has one, else the environment."""

from __future__ import annotations

from commfuse_dp.config import CommFuseConfig, asked_for

_of_an_engine: CommFuseConfig | None = None
_of_the_environment: CommFuseConfig | None = None


def configure(config: CommFuseConfig | None) -> None:
    """From now on attention follows `config`; None: the environment again."""
    global _of_an_engine
    _of_an_engine = config


def current() -> CommFuseConfig | None:
    """None: attention is left to DeepSpeed."""
    global _of_the_environment
    if _of_an_engine is not None:
        return _of_an_engine if _of_an_engine.enabled else None
    if not asked_for():
        return None
    if _of_the_environment is None:
        _of_the_environment = CommFuseConfig.from_environment()
    return _of_the_environment
