"""Fixtures for all rooms."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.workers import Workers

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, which ignores Ctrl-C there. Programs started from here would inherit that, and
    # the tests that interrupt them would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Pools of persistent worker processes: `workers(world_size).run(fn, *args)`."""
    pools = Workers()
    yield pools
    pools.close()
