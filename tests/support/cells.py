"""Cells of a test's table that `make test` leaves to `make test-all`, because other cells of it have each of their parts."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
