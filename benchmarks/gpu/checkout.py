"""Runs from a checkout with nothing installed: a GPU machine may have neither pip nor a network.

The source folders integrations/ and examples/ lie at the top level and are installed inside `commfuse_dp`. Where the package is
not installed, the repository's root is added to the places where submodules of `commfuse_dp` are looked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"pydantic": "pydantic>=2.7"}  # what commfuse_dp.apply needs besides torch: the part training; the others do not


def prepare() -> None:
    """Make `commfuse_dp.integrations` and `commfuse_dp.examples` importable. Call it before anything of them is imported; twice
    does no harm."""
    import commfuse_dp

    if importlib.util.find_spec("commfuse_dp.integrations") is None:
        commfuse_dp.__path__.append(str(ROOT))


def missing() -> list[str]:
    """Requirements of commfuse_dp.apply that are not installed, as pip names them."""
    return [requirement for name, requirement in NEEDED.items() if importlib.util.find_spec(name) is None]


def advice() -> str | None:
    """One line on what is missing, what cannot run without it and what can; None if nothing is."""
    absent = missing()
    if not absent:
        return None
    command = f"{sys.executable} -m pip install {' '.join(map(repr, absent))}"
    return (
        f"{', '.join(absent)} is not installed: `{command}`, or put a folder that has it on PYTHONPATH. Without it the part "
        "training cannot run, and counts as wrong; overlap is left out; all other parts run."
    )


def environment() -> dict[str, str]:
    """For child processes: the checkout comes first on the path."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}
