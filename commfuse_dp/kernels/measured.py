"""What was measured, kept on disk: milliseconds per product, backend and device, so that a shape is measured once per machine.

A JSON file in $XDG_CACHE_HOME/commfuse_dp (default ~/.cache/commfuse_dp). Everything in it can be measured again, so whatever
is wrong with it (truncated, of another version, too large, not writable) costs a warning and nothing else.

[Note: Several processes, one file]
Ranks write it at the same time. Each write reads what is there, adds its own and replaces the file in one step (rename), so a
reader sees a whole file; of two writes at the same instant one may be lost, and is measured again some day.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commfuse_dp.kernels.tiles import TileConfig, config_from

VERSION = 2
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 4096


@dataclass(frozen=True)
class Trial:
    """One product, measured. Milliseconds; what could not be run is in `failed`, with its first line of error."""

    blas_ms: float
    triton_ms: dict[TileConfig, float]
    failed: dict[TileConfig, str] = field(default_factory=dict)

    @property
    def best(self) -> TileConfig | None:
        return min(self.triton_ms, key=self.triton_ms.__getitem__, default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "blas_ms": self.blas_ms,
            "triton": [[config.as_dict(), ms] for config, ms in self.triton_ms.items()],
            "failed": [[config.as_dict(), why] for config, why in self.failed.items()],
        }


def _milliseconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"not a time: {value!r}")
    return float(value)


def trial_from(values: Any) -> Trial:
    """The inverse of `as_json`. Raises on anything else."""
    return Trial(
        _milliseconds(values["blas_ms"]),
        {config_from(config): _milliseconds(ms) for config, ms in values["triton"]},
        {config_from(config): str(why) for config, why in values["failed"]},
    )


def default_path() -> Path:
    """Where the cache of this user is."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "commfuse_dp" / "gemms.json"


class MeasuredFile:
    """Trials by key. path: None keeps them in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._trials: dict[str, Trial] | None = None  # None: not read yet

    def get(self, key: str) -> Trial | None:
        if self._trials is None:
            self._trials = self._read()
        return self._trials.get(key)

    def put(self, key: str, trial: Trial) -> None:
        """Keep it, and write it out if that is possible."""
        trials = self._read() | (self._trials or {})
        trials.pop(key, None)
        trials[key] = trial
        self._trials = dict(list(trials.items())[-_MOST_ENTRIES:])
        self._write()

    def _warn(self, problem: str) -> None:
        warnings.warn(
            f"commfuse_dp: the cache of measured GEMMs {self.path} {problem}; shapes are measured anew (delete the file to "
            "get rid of this message)",
            stacklevel=2,
        )

    def _read(self) -> dict[str, Trial]:
        if self.path is None:
            return {}
        try:
            size = self.path.stat().st_size
            if size > _MOST_BYTES:
                self._warn(f"has {size} bytes, more than {_MOST_BYTES}")
                return {}
            content = json.loads(self.path.read_text())
            if content["version"] != VERSION:  # an older or a newer release wrote it: nothing is wrong
                return {}
            return {str(key): trial_from(values) for key, values in content["trials"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f"cannot be read ({type(error).__name__}: {error})")
            return {}

    def _write(self) -> None:
        if self.path is None or self._trials is None:
            return
        content = {"version": VERSION, "trials": {key: trial.as_json() for key, trial in self._trials.items()}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(content, file, indent=1)
                os.replace(name, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self._warn(f"cannot be written ({error})")
