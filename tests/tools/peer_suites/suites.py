"""Which files of a checkout are run, and with which environment."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    name: str
    folder: str
    """Where pytest is started, below the checkout."""
    patterns: tuple[str, ...]
    environment: dict[str, str]
    limit: str
    """The variable that holds the suite's own time limit of one test, in seconds."""
    devices: tuple[int, ...]
    """As many devices as the suite shall see; tests that are skipped for their number are tried with the next one."""
    before: str = ""
    """Python that runs once before all: what tests would else do in the middle, against their time limit."""

    def files(self, checkout: Path) -> list[Path]:
        found = {path for pattern in self.patterns for path in (checkout / self.folder).glob(pattern)}
        return sorted(found, key=lambda path: path.name)


FSDP2 = Suite(
    "fsdp2",
    "test/distributed/_composable/fsdp",
    ("test_*.py",),
    {},
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT",
    (2, 4, 8),
)

# Their folders have moved between versions, so files are found by name.
DEEPSPEED = Suite(
    "deepspeed",
    "tests",
    (
        "unit/**/zero/test_*.py",
        "unit/**/test_bf16.py",
        "unit/checkpoint/test_zero_optimizer.py",
        "unit/checkpoint/test_other_optimizer.py",
        "unit/checkpoint/test_latest_checkpoint.py",
        "unit/checkpoint/test_lr_scheduler.py",
        "unit/checkpoint/test_shared_weights.py",
        "unit/checkpoint/test_tag_validation.py",
        "unit/checkpoint/test_universal_checkpoint.py",
    ),
    {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "DS_DISABLE_REUSE_DIST_ENV": "1"},
    "DS_UNITTEST_TIMEOUT",
    (2, 4),
    # The configurations' Adams are C++ ops that are compiled when they are first used, a minute each, and under a lock.
    "import commfuse_peers_ops",
)

SUITES = {suite.name: suite for suite in (FSDP2, DEEPSPEED)}
