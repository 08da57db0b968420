"""Marks: of cells of a test's table that `make test` leaves to `make test-all`, because other cells of it have each of their
parts; of tests that need a program which a machine may not have."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for CPU code")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
