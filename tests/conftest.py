"""Fixtures for all rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Pools of persistent worker processes: `workers(world_size).run(fn, *args)`."""
    pools = Workers()
    yield pools
    pools.close()
