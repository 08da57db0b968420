"""For every test: pools of workers, who runs which file, seeds, and that no test leaves anything of the process changed."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support.workers import Workers

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, which ignores Ctrl-C there. Programs started from here would inherit that, and
    # the tests that interrupt them would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What broken transports of tests say when the process ends, with nobody left to capture it, is no news.
logging.getLogger("commfuse_dp").addHandler(logging.NullHandler())

# The same examples in every run, whatever ran before and however busy the machine is; --hypothesis-profile=explore looks for
# new ones. Either prints how to see a failure again.
TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "database": None, "print_blob": True}
hypothesis.settings.register_profile("suite", derandomize=True, **TIMELESS)
hypothesis.settings.register_profile("explore", **TIMELESS)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Pools of persistent worker processes: `workers(world_size).run(fn, *args)`."""
    pools = Workers()
    yield pools
    pools.close()


def pytest_collection_finish() -> None:
    """What has been imported so far stays: each collection of garbage looks through what came since."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # at its end the interpreter looks for cycles in all of it, and extensions for what they have left


# ---- which process runs which files ------------------------------------------------------------------------------------
# Files that share a framework which every worker process would have to import, or whose ranks are one job. Longest first.
TOGETHER = {
    "deepspeed": ("tests/parity/deepspeed/", "tests/packaging/test_configs.py"),
    "accelerate": ("tests/parity/accelerate/",),
}
APART = "tests/parity/sweep/"  # minutes each, and nothing shared: any process takes the next
LAST = "tests/unit/"  # short files: no process is left alone with a long one


def together(nodeid: str) -> str:
    """What a test is scheduled with: its framework's files, nothing, or its file."""
    for name, paths in TOGETHER.items():
        if nodeid.startswith(paths):
            return name
    return nodeid if nodeid.startswith(APART) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but what takes longest begins first: TOGETHER's files in one process each, then APART's tests."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            apart = [name for name in self.workqueue if name.startswith(APART)]
            for name in reversed([*TOGETHER, *apart]):
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
            for name in [name for name in self.workqueue if name.startswith(LAST)]:
                self.workqueue.move_to_end(name)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


# ---- no test sees another ----------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's random numbers depend on the test alone; variables and the working folder are afterwards what they were."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    before = (_variables(), os.getcwd())
    yield
    after = (_variables(), os.getcwd())
    if after != before:
        changed = sorted(str(name) for name, _ in set(before[0].items()) ^ set(after[0].items()))
        os.environ.update(before[0])
        for name in after[0].keys() - before[0].keys():
            del os.environ[name]
        os.chdir(before[1])
        pytest.fail(f"the test left the environment changed: variables {changed}, working folder {after[1]}", pytrace=False)


def _variables() -> dict[str, str]:
    """All but those that pytest and torch's compiler set for themselves."""
    own = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}
