"""What every part has: arguments, a time limit of its own, and an outcome that is on disk after each row.

A part that is ended from outside (it hung, or its time was over) leaves what it had found until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Target:
    """One figure that was promised. `at_least`: the value must not be below `limit`, else not above it."""

    name: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Outcome:
    """Of one part. `failures`: what is wrong; the check as a whole fails. `skipped`: what could not be done here, and why."""

    part: str
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(asdict(self), indent=1))
        os.replace(beside, path)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        data = json.loads(path.read_text())
        data["targets"] = [Target(**target) for target in data["targets"]]
        return cls(**data)


class Clock:
    """Seconds left of a limit; `now` is for tests."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self.limit_s = limit_s

    @property
    def spent(self) -> float:
        return self._now() - self._start

    @property
    def left(self) -> float:
        return self.limit_s - self.spent


class Reporter:
    """Collects an outcome while a part runs."""

    def __init__(self, part: str, clock: Clock, path: Path | None = None) -> None:
        self.outcome = Outcome(part)
        self.clock = clock
        self._path = path

    def row(self, **values: Any) -> None:
        self.outcome.rows.append(values)
        self._save()

    def fail(self, text: str) -> None:
        print(f"  FAILED {text}", flush=True)
        self.outcome.failures.append(text)
        self._save()

    def skip(self, text: str) -> None:
        print(f"  skipped {text}", flush=True)
        self.outcome.skipped.append(text)
        self._save()

    def target(self, name: str, value: float, limit: float, *, at_least: bool = True, unit: str = "x") -> None:
        self.outcome.targets.append(Target(name, value, limit, at_least, unit))
        self._save()

    def enough(self, seconds: float, what: str) -> bool:
        """Whether that much time is left; if not, `what` is recorded as skipped."""
        if self.clock.left >= seconds:
            return True
        self.skip(f"{what}: {max(self.clock.left, 0):.0f} s left of {self.clock.limit_s:.0f} s")
        return False

    @contextmanager
    def guarded(self, what: str) -> Any:
        """An exception inside is a failure of the part, not its end."""
        try:
            yield
        except Exception as error:
            lines = traceback.format_exception_only(type(error), error)
            place = traceback.extract_tb(error.__traceback__)[-1]
            traceback.print_exc()  # of a machine that is lent, this is all that comes back
            self.fail(f"{what}: {''.join(lines).strip()} ({Path(place.filename).name}:{place.lineno})")

    def finish(self) -> Outcome:
        self.outcome.seconds = self.clock.spent
        self.outcome.finished = True
        self._save()
        return self.outcome

    def _save(self) -> None:
        if self._path is not None:
            self.outcome.seconds = self.clock.spent
            self.outcome.save(self._path)


@dataclass(frozen=True)
class Options:
    """Arguments of a part.

    small: shapes that a sanitizer or a CPU can do. ahead: what a kernel waits for is enqueued before the kernel, not behind it:
    for tools under which a launch returns when the kernel has ended."""

    device: str = "cuda"
    small: bool = False
    jobs: int = 1
    ahead: bool = False


def run_part(name: str, run: Callable[[Reporter, Options], None], arguments: Sequence[str] | None = None) -> int:
    """The main program of a part; exit status 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu.{name}", description=(run.__doc__ or "").strip())
    parser.add_argument("--out", type=Path, help="file for the outcome (JSON)")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds that this part may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the program's logic, not the kernels")
    parser.add_argument("--small", action="store_true", help="small shapes only")
    parser.add_argument("--ahead", action="store_true", help="slices are under way before a kernel is launched: for sanitizers")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile kernels at the same time")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and (problem := no_gpu()) is not None:
        print(problem, file=sys.stderr)
        return 2
    reporter = Reporter(name, Clock(given.limit_s), given.out)
    with reporter.guarded(name):
        run(reporter, Options(given.device, given.small, given.jobs, given.ahead))
    outcome = reporter.finish()
    print(f"{name}: {len(outcome.rows)} rows, {len(outcome.failures)} failures, {len(outcome.skipped)} skipped", flush=True)
    return 1 if outcome.failures else 0


def no_gpu() -> str | None:
    """Why nothing can be checked here, or None."""
    try:
        import torch
    except ImportError:
        return "gpu-check needs PyTorch, which this interpreter does not have: make gpu-check PYTHON=<python with torch>"
    if not torch.cuda.is_available():
        return (
            f"gpu-check needs a CUDA GPU, and torch {torch.__version__} sees none. What can be proved without one is part of "
            "`make test`."
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return (
            f"gpu-check needs compute capability 8.0 or newer; {torch.cuda.get_device_name()} has "
            f"{capability[0]}.{capability[1]}."
        )
    return None
